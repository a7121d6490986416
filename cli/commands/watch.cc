#include <CLI/CLI.hpp>
#include <memory>

#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/follow.h"
#include "cli/job_text.h"

namespace ringleader::cli {
namespace {

absl::StatusOr<int> Watch(const Context& context, const std::string& name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::GetJobRequest request;
  request.set_name(JobName(name));
  ASSIGN_OR_RETURN(const v1::Job job, client->GetJob(request));
  // The last step shows where it stands; `ringctl report` has all of them.
  const uint64_t step = job.progress().step();
  return FollowJob(context, client.get(), job.name(), step > 0 ? step - 1 : 0);
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
