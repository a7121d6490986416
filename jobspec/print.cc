#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/text/controls.h"
#include "jobspec/fields/fields.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/fields/text.h"
#include "jobspec/jobspec.h"

namespace ringleader::jobspec {
namespace {

// Text is quoted where a reader of YAML would take it for something else.
void EmitScalar(const std::string& value, const google::protobuf::FieldDescriptor* descriptor,
                YAML::Emitter* out) {
  using google::protobuf::FieldDescriptor;
  const bool is_text = descriptor->cpp_type() == FieldDescriptor::CPPTYPE_STRING ||
                       descriptor->cpp_type() == FieldDescriptor::CPPTYPE_ENUM;
  if (is_text && LooksLikeOtherThanText(value)) *out << YAML::DoubleQuoted;
  *out << value;
}

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
    for (int i = 0; i < count; ++i) {
      EmitScalar(GetScalar(*message, descriptor, i), descriptor, out);
    }
    *out << YAML::EndSeq;
    return;
  }
  EmitScalar(GetScalar(*message, descriptor), descriptor, out);
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
  std::vector<std::string> sections;  // that are open, the outermost first
  for (const Field& field : Fields()) {
    const bool is_set = IsSet(spec, field.path);
    if (!is_set && !(complete && IsOpen(spec, field))) continue;
    if (&field != FindField(field.path)) continue;
    std::vector<std::string> names =
        absl::StrSplit(absl::string_view(field.path.data(), field.path.size()), '.');
    const std::string name = std::move(names.back());
    names.pop_back();
    const auto [open, wanted] =
        std::mismatch(sections.begin(), sections.end(), names.begin(), names.end());
    for (auto closed = open; closed != sections.end(); ++closed) out << YAML::EndMap;
    for (auto opened = wanted; opened != names.end(); ++opened) {
      out << YAML::Key << *opened << YAML::Value << YAML::BeginMap;
    }
    sections = std::move(names);
    out << YAML::Key << name << YAML::Value;
    if (is_set || field.default_value != "auto") {
      EmitField(spec, field, &out);
    } else {
      out << "auto";
    }
    const auto note = notes.find(std::string(field.path));
    if (note != notes.end()) out << YAML::Comment(EscapeControls(note->second));
  }
  for (size_t i = 0; i < sections.size(); ++i) out << YAML::EndMap;
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
