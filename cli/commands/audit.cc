// ringctl audit: who changed what, or was refused.
#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/printer.h"
#include "proto/timestamps.h"

namespace ringleader::cli {
namespace {

struct Flags {
  v1::ListAuditRecordsRequest request;
  std::string since;
  std::string until;
  int limit = 100;
};

// "2026-01-31T12:00:00Z", or how long ago: "90m", "36h".
absl::Status ParseTime(const Context& context, const char* flag, const std::string& text,
                       google::protobuf::Timestamp* time) {
  absl::Time parsed;
  absl::Duration ago;
  if (absl::ParseDuration(text, &ago)) {
    parsed = context.clock->Now() - ago;
  } else if (std::string error; !absl::ParseTime(absl::RFC3339_full, text, &parsed, &error)) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": '", text,
        "' is no time; give one such as 2026-01-31T12:00:00Z, or how long ago, such as 36h"));
  }
  SetTime(parsed, time);
  return absl::OkStatus();
}

// A gRPC code's name, however it is written: "OK", "permission_denied".
absl::Status CheckOutcome(std::string* outcome) {
  if (outcome->empty()) return absl::OkStatus();
  const std::string name = absl::AsciiStrToUpper(*outcome);
  std::vector<std::string> known;
  for (int code = 0; code <= 16; ++code) {
    known.push_back(absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
    if (known.back() != name) continue;
    *outcome = name;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--outcome: '", *outcome, "' is no gRPC code; give one of ", absl::StrJoin(known, ", ")));
}

std::vector<std::string> Row(const v1::AuditRecord& record) {
  return {absl::FormatTime("%Y-%m-%d %H:%M:%S", ToTime(record.time()), absl::UTCTimeZone()),
          record.caller(),
          record.credential(),
          record.address(),
          record.method(),
          record.resource(),
          record.outcome(),
          record.message()};
}

absl::StatusOr<int> Audit(const Context& context, Flags flags) {
  RETURN_IF_ERROR(CheckOutcome(flags.request.mutable_outcome()));
  if (!flags.since.empty()) {
    RETURN_IF_ERROR(ParseTime(context, "--since", flags.since, flags.request.mutable_after_time()));
  }
  if (!flags.until.empty()) {
    RETURN_IF_ERROR(
        ParseTime(context, "--until", flags.until, flags.request.mutable_before_time()));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const v1::ListAuditRecordsResponse response,
                   client->ListAuditRecords(flags.request, flags.limit));
  Print(context, response, [&](std::ostream& out) {
    std::vector<std::vector<std::string>> rows = {
        {"TIME (UTC)", "WHO", "CREDENTIAL", "FROM", "METHOD", "RESOURCE", "OUTCOME", "WHY"}};
    for (const v1::AuditRecord& record : response.records()) rows.push_back(Row(record));
    WriteColumns(out, rows, Columns(context));
    if (!response.next_page_token().empty()) {
      context.err << "ringctl: there are more; --limit shows them\n";
    }
  });
  return kOk;
}

}  // namespace

void AddAuditCommand(CLI::App& app, Context* context) {
  auto flags = std::make_shared<Flags>();
  CLI::App* audit =
      app.add_subcommand("audit", "list who changed what, or was refused, newest first (admins)");
  v1::ListAuditRecordsRequest& request = flags->request;
  audit->add_option("--who", *request.mutable_caller(), "of this caller");
  audit->add_option("--method", *request.mutable_method(), "e.g. CreateJob");
  audit->add_option("--resource", *request.mutable_resource(), "e.g. jobs/a");
  audit->add_option("--outcome", *request.mutable_outcome(), "e.g. OK or PERMISSION_DENIED");
  audit->add_option("--since", flags->since, "not before, e.g. 2026-01-31T12:00:00Z or 36h");
  audit->add_option("--until", flags->until, "before, likewise");
  audit->add_option("--limit", flags->limit, "records at most")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  audit->callback([=] { context->action = [=] { return Audit(*context, *flags); }; });
}

}  // namespace ringleader::cli
