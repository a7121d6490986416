// ringctl submit and validate.
#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/jobs/dry_run.h"
#include "cli/jobs/follow.h"
#include "cli/jobs/job_check.h"
#include "cli/printer.h"
#include "jobspec/fields/reference.h"

namespace ringleader::cli {
namespace {

struct Flags {
  JobFile file;
  bool follow = false;
  bool dry_run = false;
};

absl::StatusOr<int> Submit(const Context& context, const Flags& flags) {
  ASSIGN_OR_RETURN(const CheckedJob checked, CheckJob(flags.file));
  if (flags.dry_run) return DryRun(context, checked, /*asks=*/true);
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::CreateJobRequest request;
  *request.mutable_spec() = checked.spec;
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

absl::StatusOr<int> Validate(const Context& context, const JobFile& file) {
  ASSIGN_OR_RETURN(const CheckedJob checked, CheckJob(file));
  return DryRun(context, checked, /*asks=*/false);
}

void AddFileFlags(CLI::App* command, JobFile* file) {
  command->add_option("file", file->path, "job.yaml")->required();
  command->add_option("--set", file->overrides, "path=value: override a field of the job file")
      ->allow_extra_args(false);
  command->add_flag(
      "!--no-check-files", file->check_files,
      "the job's files are on the cluster's machines only: do not look for them here");
}

}  // namespace

void AddSubmitCommand(CLI::App& app, Context* context) {
  auto flags = std::make_shared<Flags>();
  CLI::App* submit = app.add_subcommand("submit", "submit a job file");
  AddFileFlags(submit, &flags->file);
  submit->add_flag("--follow", flags->follow,
                   "watch the job to its end; the exit code is its result");
  submit->add_flag("--dry-run", flags->dry_run,
                   "as validate does, and with what a coordinator that answers says");
  submit->footer("\n" + jobspec::ReferenceSummary());
  submit->callback([=] { context->action = [=] { return Submit(*context, *flags); }; });

  auto file = std::make_shared<JobFile>();
  CLI::App* validate = app.add_subcommand(
      "validate", "check a job file, show its defaults and its plan; asks no coordinator");
  AddFileFlags(validate, file.get());
  validate->callback([=] { context->action = [=] { return Validate(*context, *file); }; });
}

}  // namespace ringleader::cli
