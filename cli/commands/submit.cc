#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/follow.h"
#include "cli/job_text.h"
#include "cli/plan_text.h"
#include "cli/printer.h"
#include "jobspec/jobspec.h"
#include "jobspec/reference.h"
#include "jobspec/text.h"

namespace ringleader::cli {
namespace {

struct Flags {
  std::string file;
  std::vector<std::string> overrides;
  bool follow = false;
  bool dry_run = false;
  bool check_files = true;
};

absl::StatusOr<int> DryRun(const Context& context, Client* client, const v1::JobSpec& spec) {
  v1::ValidateJobRequest request;
  *request.mutable_spec() = spec;
  request.set_protocol_version(kProtocolVersion);
  ASSIGN_OR_RETURN(const v1::ValidateJobResponse response, client->ValidateJob(request));
  Print(context, response, [&](std::ostream& out) {
    out << jobspec::ToYaml(response.spec()) << "\n";
    if (response.has_plan()) WritePlan(out, response.spec(), response.plan());
    out << (response.pending_reason().empty()
                ? "would start at once"
                : absl::StrCat("would wait: ", jobspec::EscapeControls(response.pending_reason())))
        << "\n";
  });
  return kOk;
}

absl::StatusOr<int> Submit(const Context& context, const Flags& flags) {
  ASSIGN_OR_RETURN(const v1::JobSpec spec, jobspec::LoadJobFile(flags.file, flags.overrides));
  if (const absl::Status valid = jobspec::Validate(spec); !valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat(flags.file, ": ", valid.message()));
  }
  if (flags.check_files) RETURN_IF_ERROR(jobspec::CheckFiles(spec));
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  if (flags.dry_run) return DryRun(context, client.get(), spec);

  v1::CreateJobRequest request;
  *request.mutable_spec() = spec;
  request.set_protocol_version(kProtocolVersion);
  request.set_request_id(NewRequestId());
  ASSIGN_OR_RETURN(const v1::Job job, client->CreateJob(request));
  if (!flags.follow) {
    Print(context, job, [&](std::ostream& out) {
      const std::string name = ShortName(job.name());
      out << name << " is " << v1::Job::State_Name(job.state())
          << "; follow it with: ringctl watch " << name << "\n";
    });
    return kOk;
  }
  return FollowJob(context, client.get(), job.name(), 0);
}

}  // namespace

void AddSubmitCommand(CLI::App& app, Context* context) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("submit", "submit a job file");
  command->add_option("file", flags->file, "job.yaml")->required();
  command->add_option("--set", flags->overrides, "path=value: override a field of the job file")
      ->allow_extra_args(false);
  command->add_flag("--follow", flags->follow,
                    "watch the job to its end; the exit code is its result");
  command->add_flag("--dry-run", flags->dry_run,
                    "show the job with its defaults and its plan, and create nothing");
  command->add_flag(
      "!--no-check-files", flags->check_files,
      "the job's files are on the cluster's machines only: do not look for them here");
  command->footer("\n" + jobspec::ReferenceSummary());
  command->callback([=] { context->action = [=] { return Submit(*context, *flags); }; });
}

}  // namespace ringleader::cli
