#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/printer.h"
#include "jobspec/fields/text.h"
#include "proto/timestamps.h"

namespace ringleader::cli {
namespace {

std::vector<std::string> NodeRow(const v1::Node& node, const Clock& clock) {
  std::vector<std::string> jobs;
  for (const std::string& job : node.jobs()) jobs.push_back(ShortName(job));
  const v1::NodeInventory& inventory = node.inventory();
  return {ShortName(node.name()),
          v1::Node::State_Name(node.state()),
          absl::StrCat(node.trainers_in_use(), "/", inventory.trainers()),
          inventory.gpus().empty()
              ? absl::StrCat(inventory.cpu_cores(), " cores")
              : absl::StrCat(inventory.gpus_size(), " × ", inventory.gpus(0).model()),
          FormatBytes(static_cast<double>(inventory.memory_bytes())),
          FormatAge(clock.Now() - ToTime(node.last_heartbeat_time())),
          absl::StrJoin(jobs, ","),
          node.state_reason()};
}

absl::StatusOr<int> List(const Context& context) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const v1::ListNodesResponse response, client->ListNodes());
  if (context.format == Format::kName) {
    for (const v1::Node& node : response.nodes()) {
      context.out << EscapeControls(ShortName(node.name())) << "\n";
    }
    return kOk;
  }
  Print(context, response, [&](std::ostream& out) {
    std::vector<std::vector<std::string>> rows = {
        {"NAME", "STATE", "TRAINERS", "DEVICES", "MEMORY", "SEEN", "JOBS", "REASON"}};
    for (const v1::Node& node : response.nodes()) rows.push_back(NodeRow(node, *context.clock));
    WriteColumns(out, rows, Columns(context));
  });
  return kOk;
}

template <typename Request>
absl::StatusOr<int> Change(const Context& context, const std::string& name,
                           absl::StatusOr<v1::Node> (Client::*method)(const Request&)) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  Request request;
  request.set_name(NodeName(name));
  request.set_request_id(NewRequestId());
  ASSIGN_OR_RETURN(const v1::Node node, (client.get()->*method)(request));
  Print(context, node, [&](std::ostream& out) {
    out << ShortName(node.name()) << " is " << v1::Node::State_Name(node.state()) << "\n";
  });
  return kOk;
}

}  // namespace

void AddNodeCommands(CLI::App& app, Context* context) {
  CLI::App* nodes = app.add_subcommand("nodes", "list the machines with a worker");
  nodes->callback([=] {
    context->more_formats = {Format::kName};
    context->action = [=] { return List(*context); };
  });

  const auto add = [&](const char* verb, const char* help, auto method) {
    auto name = std::make_shared<std::string>();
    CLI::App* command = app.add_subcommand(verb, help);
    command->add_option("node", *name, "name of the node")->required();
    command->callback([=] { context->action = [=] { return Change(*context, *name, method); }; });
  };
  add("drain", "take a node out: its jobs checkpoint and go on elsewhere", &Client::DrainNode);
  add("undrain", "let a drained node take jobs again", &Client::UndrainNode);
}

}  // namespace ringleader::cli
