#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/printer.h"
#include "cli/validators.h"
#include "jobspec/fields/text.h"
#include "proto/timestamps.h"

namespace ringleader::cli {
namespace {

struct Flags {
  std::string job;
  bool follow = false;
  int rank = -1;
  uint32_t attempt = 0;
  uint32_t tail = 0;
};

// The coordinator knows the ranks of an attempt that has been placed; a job says how many it wants.
absl::Status CheckRank(Client* client, const Flags& flags) {
  if (flags.rank < 0) return absl::OkStatus();
  v1::GetJobRequest request;
  request.set_name(JobName(flags.job));
  ASSIGN_OR_RETURN(const v1::Job job, client->GetJob(request));
  const int64_t trainers = job.spec().resources().trainers();
  if (flags.rank < trainers) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat(job.name(), " has no rank ", flags.rank, "; its ranks are 0 to ", trainers - 1));
}

absl::StatusOr<int> Logs(const Context& context, const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  RETURN_IF_ERROR(CheckRank(client.get(), flags));
  v1::TailLogsRequest request;
  request.set_job(JobName(flags.job));
  request.set_follow(flags.follow);
  request.set_rank(flags.rank);
  request.set_attempt(flags.attempt);
  request.set_last_lines(flags.tail);
  uint64_t dropped = 0;
  RETURN_IF_ERROR(client->TailLogs(request, [&](const v1::TailLogsResponse& response) {
    dropped += response.dropped();
    if (context.format != Format::kTable) {
      if (context.format == Format::kYaml) context.out << "---\n";
      Print(context, response, nullptr);
      context.out.flush();
      return context.out.good();
    }
    for (const v1::LogLine& line : response.lines()) {
      if (line.has_time()) {
        context.out << absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ ", ToTime(line.time()),
                                        absl::UTCTimeZone());
      }
      // Several ranks need telling apart.
      if (flags.rank < 0) context.out << "[rank " << line.rank() << "] ";
      context.out << EscapeControls(line.text(), "\t") << "\n";
    }
    context.out.flush();
    return context.out.good();
  }));
  if (dropped > 0) context.err << "ringctl: " << dropped << " lines were dropped\n";
  return kOk;
}

}  // namespace

void AddLogsCommand(CLI::App& app, Context* context) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("logs", "print what the trainers of a job wrote");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_flag("-f,--follow", flags->follow, "stay until the attempt ends");
  command->add_option("--rank", flags->rank, "of this rank only (default: all)")
      ->check(ZeroOrMore());
  command->add_option("--attempt", flags->attempt, "of this attempt (default: the newest)")
      ->check(MoreThanZero());
  command->add_option("--tail", flags->tail, "only the last lines (default: all)")
      ->check(MoreThanZero());
  command->callback([=] { context->action = [=] { return Logs(*context, *flags); }; });
}

}  // namespace ringleader::cli
