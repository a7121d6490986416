#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/net/token.h"
#include "base/process/config.h"
#include "base/status_macros.h"
#include "cli/context.h"

namespace ringleader::cli {
namespace {

namespace fs = std::filesystem;

constexpr char kDefaultAddress[] = "127.0.0.1:7070";

// --config, RINGLEADER_CONFIG, or the usual place, which need not exist.
std::string ConfigPath(const Context& context, bool* is_required) {
  *is_required = true;
  if (!context.config_path.empty()) return context.config_path;
  if (const auto path = context.environment("RINGLEADER_CONFIG")) return *path;
  *is_required = false;
  if (const auto folder = context.environment("XDG_CONFIG_HOME")) {
    return (fs::path(*folder) / "ringleader/config.yaml").string();
  }
  if (const auto home = context.environment("HOME")) {
    return (fs::path(*home) / ".config/ringleader/config.yaml").string();
  }
  return "";
}

absl::Status ReadFile(const std::string& path, const std::map<std::string, std::string*>& settings,
                      bool* insecure) {
  std::ifstream file(path);
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
  };
  const absl::StatusOr<std::vector<ConfigLine>> lines = ReadConfig(file);
  if (!lines.ok()) return wrong(lines.status().message());
  for (const auto& [name, values] : *lines) {
    const auto found = settings.find(name);
    if (found == settings.end() && name != "insecure") {
      return wrong(
          absl::StrCat("unknown key ", name,
                       "; known are address, output, tls_cert, tls_key, tls_ca, token_file "
                       "and insecure"));
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
    RETURN_IF_ERROR(ReadFile(path,
                             {{"address", &context->address},
                              {"output", &context->format_name},
                              {"tls_cert", &context->tls.cert_path},
                              {"tls_key", &context->tls.key_path},
                              {"tls_ca", &context->tls.ca_path},
                              {"token_file", &context->token_path}},
                             &context->tls.insecure));
  }
  if (context->address.empty()) context->address = kDefaultAddress;
  RETURN_IF_ERROR(ResolveToken(context->environment("RINGLEADER_TOKEN"), has_token_flag, context));
  const std::map<std::string, Format> formats = {{"", Format::kTable},
                                                 {"table", Format::kTable},
                                                 {"json", Format::kJson},
                                                 {"yaml", Format::kYaml}};
  const auto format = formats.find(context->format_name);
  if (format == formats.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("output: '", context->format_name, "' is not one of table, json, yaml"));
  }
  context->format = format->second;
  return absl::OkStatus();
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
