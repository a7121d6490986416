#include <yaml-cpp/yaml.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "jobspec/fields.h"
#include "jobspec/jobspec.h"
#include "jobspec/scalars.h"
#include "jobspec/text.h"

namespace ringleader::jobspec {
namespace {

namespace fs = std::filesystem;
using google::protobuf::FieldDescriptor;

// A job file is a page of text. The bounds keep garbage from costing time, and bracket towers from
// the parser's stack.
constexpr size_t kMaxBytes = size_t{256} * 1024;
constexpr int kMaxDepth = 64;

std::string Child(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : absl::StrCat(parent, ".", name);
}

absl::Status UnknownField(const std::string& path) {
  if (path == "data.sequence_lengths") {
    return absl::InvalidArgumentError(
        "data.sequence_lengths: is not there any more; set data.batching: samples, with which each "
        "document is a sample of its own length, and remove it");
  }
  if (path == "attention.balance_tolerance") {
    return absl::InvalidArgumentError(
        "attention.balance_tolerance: is not there any more, for it evened out layers, which run "
        "one "
        "after another; remove it");
  }
  return absl::InvalidArgumentError(
      absl::StrCat(Printable(path), ": unknown field; did you mean ", NearestField(path), "?"));
}

// Walks the document along the table of fields, so that only what the table knows is ever followed:
// aliases cannot blow it up.
class Parser {
 public:
  Parser(const std::string& file_name, v1::JobSpec* spec) : file_name_(file_name), spec_(spec) {}

  absl::Status ParseSection(const YAML::Node& node, const std::string& path) {
    if (!node.IsMap()) {
      const std::string what = path.empty() ? "a job file" : path;
      return Error(node, absl::StrCat(what, ": key: value pairs are expected"));
    }
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) return Error(entry.first, "a field name is expected");
      const std::string name = entry.first.Scalar();
      const std::string child = Child(path, name);
      if (!seen.insert(name).second) {
        return Error(entry.first, absl::StrCat(Printable(child), ": given twice; keep one"));
      }
      RETURN_IF_ERROR(ParseEntry(entry.first, entry.second, child));
    }
    return absl::OkStatus();
  }

  absl::Status ParseField(const YAML::Node& node, const Field& field) {
    const Slot slot = FindSlot(spec_, field.path);
    if (slot.descriptor->is_map()) return ParseLabels(node);
    if (!slot.descriptor->is_repeated()) return ParseScalar(node, field, slot);
    slot.message->GetReflection()->ClearField(slot.message, slot.descriptor);
    if (!node.IsSequence()) return Expected(node, field);
    for (const auto& element : node) RETURN_IF_ERROR(ParseScalar(element, field, slot));
    return absl::OkStatus();
  }

 private:
  absl::Status ParseEntry(const YAML::Node& key, const YAML::Node& value, const std::string& path) {
    if (const Field* field = FindField(path)) return ParseField(value, *field);
    // A section is a message that some row of the table lies in.
    const FieldDescriptor* descriptor = FindDescriptor(path);
    if (descriptor == nullptr) return Wrap(key, UnknownField(path));
    return ParseSection(value, path);
  }

  absl::Status ParseScalar(const YAML::Node& node, const Field& field, const Slot& slot) {
    if (!node.IsScalar()) return Expected(node, field);
    absl::Status status = SetScalar(slot, field, node.Scalar());
    if (status.ok()) return status;
    return Error(node, absl::StrCat(std::string(field.path), ": ", status.message()));
  }

  absl::Status ParseLabels(const YAML::Node& node) {
    if (!node.IsMap()) return Error(node, "labels: key: value pairs are expected");
    for (const auto& entry : node) {
      if (!entry.first.IsScalar() || !entry.second.IsScalar()) {
        return Error(entry.first, "labels: keys and values must be plain text");
      }
      const bool is_new =
          spec_->mutable_labels()->insert({entry.first.Scalar(), entry.second.Scalar()}).second;
      if (!is_new) {
        return Error(entry.first, absl::StrCat(Printable(Child("labels", entry.first.Scalar())),
                                               ": given twice; keep one"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Expected(const YAML::Node& node, const Field& field) const {
    const char* found = node.IsMap()        ? "key: value pairs"
                        : node.IsSequence() ? "a list"
                                            : "nothing";
    return Error(node, absl::StrCat(std::string(field.path), ": holds ",
                                    node.IsScalar() ? "a single value" : found, "; give ",
                                    DescribeType(field)));
  }

  absl::Status Error(const YAML::Node& node, const std::string& message) const {
    return absl::InvalidArgumentError(
        node.Mark().is_null() ? absl::StrCat(file_name_, ": ", message)
                              : absl::StrCat(file_name_, ":", node.Mark().line + 1, ": ", message));
  }
  absl::Status Wrap(const YAML::Node& node, const absl::Status& status) const {
    return Error(node, std::string(status.message()));
  }

  const std::string& file_name_;
  v1::JobSpec* spec_;
};

// yaml-cpp throws; nothing of it leaves this file.
template <typename Function>
absl::Status WithYaml(const std::string& file_name, Function function) {
  try {
    return function();
  } catch (const YAML::Exception& e) {
    return absl::InvalidArgumentError(
        e.mark.is_null()
            ? absl::StrCat(file_name, ": no valid YAML: ", e.msg)
            : absl::StrCat(file_name, ":", e.mark.line + 1, ": no valid YAML: ", e.msg));
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": no valid YAML: ", e.what()));
  }
}

absl::Status CheckBytes(std::string_view text, const std::string& what) {
  if (text.size() > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", text.size(), " bytes; a job file has at most ", kMaxBytes));
  }
  if (!IsUtf8(text)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": not UTF-8 text"));
  }
  int depth = 0;
  for (const char c : text) {
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > kMaxDepth) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": brackets nested more than ", kMaxDepth, " deep"));
    }
  }
  return absl::OkStatus();
}

// Also the section within a section that holds nothing then.
void Clear(std::string_view path, v1::JobSpec* spec) {
  const Slot slot = FindSlot(spec, path);
  slot.message->GetReflection()->ClearField(slot.message, slot.descriptor);
  const std::string_view section = path.substr(0, path.rfind('.'));
  if (section.find('.') != std::string_view::npos && slot.message->ByteSizeLong() == 0) {
    Clear(section, spec);
  }
}

absl::Status ApplyOverride(const std::string& text, v1::JobSpec* spec) {
  const std::string source = absl::StrCat("--set ", Printable(text));
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": write path=value, such as training.steps=100"));
  }
  RETURN_IF_ERROR(CheckBytes(text, source));
  const std::string path = text.substr(0, equals);
  const std::string value = text.substr(equals + 1);
  if (path.starts_with("labels.") && path.size() > 7) {
    const std::string key = path.substr(7);
    if (value.empty()) {
      spec->mutable_labels()->erase(key);
    } else {
      (*spec->mutable_labels())[key] = value;
    }
    return absl::OkStatus();
  }
  const Field* field = FindField(path);
  if (field == nullptr) {
    const absl::Status unknown = UnknownField(path);
    return absl::InvalidArgumentError(absl::StrCat("--set ", unknown.message()));
  }
  if (value.empty()) {
    Clear(path, spec);
    return absl::OkStatus();
  }
  const Slot slot = FindSlot(spec, path);
  if (slot.descriptor->is_map() || slot.descriptor->is_repeated()) {
    return WithYaml(source,
                    [&] { return Parser(source, spec).ParseField(YAML::Load(value), *field); });
  }
  absl::Status status = SetScalar(slot, *field, value);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("--set ", path, ": ", status.message()));
}

// "training.steps" of "training.steps=100".
std::string OverriddenPath(const std::string& text) {
  return text.substr(0, text.find('='));
}

// Whoever overrides the pattern (or what else decides which fields fit) does not mean to keep the
// file's fields for the one before. His own overrides stay, and are errors where they do not fit.
void DropMisfits(const std::vector<std::string>& overrides, v1::JobSpec* spec) {
  std::set<std::string> paths;
  for (const std::string& text : overrides) paths.insert(OverriddenPath(text));
  const bool decides = paths.contains("attention.pattern") || paths.contains("attention.select") ||
                       paths.contains("attention.density") || paths.contains("data.batching") ||
                       paths.contains("parallelism.layout") ||
                       paths.contains("training.schedule") || paths.contains("resources.engine");
  if (!decides) return;
  v1::JobSpec effective = *spec;
  ApplyDefaults(&effective);
  for (const Field& field : Fields()) {
    if (AnyFits(field.path, effective) || paths.contains(std::string(field.path))) continue;
    if (!IsSet(*spec, field.path)) continue;
    Clear(field.path, spec);
  }
}

void ResolvePaths(const std::string& base_directory, v1::JobSpec* spec) {
  for (const Field& field : Fields()) {
    if (!field.is_path || !IsSet(*spec, field.path)) continue;
    const Slot slot = FindSlot(spec, field.path);
    const std::string value = GetScalar(*slot.message, slot.descriptor);
    if (value == field.default_value) continue;  // model.init: random
    const fs::path path(value);
    if (path.is_absolute()) continue;
    std::string resolved = (fs::path(base_directory) / path).lexically_normal().string();
    if (resolved.size() > 1 && resolved.ends_with('/')) resolved.pop_back();
    slot.message->GetReflection()->SetString(slot.message, slot.descriptor, resolved);
  }
}

}  // namespace

absl::StatusOr<v1::JobSpec> ParseJobFile(std::string_view yaml, const ParseOptions& options) {
  RETURN_IF_ERROR(CheckBytes(yaml, options.file_name));
  v1::JobSpec spec;
  RETURN_IF_ERROR(WithYaml(options.file_name, [&]() -> absl::Status {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(yaml));
    if (documents.empty() || documents[0].IsNull()) {
      return absl::InvalidArgumentError(
          absl::StrCat(options.file_name, ": empty; see docs/job_file.md"));
    }
    if (documents.size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(options.file_name, ": ", documents.size(),
                                                     " documents; a job file has one"));
    }
    return Parser(options.file_name, &spec).ParseSection(documents[0], "");
  }));
  for (const std::string& text : options.overrides) {
    RETURN_IF_ERROR(ApplyOverride(text, &spec));
  }
  DropMisfits(options.overrides, &spec);
  if (!options.base_directory.empty()) ResolvePaths(options.base_directory, &spec);
  return spec;
}

absl::StatusOr<v1::JobSpec> LoadJobFile(const std::string& path,
                                        const std::vector<std::string>& overrides) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  }
  if (const auto size = fs::file_size(path, error); error || size > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": more than ", kMaxBytes, " bytes; this is no job file"));
  }
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (!file || !(text << file.rdbuf())) {
    return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be read (or is empty)"));
  }
  const fs::path absolute = fs::absolute(path, error);
  return ParseJobFile(text.str(), {.overrides = overrides,
                                   .base_directory = absolute.parent_path().string(),
                                   .file_name = path});
}

}  // namespace ringleader::jobspec
