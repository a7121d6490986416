#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <map>
#include <vector>

#include "jobspec/fields.h"
#include "jobspec/jobspec.h"
#include "jobspec/scalars.h"

namespace ringleader::jobspec {
namespace {

void EmitField(const v1::JobSpec& spec, const Field& field, YAML::Emitter* out) {
  if (field.path == "labels") {
    // Sorted: the message's map has no order.
    const std::map<std::string, std::string> labels(spec.labels().begin(), spec.labels().end());
    *out << YAML::BeginMap;
    for (const auto& [key, value] : labels) {
      *out << YAML::Key << YAML::DoubleQuoted << key << YAML::Value << YAML::DoubleQuoted << value;
    }
    *out << YAML::EndMap;
    return;
  }
  const auto [message, descriptor] = FindSlot(spec, field.path);
  if (descriptor->is_repeated()) {
    *out << YAML::Flow << YAML::BeginSeq;
    const int count = message->GetReflection()->FieldSize(*message, descriptor);
    for (int i = 0; i < count; ++i) *out << GetScalar(*message, descriptor, i);
    *out << YAML::EndSeq;
    return;
  }
  *out << GetScalar(*message, descriptor);
}

}  // namespace

std::string ToYaml(const v1::JobSpec& spec) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  std::string section;
  for (const Field& field : Fields()) {
    if (!IsSet(spec, field.path) || &field != FindField(field.path)) continue;
    const size_t dot = field.path.find('.');
    const std::string parent(dot == std::string_view::npos ? "" : field.path.substr(0, dot));
    if (parent != section) {
      if (!section.empty()) out << YAML::EndMap;
      if (!parent.empty()) out << YAML::Key << parent << YAML::Value << YAML::BeginMap;
      section = parent;
    }
    const std::string name(dot == std::string_view::npos ? field.path : field.path.substr(dot + 1));
    out << YAML::Key << name << YAML::Value;
    EmitField(spec, field, &out);
  }
  if (!section.empty()) out << YAML::EndMap;
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

std::string EnumText(v1::ParallelismSpec::Layout value) {
  return value == 0 ? "auto" : EnumeratorText(v1::ParallelismSpec::Layout_descriptor(), value);
}
std::string EnumText(v1::ParallelismSpec::Ring value) {
  return value == 0 ? "auto" : EnumeratorText(v1::ParallelismSpec::Ring_descriptor(), value);
}

}  // namespace ringleader::jobspec
