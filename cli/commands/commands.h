// ringctl's verbs, a function a file. Each adds its subcommands; a chosen one sets context->action.
#pragma once

#include <string>

#include "cli/context.h"

namespace CLI {
class App;
}

namespace ringleader::cli {

void AddSubmitCommand(CLI::App& app, Context* context);      // submit validate
void AddJobCommands(CLI::App& app, Context* context);        // list get cancel pause resume delete
void AddWatchCommand(CLI::App& app, Context* context);       // watch
void AddHistoryCommand(CLI::App& app, Context* context);     // history
void AddReportCommand(CLI::App& app, Context* context);      // report
void AddLogsCommand(CLI::App& app, Context* context);        // logs
void AddNodeCommands(CLI::App& app, Context* context);       // nodes drain undrain
void AddLatencyCommand(CLI::App& app, Context* context);     // latency
void AddHealthCommand(CLI::App& app, Context* context);      // health
void AddTokenCommand(CLI::App& app, Context* context);       // token create|list|revoke
void AddAuditCommand(CLI::App& app, Context* context);       // audit
void AddPlanCommand(CLI::App& app, Context* context);        // plan
void AddDataCommand(CLI::App& app, Context* context);        // data pack
void AddBenchCommand(CLI::App& app, Context* context);       // bench attention
void AddCompletionCommand(CLI::App& app, Context* context);  // completion

}  // namespace ringleader::cli
