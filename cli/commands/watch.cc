#include <CLI/CLI.hpp>
#include <memory>

#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/jobs/follow.h"

namespace ringleader::cli {
namespace {

absl::StatusOr<int> Watch(const Context& context, const std::string& name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::GetJobRequest request;
  request.set_name(JobName(name));
  ASSIGN_OR_RETURN(const v1::Job job, client->GetJob(request));
  // For people the last step shows where it stands; programs get all of them.
  const uint64_t step = job.progress().step();
  const bool all = context.format != Format::kTable || step == 0;
  return FollowJob(context, client.get(), job.name(), all ? 0 : step - 1);
}

}  // namespace

void AddWatchCommand(CLI::App& app, Context* context) {
  auto name = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("watch", "watch a job to its end; the exit code is its result");
  command->add_option("job", *name, "name of the job")->required();
  command->callback([=] { context->action = [=] { return Watch(*context, *name); }; });
}

}  // namespace ringleader::cli
