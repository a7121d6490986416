// ringctl token: makes, lists and revokes what people show in place of a certificate.
#include "base/net/token.h"

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/printer.h"
#include "proto/timestamps.h"

namespace ringleader::cli {
namespace {

struct Flags {
  std::string user;
  std::string project;
  v1::Role role = v1::USER;
  int days = 30;
};

const std::map<std::string, v1::Role>& Roles() {
  static const auto* const kRoles = new std::map<std::string, v1::Role>{
      {"admin", v1::ADMIN}, {"user", v1::USER}, {"viewer", v1::VIEWER}};
  return *kRoles;
}

std::string Time(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%d %H:%M", ToTime(time), absl::UTCTimeZone());
}

std::vector<std::string> Row(const v1::Token& token) {
  std::string role;
  for (const auto& [name, value] : Roles()) {
    if (value == token.role()) role = name;
  }
  return {ShortName(token.name()),   token.user(),   token.project(), role,
          Time(token.expire_time()), token.creator()};
}

// The token is made here and shown once; its hash is all that leaves this machine.
absl::StatusOr<int> Create(const Context& context, const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  const std::string text = NewToken();
  v1::CreateTokenRequest request;
  request.set_request_id(NewRequestId());
  request.set_sha256(TokenHash(text));
  request.set_role(flags.role);
  request.set_user(flags.user);
  request.set_project(flags.project);
  request.set_lifetime_seconds(static_cast<uint64_t>(flags.days) * 24 * 3600);
  ASSIGN_OR_RETURN(const v1::Token token, client->CreateToken(request));
  nlohmann::ordered_json shown = ToJson(token);
  shown["token"] = text;
  PrintJson(context, shown, [&](std::ostream& out) { out << text << "\n"; });
  context.err << "ringctl: this is " << ShortName(token.name()) << ", of " << token.user()
              << " until " << Time(token.expire_time())
              << " UTC; it is shown this once: put it into a file for --token-file\n";
  return kOk;
}

absl::StatusOr<int> List(const Context& context) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const v1::ListTokensResponse response, client->ListTokens());
  Print(context, response, [&](std::ostream& out) {
    std::vector<std::vector<std::string>> rows = {
        {"TOKEN", "USER", "PROJECT", "ROLE", "EXPIRES (UTC)", "CREATOR"}};
    for (const v1::Token& token : response.tokens()) rows.push_back(Row(token));
    WriteColumns(out, rows);
  });
  return kOk;
}

absl::StatusOr<int> Revoke(const Context& context, const std::string& id) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::RevokeTokenRequest request;
  request.set_request_id(NewRequestId());
  request.set_name(absl::StartsWith(id, "tokens/") ? id : absl::StrCat("tokens/", id));
  ASSIGN_OR_RETURN(const v1::Token token, client->RevokeToken(request));
  Print(context, token, [&](std::ostream& out) {
    out << ShortName(token.name()) << ", of " << token.user() << ", is revoked\n";
  });
  return kOk;
}

}  // namespace

void AddTokenCommand(CLI::App& app, Context* context) {
  CLI::App* token = app.add_subcommand("token", "make, list and revoke tokens (admins)");
  token->require_subcommand(1);

  auto flags = std::make_shared<Flags>();
  CLI::App* create = token->add_subcommand("create", "make a token and show it once");
  create->add_option("--user", flags->user, "whom it stands for: the owner of jobs")->required();
  create->add_option("--project", flags->project, "whose jobs it may change, too");
  create
      ->add_option_function<std::string>(
          "--role", [flags](const std::string& role) { flags->role = Roles().at(role); },
          "admin, user or viewer")
      ->check(CLI::IsMember({"admin", "user", "viewer"}))
      ->default_str("user");
  create->add_option("--days", flags->days, "until it expires")
      ->check(CLI::Range(1, 366))
      ->capture_default_str();
  create->callback([=] { context->action = [=] { return Create(*context, *flags); }; });

  CLI::App* list =
      token->add_subcommand("list", "list the tokens; those that have expired go when one is made");
  list->callback([=] { context->action = [=] { return List(*context); }; });

  auto id = std::make_shared<std::string>();
  CLI::App* revoke = token->add_subcommand("revoke", "end a token now, and what it has open");
  revoke->add_option("token", *id, "as \"token list\" shows it")->required();
  revoke->callback([=] { context->action = [=] { return Revoke(*context, *id); }; });
}

}  // namespace ringleader::cli
