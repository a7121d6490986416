#include "cli/app.h"

#include <CLI/CLI.hpp>
#include <ostream>

#include "base/process/version.h"
#include "cli/commands/commands.h"
#include "jobspec/text.h"

namespace ringleader::cli {
namespace {

constexpr char kFooter[] = R"(
The coordinator's address is taken from --address, RINGLEADER_ADDRESS, the configuration file
(~/.config/ringleader/config.yaml), or is 127.0.0.1:7070.

Exit codes: 0 done; 1 the followed job failed; 2 it was cancelled; 64 a mistake in the command line
or job file; 66 no such file, job or node; 69 no coordinator answers; 70 internal; 75 not possible in
this state, or a name is taken; 77 not allowed.)";

void AddGlobalFlags(CLI::App& app, Context* context) {
  app.add_option("--address", context->address, "the coordinator, host:port");
  app.add_option("--config", context->config_path, "configuration file");
  app.add_option("-o,--output", context->format_name, "table, json or yaml");
  AddTlsFlags(app, &context->tls);
  app.add_option("--token-file", context->token_path,
                 "file with a token, in place of a certificate (or RINGLEADER_TOKEN: the token)");
  app.add_option_function<double>(
         "--retry-for",
         [context](double seconds) {
           context->retry.read_patience = context->retry.write_patience = absl::Seconds(seconds);
         },
         "seconds to wait for a coordinator that is away (60 for calls that change something, else "
         "3)")
      ->check(CLI::NonNegativeNumber);
}

int Fail(const Context& context, const absl::Status& status) {
  context.err << "ringctl: " << jobspec::EscapeControls(std::string(status.message()), "\n\t")
              << "\n";
  return ExitCodeOf(status);
}

}  // namespace

int RunRingctl(const std::vector<std::string>& arguments, Context context) {
  CLI::App app("ringctl: submit long-context training jobs to Ringleader and watch them",
               "ringctl");
  app.set_version_flag("--version", std::string(kVersion));
  app.fallthrough();
  app.footer(kFooter);
  AddGlobalFlags(app, &context);
  AddSubmitCommand(app, &context);
  AddJobCommands(app, &context);
  AddWatchCommand(app, &context);
  AddReportCommand(app, &context);
  AddLogsCommand(app, &context);
  AddNodeCommands(app, &context);
  AddHealthCommand(app, &context);
  AddTokenCommand(app, &context);
  AddAuditCommand(app, &context);
  AddPlanCommand(app, &context);
  AddDataCommand(app, &context);
  AddCompletionCommand(app, &context);
  try {
    // CLI11 takes them last first.
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::Success& e) {
    return app.exit(e, context.out, context.err);
  } catch (const CLI::ParseError& e) {
    context.err << "ringctl: " << e.what() << "; see ringctl --help\n";
    return kUsage;
  }
  if (!context.action) {
    context.err << "ringctl: a command is missing; see ringctl --help\n";
    return kUsage;
  }
  if (const absl::Status status = ResolveSettings(&context); !status.ok()) {
    return Fail(context, status);
  }
  const absl::StatusOr<int> code = context.action();
  context.out.flush();
  return code.ok() ? *code : Fail(context, code.status());
}

}  // namespace ringleader::cli
