#include "coordinator/access/access_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "coordinator/store/store.h"

namespace ringleader::access {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 20;
constexpr absl::string_view kScheme = "ringleader://";
constexpr char kShutOut[] = "none";

template <typename... Parts>
absl::Status Invalid(const YAML::Node& node, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("line ", node.Mark().line + 1, ": ", parts...));
}

// Whether a caller's name and project can be such, wherever they come from.
absl::Status CheckCaller(const Caller& caller) {
  if (!IsCallerName(caller.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", absl::CHexEscape(caller.name),
                     "\" is no name: give 1 to 128 letters, digits and -_.@+"));
  }
  if (!caller.project.empty() && !IsCallerName(caller.project)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", absl::CHexEscape(caller.project),
                     "\" is no project: give 1 to 128 letters, digits and -_.@+"));
  }
  if (caller.role == v1::NODE && !store::NodeIdFromName("nodes/" + caller.name).ok()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", caller.name, "\" is no node's name"));
  }
  return absl::OkStatus();
}

absl::Status SetField(const std::string& key, const std::string& value, Caller* entry,
                      bool* has_role) {
  if (key == "uri" || key == "dns" || key == "email" || key == "common_name") {
    if (!entry->certificate.empty()) {
      return absl::InvalidArgumentError("give one of uri, dns, email and common_name");
    }
    if (value.empty()) return absl::InvalidArgumentError(absl::StrCat(key, " is empty"));
    // As CertificateNames::Texts() has them.
    const bool has_case = key == "uri" || key == "common_name";
    entry->certificate = absl::StrCat(key, " ", has_case ? value : absl::AsciiStrToLower(value));
  } else if (key == "role") {
    *has_role = true;
    entry->role = ParseRole(value);
    if (entry->role == v1::ROLE_UNSPECIFIED && value != kShutOut) {
      return absl::InvalidArgumentError(
          absl::StrCat("role: ", value, " is none of admin, user, viewer, node and none"));
    }
  } else if (key == "name") {
    entry->name = value;
  } else if (key == "project") {
    entry->project = value;
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown key ", key, "; known are uri, dns, email, common_name, role, name and project"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Caller> ParseEntry(const YAML::Node& node) {
  Caller entry;
  bool has_role = false;
  if (!node.IsMap()) return Invalid(node, "key: value pairs are expected");
  for (const auto& field : node) {
    const absl::Status set =
        SetField(field.first.as<std::string>(), field.second.as<std::string>(), &entry, &has_role);
    if (!set.ok()) return Invalid(field.first, set.message());
  }
  if (entry.certificate.empty()) return Invalid(node, "uri, dns, email or common_name is missing");
  if (!has_role) return Invalid(node, "role is missing");
  if (entry.role == v1::ROLE_UNSPECIFIED) return entry;
  if (const absl::Status valid = CheckCaller(entry); !valid.ok()) {
    return Invalid(node, valid.message());
  }
  return entry;
}

// The caller of "ringleader://node/a" or "ringleader://user/ocean/alice".
absl::StatusOr<Caller> ParseUri(const std::string& uri) {
  const std::vector<std::string> parts =
      absl::StrSplit(absl::string_view(uri).substr(kScheme.size()), '/');
  Caller caller;
  caller.role = ParseRole(parts[0]);
  if (caller.role == v1::ROLE_UNSPECIFIED || parts.size() < 2 || parts.size() > 3) {
    return absl::UnauthenticatedError(
        absl::StrCat("the certificate's ", absl::CHexEscape(uri),
                     " is not of the form ringleader://ROLE/[PROJECT/]NAME with a role of admin, "
                     "user, viewer and node"));
  }
  caller.name = parts.back();
  if (parts.size() == 3) caller.project = parts[1];
  caller.certificate = "uri " + uri;
  if (const absl::Status valid = CheckCaller(caller); !valid.ok()) {
    return absl::UnauthenticatedError(absl::StrCat("the certificate's ", absl::CHexEscape(uri),
                                                   ": ", std::string(valid.message())));
  }
  return caller;
}

std::string Describe(const CertificateNames& names) {
  return absl::CHexEscape(absl::StrJoin(names.Texts(), ", ").substr(0, 200));
}

}  // namespace

absl::StatusOr<std::string> AccessFile::Read(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFlagFile("--access", path, kMaxFileBytes);
  if (!text.ok()) return absl::FailedPreconditionError(text.status().message());
  return text;
}

absl::StatusOr<AccessFile> AccessFile::Parse(const std::string& text, const std::string& path) {
  const auto explain = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("--access: ", path, ": ", what));
  };
  AccessFile file;
  try {
    const YAML::Node root = YAML::Load(text);
    if (!root.IsMap()) return explain("key: value pairs are expected");
    for (const auto& item : root) {
      const auto key = item.first.as<std::string>();
      if (key == "roles_in_certificates") {
        file.roles_in_certificates_ = item.second.as<bool>();
      } else if (key == "plain_text_is_admin") {
        file.plain_text_is_admin_ = item.second.as<bool>();
      } else if (key == "certificates" && (item.second.IsSequence() || item.second.IsNull())) {
        for (const YAML::Node& node : item.second) {
          absl::StatusOr<Caller> entry = ParseEntry(node);
          if (!entry.ok()) return explain(std::string(entry.status().message()));
          file.entries_.push_back(*std::move(entry));
        }
      } else {
        return explain(absl::StrCat("line ", item.first.Mark().line + 1, ": unknown key ", key,
                                    "; known are certificates (a list), roles_in_certificates and "
                                    "plain_text_is_admin"));
      }
    }
  } catch (const YAML::Exception& error) {
    return explain(error.what());
  }
  return file;
}

absl::Status AccessFile::CheckNotShutOut(const CertificateNames& names) const {
  const auto entry = std::ranges::find_if(
      entries_, [&](const Caller& caller) { return names.Hold(caller.certificate); });
  if (entry == entries_.end() || entry->role != v1::ROLE_UNSPECIFIED) return absl::OkStatus();
  return absl::UnauthenticatedError(
      absl::StrCat("the certificate (", Describe(names), ") is shut out by the access file"));
}

absl::StatusOr<Caller> AccessFile::Find(const CertificateNames& names) const {
  RETURN_IF_ERROR(CheckNotShutOut(names));
  for (const Caller& entry : entries_) {
    if (names.Hold(entry.certificate)) return entry;
  }
  std::vector<std::string> uris;
  for (const std::string& uri : names.uris) {
    if (absl::StartsWith(uri, kScheme)) uris.push_back(uri);
  }
  if (roles_in_certificates_ && uris.size() == 1) return ParseUri(uris[0]);
  return absl::UnauthenticatedError(absl::StrCat(
      "the certificate (", Describe(names), ") has no role: ",
      !roles_in_certificates_ ? "the coordinator's access file has no entry for it"
      : uris.empty() ? "it has no URI ringleader://…, and the access file no entry for it"
                     : "it has several URIs ringleader://…; give it one"));
}

}  // namespace ringleader::access
