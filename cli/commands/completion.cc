// Completion scripts, written from the very flags that the parser knows.
#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <ostream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/commands/commands.h"
#include "jobspec/fields/fields.h"

namespace ringleader::cli {
namespace {

struct Verb {
  std::string help;
  std::vector<std::string> flags;
  std::string argument;  // what the first that is no flag names: "job", "node", "file"; or none
};

std::string ArgumentOf(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_positional()) return option->get_name(/*positional=*/true);
  }
  return "";
}

std::vector<std::string> FlagsOf(const CLI::App& app) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  return flags;
}

// Those of `app` that are followed by a value, also as one letter.
std::vector<std::string> FlagsWithValues(const CLI::App& app) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    for (const std::string& name : option->get_snames()) flags.push_back("-" + name);
  }
  return flags;
}

// Of all verbs, and before them.
struct GlobalFlags {
  std::vector<std::string> names, with_values;
};
GlobalFlags GlobalFlagsOf(const CLI::App& root) {
  GlobalFlags flags = {.names = FlagsOf(root), .with_values = FlagsWithValues(root)};
  std::erase(flags.names, "--help");
  return flags;
}

// Verbs in alphabetical order, with the global flags that each takes, too. "data pack" is "data".
std::map<std::string, Verb> VerbsOf(CLI::App& root) {
  std::map<std::string, Verb> verbs;
  const std::vector<std::string> global = GlobalFlagsOf(root).names;
  for (CLI::App* command : root.get_subcommands([](CLI::App*) { return true; })) {
    Verb& verb = verbs[command->get_name()];
    verb.help = command->get_description();
    verb.flags = FlagsOf(*command);
    verb.argument = ArgumentOf(*command);
    for (const CLI::App* nested : command->get_subcommands([](CLI::App*) { return true; })) {
      verb.flags.push_back(nested->get_name());
      for (const std::string& flag : FlagsOf(*nested)) {
        if (flag != "--help") verb.flags.push_back(flag);
      }
    }
    for (const std::string& flag : global) verb.flags.push_back(flag);
  }
  return verbs;
}

std::vector<std::string> NamesOf(const std::map<std::string, Verb>& verbs) {
  std::vector<std::string> names;
  for (const auto& [name, verb] : verbs) names.push_back(name);
  return names;
}

// Words by verb, and verbs and what may come before them where there is none, put into `variable`
// by the arms of a shell's case.
std::string CaseArms(const std::map<std::string, Verb>& verbs,
                     const std::vector<std::string>& global, const std::string& variable) {
  std::string arms;
  std::vector<std::string> names = NamesOf(verbs);
  names.insert(names.end(), global.begin(), global.end());
  for (const auto& [name, verb] : verbs) {
    absl::StrAppend(&arms, "    ", name, ") ", variable, "='", absl::StrJoin(verb.flags, " "),
                    "' ;;\n");
  }
  absl::StrAppend(&arms, "    *) ", variable, "='", absl::StrJoin(names, " "), "' ;;\n");
  return arms;
}

// Verbs whose argument is a `what`, as the pattern of a shell's case.
std::string VerbsThatTake(const std::map<std::string, Verb>& verbs, const std::string& what) {
  std::vector<std::string> names;
  for (const auto& [name, verb] : verbs) {
    if (verb.argument == what) names.push_back(name);
  }
  return absl::StrJoin(names, "|");
}

std::string FieldPaths() {
  std::set<std::string> paths;
  for (const jobspec::Field& field : jobspec::Fields()) paths.insert(std::string(field.path) + "=");
  return absl::StrJoin(paths, " ");
}

// Sets verb to the first of `words`, as the shell writes them, that is one and no flag's value.
std::string FindVerb(const std::map<std::string, Verb>& verbs, const GlobalFlags& global,
                     const std::string& words) {
  return absl::StrCat(
      "  local word before=\n"
      "  for word in ",
      words,
      "; do\n"
      "    case $before in (",
      absl::StrJoin(global.with_values, "|"),
      ") before=; continue ;; esac\n"
      "    before=$word\n"
      "    case $word in (",
      absl::StrJoin(NamesOf(verbs), "|"),
      ") verb=$word; break ;; esac\n"
      "  done\n");
}

// Names of jobs and nodes are asked for as they are completed; nothing is said where nobody
// answers.
std::string Bash(const std::map<std::string, Verb>& verbs, const GlobalFlags& global) {
  return absl::StrCat(
      "# ringctl completion for bash: source <(ringctl completion bash)\n"
      "_ringctl() {\n"
      "  local current=${COMP_WORDS[COMP_CWORD]} verb= words\n",
      FindVerb(verbs, global, "\"${COMP_WORDS[@]:1:COMP_CWORD-1}\""),
      "  if [[ ${COMP_WORDS[COMP_CWORD - 1]} == --set ]]; then\n"
      "    compopt -o nospace 2>/dev/null\n"
      "    COMPREPLY=($(compgen -W '",
      FieldPaths(),
      "' -- \"$current\"))\n"
      "    return\n"
      "  fi\n"
      "  case $verb in\n",
      CaseArms(verbs, global.names, "words"),
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "  [[ $current == -* ]] && return\n"
      // Flags before the command may name another coordinator, which has other jobs.
      "  [[ $verb != \"${COMP_WORDS[1]}\" ]] && return\n"
      "  local ask= name\n"
      "  case $verb in\n"
      "    ",
      VerbsThatTake(verbs, "job"), ") ask='list --limit 1000' ;;\n    ",
      VerbsThatTake(verbs, "node"),
      ") ask=nodes ;;\n"
      "    *) return ;;\n"
      "  esac\n"
      // Others chose these names: compgen would have the shell expand them.
      "  COMPREPLY=()\n"
      "  while IFS= read -r name; do\n"
      "    [[ $name == \"$current\"* ]] && COMPREPLY+=(\"$name\")\n"
      "  done < <(ringctl --retry-for 0 -o name $ask 2>/dev/null)\n"
      "}\n"
      "complete -o default -F _ringctl ringctl\n");
}

std::string Zsh(const std::map<std::string, Verb>& verbs, const GlobalFlags& global) {
  return absl::StrCat(
      "#compdef ringctl\n"
      "# ringctl completion for zsh: ringctl completion zsh > \"${fpath[1]}/_ringctl\"\n"
      "_ringctl() {\n"
      "  local verb= choice= ask=\n",
      FindVerb(verbs, global, "${words[2,CURRENT-1]}"),
      "  if [[ ${words[CURRENT - 1]} == --set ]]; then\n"
      "    choice='",
      FieldPaths(),
      "'\n"
      "    compadd -S '' -- ${=choice}\n"
      "    return\n"
      "  fi\n"
      "  case $verb in\n",
      CaseArms(verbs, global.names, "choice"),
      "  esac\n"
      "  compadd -- ${=choice}\n"
      // As in bash.
      "  [[ $verb != ${words[2]} ]] && return\n"
      "  case $verb in\n"
      "    ",
      VerbsThatTake(verbs, "job"), ") ask='list --limit 1000' ;;\n    ",
      VerbsThatTake(verbs, "node"),
      ") ask=nodes ;;\n"
      "    *) _files; return ;;\n"
      "  esac\n"
      "  compadd -- ${(f)\"$(ringctl --retry-for 0 -o name ${=ask} 2>/dev/null)\"}\n"
      "}\n"
      "compdef _ringctl ringctl\n");
}

std::string Fish(const std::map<std::string, Verb>& verbs, const GlobalFlags& global) {
  std::string script = "# ringctl completion for fish: ringctl completion fish | source\n";
  const std::string before =
      absl::StrCat("complete -c ringctl -n 'not __fish_seen_subcommand_from ",
                   absl::StrJoin(NamesOf(verbs), " "), "' ");
  for (const std::string& flag : global.names) {
    absl::StrAppend(&script, before, "-l ", flag.substr(2), "\n");
  }
  for (const auto& [name, verb] : verbs) {
    absl::StrAppend(&script, before, "-a ", name, " -d \"", verb.help, "\"\n");
    const std::string within =
        absl::StrCat("complete -c ringctl -n '__fish_seen_subcommand_from ", name, "' ");
    for (const std::string& flag : verb.flags) {
      const bool is_flag = flag.rfind("--", 0) == 0;
      absl::StrAppend(&script, within, is_flag ? "-l " : "-a ", is_flag ? flag.substr(2) : flag,
                      flag == "--set" ? absl::StrCat(" -x -a '", FieldPaths(), "'") : "", "\n");
    }
    if (verb.argument != "job" && verb.argument != "node") continue;
    absl::StrAppend(&script, within, "-f -a '(ringctl --retry-for 0 -o name ",
                    verb.argument == "job" ? "list --limit 1000" : "nodes", " 2>/dev/null)'\n");
  }
  return script;
}

}  // namespace

void AddCompletionCommand(CLI::App& app, Context* context) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "print a completion script");
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->callback([=, &app] {
    context->action = [=, &app]() -> absl::StatusOr<int> {
      const std::map<std::string, Verb> verbs = VerbsOf(app);
      const GlobalFlags global = GlobalFlagsOf(app);
      context->out << (*shell == "bash"  ? Bash(verbs, global)
                       : *shell == "zsh" ? Zsh(verbs, global)
                                         : Fish(verbs, global));
      return kOk;
    };
  });
}

}  // namespace ringleader::cli
