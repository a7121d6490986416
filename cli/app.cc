#include "cli/app.h"

#include <CLI/CLI.hpp>
#include <exception>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/process/version.h"
#include "base/text/controls.h"
#include "base/text/edit_distance.h"
#include "cli/commands/commands.h"
#include "cli/help/examples.h"
#include "cli/printer.h"
#include "cli/validators.h"
#include "jobspec/fields/text.h"

namespace ringleader::cli {
namespace {

constexpr char kFooter[] = R"(
The coordinator's address is taken from --address, RINGLEADER_ADDRESS, the
configuration file (~/.config/ringleader/config.yaml), or is 127.0.0.1:7070.

Exit codes: 0 done; 1 the followed job failed; 2 it was cancelled; 64 a mistake
in the command line or job file; 66 no such file, job or node; 69 no coordinator
answers, or not in time; 70 internal; 74 the output could not be written; 75 not
possible in this state, a name is taken, or a limit reached; 77 not allowed, or
a TLS mismatch.)";

// What --help prints, in 80 columns.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(kNameColumns); }

  // CLI11 shows of a flag that switches something off with what it switches it.
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    return absl::StrReplaceAll(CLI::Formatter::make_option_name(option, is_positional),
                               {{"{false}", ""}});
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return Wrapped(option->get_description());
  }
  std::string make_subcommand(const CLI::App* command) const override {
    std::ostringstream out;
    CLI::detail::format_help(out, command->get_name(), Wrapped(command->get_description()),
                             kNameColumns);
    return out.str();
  }

 private:
  static constexpr int kNameColumns = 30;

  // CLI11 indents what follows a line's end.
  static std::string Wrapped(const std::string& text) {
    return WrapToWidth(text, 80 - kNameColumns, "\n");
  }
};

void AddGlobalFlags(CLI::App& app, Context* context) {
  app.add_option("--address", context->address, "the coordinator, host:port");
  app.add_option("--config", context->config_path, "configuration file")->check(NamesAFile());
  app.add_option("-o,--output", context->format_name,
                 "table, json or yaml; name: list and nodes; csv, jsonl: history");
  AddTlsFlags(app, &context->tls);
  app.add_option("--token-file", context->token_path,
                 "file with a token, in place of a certificate (or RINGLEADER_TOKEN: the token)")
      ->check(NamesAFile());
  app.add_option_function<double>(
         "--retry-for",
         [context](double seconds) {
           context->retry.read_patience = context->retry.write_patience = absl::Seconds(seconds);
         },
         "seconds to wait for a coordinator that is away (60 for calls that change something, else "
         "3)")
      ->check(ZeroOrMore());
}

// What people type who know other tools.
struct OtherName {
  std::string_view typed;
  const char* command;
};
constexpr OtherName kOtherNames[] = {
    {"describe", "get"},  {"show", "get"},        {"status", "get"},     {"info", "get"},
    {"ls", "list"},       {"ps", "list"},         {"jobs", "list"},      {"queue", "list"},
    {"rm", "delete"},     {"remove", "delete"},   {"kill", "cancel"},    {"stop", "cancel"},
    {"run", "submit"},    {"create", "submit"},   {"apply", "submit"},   {"start", "submit"},
    {"log", "logs"},      {"tail", "logs"},       {"follow", "watch"},   {"attach", "watch"},
    {"workers", "nodes"}, {"top", "nodes"},       {"check", "validate"}, {"lint", "validate"},
    {"steps", "history"}, {"continue", "resume"}, {"suspend", "pause"}};

// "; did you mean submit?"; empty where none of the known words is near.
std::string Suggestion(const std::string& typed, const std::vector<std::string>& known) {
  std::string nearest;
  size_t distance = 3;  // farther off it is another word
  for (const std::string& word : known) {
    const size_t d = EditDistance(typed, word);
    if (d >= distance) continue;
    distance = d;
    nearest = word;
  }
  for (const OtherName& other : kOtherNames) {
    if (other.typed == typed) nearest = other.command;
  }
  return nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?");
}

// "unknown command "sumbit"; did you mean submit?"
std::string UnknownCommand(const CLI::App& app, const std::string& typed) {
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  return absl::StrCat("unknown command \"", jobspec::Printable(typed), "\"",
                      Suggestion(typed, known));
}

// "unknown flag --folow; did you mean --follow?", of commands and their commands.
std::string UnknownFlag(const std::vector<const CLI::App*>& parsed, const std::string& typed) {
  std::vector<std::string> known;
  for (const CLI::App* command : parsed) {
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
  }
  return absl::StrCat("unknown flag ", jobspec::Printable(typed),
                      Suggestion(typed.substr(0, typed.find('=')), known));
}

// The app, and the commands that were named, each of the one before.
std::vector<const CLI::App*> Parsed(const CLI::App& app) {
  std::vector<const CLI::App*> parsed = {&app};
  for (size_t i = 0; i < parsed.size(); ++i) {
    for (const CLI::App* command : parsed[i]->get_subcommands()) parsed.push_back(command);
  }
  return parsed;
}

// The first argument that nobody expects: CLI11 complains of a missing one before.
std::optional<std::string> Unexpected(const std::vector<const CLI::App*>& parsed) {
  for (const CLI::App* command : parsed) {
    for (const std::string& argument : command->remaining()) {
      if (argument.starts_with('-') || parsed.size() == 1) return argument;
    }
  }
  return std::nullopt;
}

std::string ExplainMistake(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<const CLI::App*> parsed = Parsed(app);
  const std::optional<std::string> unexpected = Unexpected(parsed);
  std::string help = "see";
  for (const CLI::App* command : parsed) absl::StrAppend(&help, " ", command->get_name());
  const std::string what = !unexpected                    ? error.what()
                           : unexpected->starts_with('-') ? UnknownFlag(parsed, *unexpected)
                                                          : UnknownCommand(app, *unexpected);
  return absl::StrCat(what, "; ", help, " --help");
}

int Fail(const Context& context, const absl::Status& status) {
  context.err << "ringctl: " << EscapeControls(std::string(status.message()), "\n\t") << "\n";
  return ExitCodeOf(status);
}

// The exit code of a command that ended with `code`: who reads a file that is cut off must not be
// told that all is well.
int Ended(const Context& context, int code) {
  context.out.flush();
  if (context.out.good() || code != kOk) return code;
  context.err << "ringctl: not all of the output could be written: standard output is closed, or "
                 "what it goes to is full\n";
  return kOutputLost;
}

}  // namespace

int RunRingctl(const std::vector<std::string>& arguments, Context context) {
  CLI::App app("ringctl: submit long-context training jobs to Ringleader and watch them",
               "ringctl");
  app.set_version_flag("--version", std::string(kVersion));
  app.fallthrough();
  app.formatter(std::make_shared<HelpFormatter>());
  app.footer(kFooter);
  AddGlobalFlags(app, &context);
  AddSubmitCommand(app, &context);
  AddJobCommands(app, &context);
  AddWatchCommand(app, &context);
  AddHistoryCommand(app, &context);
  AddReportCommand(app, &context);
  AddLogsCommand(app, &context);
  AddNodeCommands(app, &context);
  AddLatencyCommand(app, &context);
  AddHealthCommand(app, &context);
  AddTokenCommand(app, &context);
  AddAuditCommand(app, &context);
  AddPlanCommand(app, &context);
  AddDataCommand(app, &context);
  AddBenchCommand(app, &context);
  AddCompletionCommand(app, &context);
  AddExamples(app);
  try {
    // CLI11 takes them last first.
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::Success& e) {
    return Ended(context, app.exit(e, context.out, context.err));
  } catch (const CLI::ParseError& e) {
    context.err << "ringctl: " << ExplainMistake(app, e) << "\n";
    return kUsage;
  }
  if (!context.action) {
    context.err << "ringctl: a command is missing; see ringctl --help\n";
    return kUsage;
  }
  if (const absl::Status status = ResolveSettings(&context); !status.ok()) {
    return Fail(context, status);
  }
  const absl::StatusOr<int> code = [&]() -> absl::StatusOr<int> {
    try {
      return context.action();
    } catch (const std::exception& e) {  // a library's, of what no check has foreseen
      return absl::InternalError(e.what());
    }
  }();
  return Ended(context, code.ok() ? *code : Fail(context, code.status()));
}

}  // namespace ringleader::cli
