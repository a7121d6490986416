#include "cli/help/examples.h"

#include <CLI/CLI.hpp>
#include <string>

#include "absl/strings/str_cat.h"

namespace ringleader::cli {
namespace {

struct Example {
  const char* command;  // "token create": a command of a command
  const char* text;
};

constexpr Example kExamples[] = {
    {"submit",
     "  ringctl submit job.yaml --follow\n"
     "  ringctl submit job.yaml --set name=longer --set training.steps=2000\n"
     "  ringctl submit job.yaml --dry-run\n"},
    {"validate",
     "  ringctl validate job.yaml\n"
     "  ringctl validate job.yaml --set parallelism.context=8 -o json\n"},
    {"list",
     "  ringctl list\n"
     "  ringctl list --filter 'state=RUNNING AND labels.team=ocean' -o json\n"
     "  ringctl list -o name\n"},
    {"get",
     "  ringctl get headers-16k\n"
     "  ringctl get headers-16k -o yaml\n"},
    {"cancel",
     "  ringctl cancel headers-16k\n"
     "  ringctl cancel headers-16k --checkpoint\n"},
    {"pause", "  ringctl pause headers-16k\n"},
    {"resume", "  ringctl resume headers-16k\n"},
    {"profile", "  ringctl profile headers-16k --steps 3\n"},
    {"delete", "  ringctl delete headers-16k\n"},
    {"watch",
     "  ringctl watch headers-16k\n"
     "  ringctl watch headers-16k -o json | jq '.steps[].loss'\n"},
    {"history",
     "  ringctl history headers-16k -o csv > steps.csv\n"
     "  ringctl history headers-16k -o jsonl | tail -n 1\n"},
    {"report",
     "  ringctl report headers-16k\n"
     "  ringctl report headers-16k -o json\n"},
    {"logs",
     "  ringctl logs headers-16k --tail 100\n"
     "  ringctl logs headers-16k --rank 0 --attempt 2 --follow\n"},
    {"nodes", "  ringctl nodes\n"},
    {"drain", "  ringctl drain gpu-01\n"},
    {"undrain", "  ringctl undrain gpu-01\n"},
    {"latency",
     "  ringctl latency\n"
     "  ringctl latency --csv > latency.csv\n"},
    {"health", "  ringctl health --address coordinator:7070\n"},
    {"token",
     "  ringctl token create --user dave --days 30 > dave.token\n"
     "  ringctl token list\n"},
    {"token create", "  ringctl token create --user board --role viewer --days 30 > board.token\n"},
    {"token list", "  ringctl token list -o json\n"},
    {"token revoke", "  ringctl token revoke 3f2a90c41b77\n"},
    {"audit",
     "  ringctl audit --since 24h\n"
     "  ringctl audit --who dave --outcome PERMISSION_DENIED\n"},
    {"plan",
     "  ringctl plan job.yaml --nodes 16 --gpus 8\n"
     "  ringctl plan job.yaml --set data.sequence_length=1048576 --density 0.05\n"
     "  ringctl plan --job night-run --set parallelism.ring=hierarchical\n"},
    {"data", "  ringctl data pack --input texts --suffix .txt --output tokens\n"},
    {"data pack",
     "  ringctl data pack --input texts --suffix .txt --output tokens\n"
     "  ringctl data pack --input ids --format uint32 --vocabulary 151936 \\\n"
     "    --separator 151643 --tokenizer qwen2 --output tokens\n"
     "  ringctl data pack --input pairs --prefix-end 10 --output tokens\n"},
    {"bench", "  ringctl bench attention --tokens 4096 16384 --folder figures\n"},
    {"bench attention",
     "  ringctl bench attention --ranks 4 --densities 5 10 --folder figures\n"
     "  ringctl bench attention --engine cuda --masks causal causal_documents\n"
     "  ringctl bench attention --engine cuda --tokens 131072 --lengths "
     "bench/longca/lengths/pile.json --peers\n"},
    {"completion",
     "  source <(ringctl completion bash)\n"
     "  ringctl completion zsh > \"${fpath[1]}/_ringctl\"\n"},
};

void AddExamplesOf(CLI::App* command, const std::string& name) {
  for (const Example& example : kExamples) {
    if (name != example.command) continue;
    const std::string before = command->get_footer();
    command->footer(absl::StrCat("\nExamples:\n", example.text, before));
  }
  for (CLI::App* nested : command->get_subcommands({})) {
    AddExamplesOf(nested, absl::StrCat(name, name.empty() ? "" : " ", nested->get_name()));
  }
}

}  // namespace

void AddExamples(CLI::App& app) {
  AddExamplesOf(&app, "");
}

}  // namespace ringleader::cli
