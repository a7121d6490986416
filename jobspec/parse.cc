#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/yaml.h>

#include <filesystem>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "jobspec/fields/fields.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/fields/text.h"
#include "jobspec/jobspec.h"
#include "jobspec/mistakes.h"

namespace ringleader::jobspec {
namespace {

namespace fs = std::filesystem;

// A job file is a page of text. The bound keeps garbage from costing time; towers of brackets or of
// indentation are refused by the parser before they cost its stack.
constexpr size_t kMaxBytes = size_t{256} * 1024;

std::string Child(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : absl::StrCat(parent, ".", name);
}

// What is wrong with a path that the table does not have, as a mistake of the field that was meant.
struct UnknownField {
  explicit UnknownField(const std::string& path) : meant(NearestField(path)) {
    const std::string hint = meant.empty()
                                 ? "the fields are in docs/job_file.md and ringctl submit --help"
                                 : absl::StrCat("did you mean ", meant, "?");
    // Whichever field of this section was meant.
    if (meant.empty()) meant = path.substr(0, path.find('.'));
    if (path == "data.sequence_lengths") {
      message =
          "data.sequence_lengths: is not there any more; set data.batching: samples, with which "
          "each "
          "document is a sample of its own length, and remove it";
    } else if (path == "attention.balance_tolerance") {
      message =
          "attention.balance_tolerance: is not there any more, for it evened out layers, which run "
          "one after another; remove it";
    } else {
      message = absl::StrCat(Printable(path), ": unknown field; ", hint);
    }
  }
  std::string meant;
  std::string message;
};

// Walks the document along the table of fields, so that only what the table knows is ever followed:
// aliases cannot blow it up. What it finds wrong is left unset.
class Parser {
 public:
  Parser(const std::string& file_name, v1::JobSpec* spec, Mistakes* mistakes)
      : file_name_(file_name), spec_(spec), mistakes_(mistakes) {}

  void ParseSection(const YAML::Node& node, const std::string& path) {
    if (!node.IsMap()) {
      const std::string what = path.empty() ? "a job file" : path;
      return Error(path, node, absl::StrCat(what, ": key: value pairs are expected"));
    }
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (mistakes_->full()) return;
      if (!entry.first.IsScalar()) {
        Error(path, entry.first, "a field name is expected");
        continue;
      }
      const std::string name = entry.first.Scalar();
      const std::string child = Child(path, name);
      if (!seen.insert(name).second) {
        Error(child, entry.first, absl::StrCat(Printable(child), ": given twice; keep one"));
        continue;
      }
      ParseEntry(entry.first, entry.second, child);
    }
  }

  void ParseField(const YAML::Node& node, const Field& field) {
    const Slot slot = FindSlot(spec_, field.path);
    if (slot.descriptor->is_map()) return ParseLabels(node);
    if (!slot.descriptor->is_repeated()) return ParseScalar(node, field, slot);
    slot.message->GetReflection()->ClearField(slot.message, slot.descriptor);
    if (!node.IsSequence()) return Expected(node, field);
    for (const auto& element : node) {
      if (mistakes_->full()) return;
      ParseScalar(element, field, slot);
    }
  }

 private:
  void ParseEntry(const YAML::Node& key, const YAML::Node& value, const std::string& path) {
    if (const Field* field = FindField(path)) return ParseField(value, *field);
    // A section is a message that some row of the table lies in.
    if (FindDescriptor(path) != nullptr) return ParseSection(value, path);
    const UnknownField unknown(path);
    Error(unknown.meant, key, unknown.message);
  }

  void ParseScalar(const YAML::Node& node, const Field& field, const Slot& slot) {
    if (!node.IsScalar()) return Expected(node, field);
    const absl::Status status = SetScalar(slot, field, node.Scalar());
    if (status.ok()) return;
    Error(field.path, node, absl::StrCat(std::string(field.path), ": ", status.message()));
  }

  void ParseLabels(const YAML::Node& node) {
    if (!node.IsMap()) return Error("labels", node, "labels: key: value pairs are expected");
    for (const auto& entry : node) {
      if (mistakes_->full()) return;
      if (!entry.first.IsScalar() || !entry.second.IsScalar()) {
        Error("labels", entry.first, "labels: keys and values must be plain text");
        continue;
      }
      const bool is_new =
          spec_->mutable_labels()->insert({entry.first.Scalar(), entry.second.Scalar()}).second;
      if (is_new) continue;
      Error("labels", entry.first,
            absl::StrCat(Printable(Child("labels", entry.first.Scalar())),
                         ": given twice; keep one"));
    }
  }

  void Expected(const YAML::Node& node, const Field& field) {
    const char* found = node.IsMap()        ? "key: value pairs"
                        : node.IsSequence() ? "a list"
                                            : "nothing";
    Error(field.path, node,
          absl::StrCat(std::string(field.path), ": holds ",
                       node.IsScalar() ? "a single value" : found, "; give ", DescribeType(field)));
  }

  void Error(std::string_view path, const YAML::Node& node, const std::string& message) {
    mistakes_->Add(path, node.Mark().is_null()
                             ? absl::StrCat(file_name_, ": ", message)
                             : absl::StrCat(file_name_, ":", node.Mark().line + 1, ": ", message));
  }

  const std::string& file_name_;
  v1::JobSpec* spec_;
  Mistakes* mistakes_;
};

// yaml-cpp throws; nothing of it leaves this file.
template <typename Function>
absl::Status WithYaml(const std::string& file_name, Function function) {
  try {
    return function();
  } catch (const YAML::DeepRecursion& e) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ":", e.mark.line + 1, ": nested too deep, beyond ", e.depth() - 1,
                     " levels; a job file has no more than sections within sections"));
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

// The first field of a section; "" if it is none.
std::string FirstFieldOf(const std::string& section) {
  for (const Field& field : Fields()) {
    if (field.path.starts_with(section + ".")) return std::string(field.path);
  }
  return "";
}

void ApplyOverride(const std::string& text, v1::JobSpec* spec, Mistakes* mistakes) {
  const std::string source = absl::StrCat("--set ", Printable(text));
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return mistakes->Add("",
                         absl::StrCat(source, ": write path=value, such as training.steps=100"));
  }
  const std::string path = text.substr(0, equals);
  if (const absl::Status bytes = CheckBytes(text, source); !bytes.ok()) {
    return mistakes->Add(path, bytes);
  }
  const std::string value = text.substr(equals + 1);
  if (path.starts_with("labels.") && path.size() > 7) {
    const std::string key = path.substr(7);
    if (value.empty()) {
      spec->mutable_labels()->erase(key);
    } else {
      (*spec->mutable_labels())[key] = value;
    }
    return;
  }
  const Field* field = FindField(path);
  if (field == nullptr) {
    if (const std::string first = FirstFieldOf(path); !first.empty()) {
      return mistakes->Add(path, absl::StrCat("--set ", path, ": is a section; set its fields one ",
                                              "by one, such as ", first, "=VALUE"));
    }
    const UnknownField unknown(path);
    return mistakes->Add(unknown.meant, absl::StrCat("--set ", unknown.message));
  }
  if (value.empty()) {
    Clear(path, spec);
    return;
  }
  const Slot slot = FindSlot(spec, path);
  if (slot.descriptor->is_map() || slot.descriptor->is_repeated()) {
    return mistakes->Add(path, WithYaml(source, [&] {
                           Parser(source, spec, mistakes).ParseField(YAML::Load(value), *field);
                           return absl::OkStatus();
                         }));
  }
  const absl::Status status = SetScalar(slot, *field, value);
  if (!status.ok()) mistakes->Add(path, absl::StrCat("--set ", path, ": ", status.message()));
}

// "training.steps" of "training.steps=100".
std::string OverriddenPath(const std::string& text) {
  return text.substr(0, text.find('='));
}

// Whether `file` says of the field what its default would be.
bool IsDefault(const Field& field, const v1::JobSpec& file) {
  v1::JobSpec said = file, left_out = file;
  if (FindSlot(&said, field.path).descriptor->is_repeated()) return false;
  Clear(field.path, &left_out);
  ApplyDefaults(&left_out);
  const auto text = [&](v1::JobSpec* spec) {
    const Slot slot = FindSlot(spec, field.path);
    return GetScalar(*slot.message, slot.descriptor);
  };
  return IsSet(file, field.path) && text(&said) == text(&left_out);
}

// Whoever overrides the pattern, the ring or what else decides which fields fit does not mean to
// keep the file's fields for the one before. His own overrides stay, and are errors where they do
// not fit, as are fields that did not fit in `file` either.
void DropMisfits(const std::vector<std::string>& overrides, const v1::JobSpec& file,
                 v1::JobSpec* spec) {
  if (overrides.empty()) return;
  std::set<std::string> paths;
  for (const std::string& text : overrides) paths.insert(OverriddenPath(text));
  v1::JobSpec before = file, effective = *spec;
  ApplyDefaults(&before);
  ApplyDefaults(&effective);
  const bool other_pattern = before.attention().pattern() != effective.attention().pattern();
  for (const Field& field : Fields()) {
    if (paths.contains(std::string(field.path)) || !IsSet(*spec, field.path)) continue;
    const bool fits_no_longer = AnyFits(field.path, before) && !AnyFits(field.path, effective);
    // The former pattern's default is no choice for the new one.
    if (fits_no_longer || (other_pattern && HasDefaultByPattern(field) && IsDefault(field, file))) {
      Clear(field.path, spec);
    }
  }
}

// Only shells know what '~' stands for: it would be a folder of this name.
bool IsInHome(std::string_view path) {
  return path == "~" || path.starts_with("~/");
}

void ResolvePaths(const std::string& base_directory, v1::JobSpec* spec, Mistakes* mistakes) {
  for (const Field& field : Fields()) {
    if (!field.is_path || !IsSet(*spec, field.path)) continue;
    const Slot slot = FindSlot(spec, field.path);
    const std::string value = GetScalar(*slot.message, slot.descriptor);
    if (value == field.default_value) continue;  // model.init: random
    if (IsInHome(value)) {
      const std::string name(field.path);
      mistakes->Add(name, absl::StrCat(name, ": '", Printable(value),
                                       "' begins with '~', which stands for no folder here; write "
                                       "the home folder out, such as /home/me"));
      continue;
    }
    const fs::path path(value);
    if (path.is_absolute()) continue;
    std::string resolved = (fs::path(base_directory) / path).lexically_normal().string();
    if (resolved.size() > 1 && resolved.ends_with('/')) resolved.pop_back();
    slot.message->GetReflection()->SetString(slot.message, slot.descriptor, resolved);
  }
}

// What lies in the file and in the overrides, as far as it is well. An error is one that nothing
// can be read beyond.
absl::StatusOr<v1::JobSpec> ReadFields(std::string_view yaml, const ParseOptions& options,
                                       Mistakes* mistakes) {
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
    Parser(options.file_name, &spec, mistakes).ParseSection(documents[0], "");
    return absl::OkStatus();
  }));
  const v1::JobSpec file = spec;
  for (const std::string& text : options.overrides) ApplyOverride(text, &spec, mistakes);
  DropMisfits(options.overrides, file, &spec);
  if (!options.base_directory.empty()) ResolvePaths(options.base_directory, &spec, mistakes);
  return spec;
}

}  // namespace

absl::StatusOr<v1::JobSpec> ParseJobFile(std::string_view yaml, const ParseOptions& options) {
  Mistakes mistakes;
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadFields(yaml, options, &mistakes));
  RETURN_IF_ERROR(mistakes.status());
  return spec;
}

absl::StatusOr<v1::JobSpec> LoadJobFile(const std::string& path,
                                        const std::vector<std::string>& overrides) {
  ASSIGN_OR_RETURN(const std::string text, ReadFlagFile("job file", path, kMaxBytes));
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  Mistakes mistakes;
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadFields(text,
                                                {.overrides = overrides,
                                                 .base_directory = absolute.parent_path().string(),
                                                 .file_name = path},
                                                &mistakes));
  if (mistakes.status().ok()) return spec;
  // What else is wrong, too, so that it need not be found one by one.
  FindMistakes(spec, &mistakes);
  return mistakes.status();
}

}  // namespace ringleader::jobspec
