#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <map>
#include <vector>

#include "jobspec/fields.h"
#include "jobspec/jobspec.h"
#include "jobspec/scalars.h"
#include "jobspec/text.h"

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

// Whether a complete file has the field although it is not set: its default leaves it open.
bool IsOpen(const v1::JobSpec& spec, const Field& field) {
  return AnyFits(field.path, spec) &&
         (field.default_value == "auto" || field.default_value == "[]");
}

std::string Emit(const v1::JobSpec& spec, bool complete,
                 const std::map<std::string, std::string>& notes) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  std::string section;
  for (const Field& field : Fields()) {
    const bool is_set = IsSet(spec, field.path);
    if (!is_set && !(complete && IsOpen(spec, field))) continue;
    if (&field != FindField(field.path)) continue;
    const size_t dot = field.path.find('.');
    const std::string parent(dot == std::string_view::npos ? "" : field.path.substr(0, dot));
    if (parent != section) {
      if (!section.empty()) out << YAML::EndMap;
      if (!parent.empty()) out << YAML::Key << parent << YAML::Value << YAML::BeginMap;
      section = parent;
    }
    const std::string name(dot == std::string_view::npos ? field.path : field.path.substr(dot + 1));
    out << YAML::Key << name << YAML::Value;
    if (is_set || field.default_value != "auto") {
      EmitField(spec, field, &out);
    } else {
      out << "auto";
    }
    const auto note = notes.find(std::string(field.path));
    if (note != notes.end()) out << YAML::Comment(EscapeControls(note->second));
  }
  if (!section.empty()) out << YAML::EndMap;
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace

std::string ToYaml(const v1::JobSpec& spec) {
  return Emit(spec, /*complete=*/false, {});
}

std::string ToCompleteYaml(const v1::JobSpec& spec,
                           const std::map<std::string, std::string>& notes) {
  return Emit(spec, /*complete=*/true, notes);
}

std::string EnumText(v1::ParallelismSpec::Layout value) {
  return value == 0 ? "auto" : EnumeratorText(v1::ParallelismSpec::Layout_descriptor(), value);
}
std::string EnumText(v1::ParallelismSpec::Ring value) {
  return value == 0 ? "auto" : EnumeratorText(v1::ParallelismSpec::Ring_descriptor(), value);
}

}  // namespace ringleader::jobspec
