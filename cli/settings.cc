#include <filesystem>
#include <map>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/files.h"
#include "base/net/token.h"
#include "base/process/config.h"
#include "base/status_macros.h"
#include "cli/context.h"
#include "jobspec/fields/text.h"

namespace ringleader::cli {
namespace {

namespace fs = std::filesystem;

constexpr char kDefaultAddress[] = "127.0.0.1:7070";

const char* FormatName(Format format) {
  switch (format) {
    case Format::kTable:
      return "table";
    case Format::kJson:
      return "json";
    case Format::kYaml:
      return "yaml";
    case Format::kCsv:
      return "csv";
    case Format::kJsonLines:
      return "jsonl";
    case Format::kName:
      return "name";
  }
  return "";
}

// --config, RINGLEADER_CONFIG, or the usual place, which need not exist.
std::string ConfigPath(const Context& context, bool* is_required) {
  *is_required = true;
  if (!context.config_path.empty()) return context.config_path;
  if (const auto path = context.environment("RINGLEADER_CONFIG")) return *path;
  *is_required = false;
  // By the XDG Base Directory Specification one that is empty or relative is not set.
  const auto folder = context.environment("XDG_CONFIG_HOME");
  if (folder && fs::path(*folder).is_absolute()) {
    return (fs::path(*folder) / "ringleader/config.yaml").string();
  }
  if (const auto home = context.environment("HOME")) {
    return (fs::path(*home) / ".config/ringleader/config.yaml").string();
  }
  return "";
}

absl::Status ReadSettings(const std::string& path,
                          const std::map<std::string, std::string*>& settings, bool* insecure) {
  ASSIGN_OR_RETURN(std::string text, ReadFlagFile("configuration file", path, kMaxConfigFileBytes));
  std::istringstream file(std::move(text));
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
  };
  const absl::StatusOr<std::vector<ConfigLine>> lines = ReadConfig(file);
  if (!lines.ok()) return wrong(lines.status().message());
  for (const auto& [name, values] : *lines) {
    const auto found = settings.find(name);
    if (found == settings.end() && name != "insecure") {
      // The names are those of the flags, as in the files of coordinator and worker.
      const std::string dashed = absl::StrReplaceAll(name, {{"_", "-"}});
      return wrong(absl::StrCat("unknown key ", jobspec::Printable(name),
                                settings.contains(dashed) ? "; did you mean " : "",
                                settings.contains(dashed) ? dashed + "?" : "",
                                "; known are address, output, tls-cert, tls-key, tls-ca, "
                                "token-file and insecure"));
    }
    if (values.size() != 1) return wrong(absl::StrCat(name, " takes one value"));
    if (found == settings.end()) {
      bool value = false;
      if (!absl::SimpleAtob(values.front(), &value)) {
        return wrong("insecure must be true or false");
      }
      *insecure = *insecure || value;
    } else if (found->second->empty()) {
      *found->second = values.front();
    }
  }
  return absl::OkStatus();
}

// --token-file, RINGLEADER_TOKEN, then the file that the configuration names.
absl::Status ResolveToken(const std::optional<std::string>& environment, bool has_flag,
                          Context* context) {
  if (!has_flag && environment) {
    context->token = *environment;
    return CheckTokenText(context->token, "RINGLEADER_TOKEN");
  }
  if (context->token_path.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(context->token, ReadTokenFile(context->token_path));
  return absl::OkStatus();
}

absl::Status ResolveFormat(Context* context) {
  std::map<std::string, Format> formats = {{"", Format::kTable},
                                           {"table", Format::kTable},
                                           {"json", Format::kJson},
                                           {"yaml", Format::kYaml}};
  for (const Format format : context->more_formats) formats[FormatName(format)] = format;
  const auto format = formats.find(context->format_name);
  if (format != formats.end()) {
    context->format = format->second;
    return absl::OkStatus();
  }
  std::string known = "table, json, yaml";
  for (const Format more : context->more_formats) absl::StrAppend(&known, ", ", FormatName(more));
  return absl::InvalidArgumentError(absl::StrCat(
      "output: '", jobspec::Printable(context->format_name), "' is not one of ", known));
}

}  // namespace

absl::Status ResolveSettings(Context* context) {
  if (context->address.empty()) {
    context->address = context->environment("RINGLEADER_ADDRESS").value_or("");
  }
  const bool has_token_flag = !context->token_path.empty();
  bool is_required = false;
  const std::string path = ConfigPath(*context, &is_required);
  std::error_code error;
  if (!path.empty() && (is_required || fs::exists(path, error))) {
    if (!fs::exists(path, error)) {
      return absl::NotFoundError(absl::StrCat("no configuration file ", path));
    }
    RETURN_IF_ERROR(ReadSettings(path,
                                 {{"address", &context->address},
                                  {"output", &context->format_name},
                                  {"tls-cert", &context->tls.cert_path},
                                  {"tls-key", &context->tls.key_path},
                                  {"tls-ca", &context->tls.ca_path},
                                  {"token-file", &context->token_path}},
                                 &context->tls.insecure));
  }
  if (context->address.empty()) context->address = kDefaultAddress;
  RETURN_IF_ERROR(ResolveToken(context->environment("RINGLEADER_TOKEN"), has_token_flag, context));
  return ResolveFormat(context);
}

int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return kUsage;
    case absl::StatusCode::kNotFound:
      return kNotFound;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kUnavailable;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
      return kConflict;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kForbidden;
    default:
      return kInternal;
  }
}

}  // namespace ringleader::cli
