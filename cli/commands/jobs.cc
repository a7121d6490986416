#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/printer.h"
#include "jobspec/fields/text.h"

namespace ringleader::cli {
namespace {

// In every format: a script that goes over the names does part of its work otherwise.
void SayWhatIsLeftOut(const Context& context, const v1::ListJobsResponse& response) {
  if (response.jobs_size() >= response.total_size()) return;
  context.err << "ringctl: " << response.jobs_size() << " of " << response.total_size()
              << " jobs; --limit shows more\n";
}

absl::StatusOr<int> List(const Context& context, const std::string& filter, int limit) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const v1::ListJobsResponse response, client->ListJobs(filter, limit));
  if (context.format == Format::kName) {
    for (const v1::Job& job : response.jobs()) {
      context.out << EscapeControls(ShortName(job.name())) << "\n";
    }
    SayWhatIsLeftOut(context, response);
    return kOk;
  }
  Print(context, response, [&](std::ostream& out) {
    const bool has_owners = std::any_of(response.jobs().begin(), response.jobs().end(),
                                        [](const v1::Job& job) { return !job.owner().empty(); });
    std::vector<std::vector<std::string>> rows = {JobHeading(has_owners)};
    for (const v1::Job& job : response.jobs()) {
      rows.push_back(JobRow(job, *context.clock, has_owners));
    }
    WriteColumns(out, rows, Columns(context));
  });
  SayWhatIsLeftOut(context, response);
  return kOk;
}

absl::StatusOr<int> Get(const Context& context, const std::string& name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::GetJobRequest request;
  request.set_name(JobName(name));
  ASSIGN_OR_RETURN(const v1::Job job, client->GetJob(request));
  Print(context, job,
        [&](std::ostream& out) { WriteJob(out, job, *context.clock, Columns(context)); });
  return kOk;
}

// Cancel, pause and resume differ by their request alone.
template <typename Request>
absl::StatusOr<int> Transition(const Context& context, const std::string& name,
                               absl::StatusOr<v1::Job> (Client::*method)(const Request&),
                               Request request = {}) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  request.set_name(JobName(name));
  request.set_request_id(NewRequestId());
  ASSIGN_OR_RETURN(const v1::Job job, (client.get()->*method)(request));
  Print(context, job, [&](std::ostream& out) {
    out << ShortName(job.name()) << " is " << v1::Job::State_Name(job.state()) << "\n";
  });
  return kOk;
}

absl::StatusOr<int> Delete(const Context& context, const std::string& name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::DeleteJobRequest request;
  request.set_name(JobName(name));
  request.set_request_id(NewRequestId());
  RETURN_IF_ERROR(client->DeleteJob(request));
  PrintJson(context, {{"name", request.name()}, {"deleted", true}},
            [&](std::ostream& out) { out << ShortName(name) << " is deleted\n"; });
  return kOk;
}

absl::StatusOr<int> Profile(const Context& context, const std::string& name, uint32_t steps) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::ProfileJobRequest request;
  request.set_name(JobName(name));
  request.set_request_id(NewRequestId());
  request.set_steps(steps);
  ASSIGN_OR_RETURN(const v1::ProfileJobResponse response, client->ProfileJob(request));
  Print(context, response, [&](std::ostream& out) {
    out << ShortName(name) << " traces its next " << steps << " steps into " << response.directory()
        << ", a file a rank for chrome://tracing or ui.perfetto.dev\n";
  });
  return kOk;
}

// The filter with these terms, too; values stand in quotes, for a name may hold "@".
std::string WithTerms(std::string filter, const std::string& owner, const std::string& project) {
  const auto add = [&](const char* field, const std::string& value) {
    if (value.empty()) return;
    absl::StrAppend(&filter, filter.empty() ? "" : " AND ", field, "=\"",
                    absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"");
  };
  add("owner", owner);
  add("project", project);
  return filter;
}

using Action = std::function<absl::StatusOr<int>(const std::string& name)>;

CLI::App* AddNamed(CLI::App& app, Context* context, const char* verb, const char* help,
                   Action action) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(verb, help);
  command->add_option("job", *name, "name of the job")->required();
  command->callback([=] { context->action = [=] { return action(*name); }; });
  return command;
}

}  // namespace

void AddJobCommands(CLI::App& app, Context* context) {
  auto filter = std::make_shared<std::string>();
  auto limit = std::make_shared<int>(100);
  CLI::App* list = app.add_subcommand("list", "list jobs, newest first");
  list->add_option("--filter", *filter, "e.g. state=RUNNING AND labels.team=ocean; see below");
  auto owner = std::make_shared<std::string>();
  auto project = std::make_shared<std::string>();
  list->add_option("--owner", *owner, "jobs that this user submitted");
  list->add_option("--project", *project, "jobs of this project");
  list->add_option("--limit", *limit, "jobs at most")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  list->footer(
      "\nA filter is up to eight terms FIELD OP VALUE, joined by AND; there is no OR:\n"
      "  FIELD  state, name, owner, project, or labels.KEY\n"
      "  OP     =, !=; of labels also :, as in labels.team:*, which has any value\n"
      "  VALUE  a word, or text in double quotes: owner=\"dave@example.com\"\n"
      "labels.team!=ocean takes jobs without that label, too.");
  list->callback([=] {
    context->more_formats = {Format::kName};
    context->action = [=] { return List(*context, WithTerms(*filter, *owner, *project), *limit); };
  });

  AddNamed(app, context, "get", "show a job and its attempts",
           [=](const std::string& name) { return Get(*context, name); });
  auto checkpoint = std::make_shared<bool>(false);
  AddNamed(app, context, "cancel", "stop a job for good", [=](const std::string& name) {
    v1::CancelJobRequest request;
    request.set_checkpoint(*checkpoint);
    return Transition(*context, name, &Client::CancelJob, request);
  })->add_flag("--checkpoint", *checkpoint, "write a last checkpoint first, and keep it");
  AddNamed(app, context, "pause", "write a checkpoint and stop until resumed",
           [=](const std::string& name) { return Transition(*context, name, &Client::PauseJob); });
  AddNamed(app, context, "resume", "go on with a paused job, or a failed one",
           [=](const std::string& name) { return Transition(*context, name, &Client::ResumeJob); });
  auto job = std::make_shared<std::string>();
  auto steps = std::make_shared<uint32_t>(2);
  CLI::App* profile = app.add_subcommand("profile", "trace the next steps of a job on every rank");
  profile->add_option("job", *job, "name of the job")->required();
  profile->add_option("--steps", *steps, "steps to trace")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  profile->callback([=] { context->action = [=] { return Profile(*context, *job, *steps); }; });
  AddNamed(app, context, "delete", "delete the record of a job that has ended",
           [=](const std::string& name) { return Delete(*context, name); });
}

}  // namespace ringleader::cli
