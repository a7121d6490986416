// ringleader-bench: every mask x kernels, choices and schemes x directions x lengths on the ranks
// of this machine, CPUs or GPUs, each cell checked against fp64 by the mask's definition
// (docs/attention.md), caches flushed before each run. `ringctl bench attention` starts it. Times
// of several CPU ranks are of threads that share the cores.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/process/config.h"
#include "base/status_macros.h"
#include "bench/longca/bench_options.h"
#include "bench/longca/cell.h"
#include "bench/longca/cpu/cpu_ring_cells.h"
#include "bench/longca/gpu/gpu_schemes.h"
#include "bench/longca/kernel_cells.h"
#include "bench/longca/pattern_choice.h"
#include "bench/longca/problem.h"
#include "bench/longca/python_peers.h"
#include "kernels/reference/math/engine.h"

namespace ringleader::bench {
namespace {

// Longer sequences are measured with few tiles alone: on CPUs others take hours.
constexpr int64_t kLongestDense = 131072;
constexpr double kFew = 0.2;
constexpr char kNone[] = "none";  // in place of a pattern

// Its number of cores and, where the system tells, its model.
std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  std::string line, model = "CPU";
  while (std::getline(info, line)) {
    if (line.starts_with("model name") && line.find(": ") != std::string::npos) {
      model = line.substr(line.find(": ") + 2);
      break;
    }
  }
  return absl::StrCat(std::thread::hardware_concurrency(), " x ", model);
}

absl::StatusOr<int> RunOnCpus(const BenchOptions& options) {
  std::vector<Choice> choices = {{}};
  for (const double percent : options.densities) {
    for (const auto kind :
         {Choice::Kind::kUniform, Choice::Kind::kVariable, Choice::Kind::kLearned}) {
      choices.push_back({kind, percent / 100});
    }
  }
  const TableFacts facts = {
      .heads = kHeads,
      .head_dim = kHeadDim,
      .backend =
          absl::StrCat("CPU engine, ", kernels::reference::Engine(/*threads=*/1).math().name),
      .lengths = options.lengths.name(),
      .hardware = CpuName(),
      .commit = options.commit};
  CpuRingCells bench(options.lengths);
  std::vector<Cell> kernel_cells, ring_cells;
  const auto write = [&]() -> absl::Status {
    RETURN_IF_ERROR(WriteTable(options.folder, "longca_kernels", kernel_cells, facts));
    return WriteTable(options.folder, "longca_rings", ring_cells, facts);
  };
  RETURN_IF_ERROR(write());  // what cannot be is said before hours of measuring
  int wrong = 0;
  for (const int64_t tokens : options.tokens) {
    for (const kernels::MaskKind mask : options.masks) {
      for (const Choice& choice : choices) {
        if (tokens > kLongestDense && choice.density > kFew) continue;
        wrong += AddCells(KernelCells(mask, choice, tokens, options.threads, options.repetitions,
                                      options.lengths),
                          kHeads, kHeadDim, &kernel_cells);
      }
      for (const int ranks : options.ranks) {
        const int64_t whole = options.SharedTokens(tokens, ranks, kTile);
        if (whole > kLongestDense) continue;
        for (const PatternChoice& choice : options.choices()) {
          for (const Scheme& scheme : SchemesOn(ranks)) {
            wrong += AddCells(bench.Measure({mask, choice, scheme}, whole, options.repetitions),
                              kHeads, kHeadDim, &ring_cells);
          }
        }
      }
      RETURN_IF_ERROR(write());
    }
  }
  std::printf(
      "%zu cells, %d of them wrong; in %s: longca_kernels and longca_rings, .csv and .svg\n",
      kernel_cells.size() + ring_cells.size(), wrong, options.folder.c_str());
  return wrong;
}

std::vector<std::string> MaskNames() {
  std::vector<std::string> names;
  names.reserve(kernels::kMaskKinds);
  for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
    names.emplace_back(MaskName(static_cast<kernels::MaskKind>(kind)));
  }
  return names;
}

// Returns how many cells are wrong and programs of peers failed. python: without it no peers.
absl::StatusOr<int> Run(BenchOptions* options, bool on_gpus, const std::string* python) {
  if (!options->lengths_file.empty()) {
    ASSIGN_OR_RETURN(options->lengths, DocumentLengths::OfHistogram(options->lengths_file));
  }
  if (python == nullptr) return on_gpus ? RunGpuSchemes(*options) : RunOnCpus(*options);
  ASSIGN_OR_RETURN(const PythonPeers peers, PythonPeers::Find(*python));
  ASSIGN_OR_RETURN(const int wrong, on_gpus ? RunGpuSchemes(*options) : RunOnCpus(*options));
  ASSIGN_OR_RETURN(const int failed, peers.Run(*options, on_gpus, GpuCount()));
  return wrong + failed;
}

int Main(int argc, char** argv) {
  BenchOptions options;
  std::string engine = GpuCount() > 0 ? "cuda" : "cpu";
  CLI::App app("masks x kernels, choices and schemes x directions x lengths", "ringleader-bench");
  app.add_option(
         "--engine", engine,
         "cpu: kernels and schemes on CPU ranks. cuda: schemes on this machine's GPUs, of "
         "which more ranks than there are share one; --peers adds kernels. The default where "
         "there are GPUs")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--folder", options.folder, "gets the tables and pictures")->capture_default_str();
  app.add_option("--tokens", options.tokens,
                 "lengths; on CPUs, of those beyond 131072, choices of at most 20 % on one rank "
                 "alone (default: 4096, on GPUs 32768)")
      ->check(CLI::Range(int64_t{64}, int64_t{1048576}));
  std::vector<int64_t> of_a_rank;
  const CLI::Option* const per_rank =
      app.add_option("--tokens-per-gpu", of_a_rank,
                     "instead: what each rank has of the sequence that schemes share; kernels "
                     "measure that much")
          ->check(CLI::Range(int64_t{64}, int64_t{1048576}));
  const std::vector<std::string> known = MaskNames();
  std::vector<std::string> masks;
  app.add_option("--masks", masks, "masks; all where none is named")->check(CLI::IsMember(known));
  app.add_option("--densities", options.densities,
                 "of choices of tiles and of patterns, percent (default: 5 20 50, on GPUs 5)")
      ->check(CLI::Range(1.0, 100.0));
  std::vector<std::string> known_patterns = ChoosingPatterns(), patterns;
  known_patterns.emplace_back(kNone);
  app.add_option("--patterns", patterns,
                 "by which ranks choose keys, besides having all that a mask shows; none: no such "
                 "cells (default: block_topk vertical_slash)")
      ->check(CLI::IsMember(known_patterns));
  app.add_option("--ranks", options.ranks,
                 "ranks that share a sequence (default: 2 4, on GPUs 1 2 4)")
      ->check(CLI::Range(1, 16));
  const CLI::Option* const threads =
      app.add_option("--threads", options.threads, "of the kernels' cells, on CPUs (default: 1)")
          ->check(CLI::Range(1, 256));
  const CLI::Option* const repetitions =
      app.add_option("--repetitions", options.repetitions,
                     "of which medians and quantiles are (default: 5, on GPUs 9)")
          ->check(CLI::Range(1, 1000));
  app.add_option(
      "--lengths", options.lengths_file,
      "of documents: a histogram in the form of LongCA-bench's, as those of its data sets "
      "in bench/longca/lengths are (default: ProLong-like, scaled to the sequence)");
  app.add_option("--commit", options.commit, "that tables name");
  bool with_peers = false;
  app.add_flag("--peers", with_peers,
               "then what PyTorch has, in the same lengths and masks: longca_masks, every mask of "
               "ringleader.kernels beside cuDNN, FlashAttention and FlexAttention, and "
               "longca_ring_peers, PyTorch's ring attention");
  std::string python = "python3";
  const CLI::Option* const of_peers =
      app.add_option("--python", python,
                     "of --peers: has PyTorch and ringleader.kernels (deploy/python_kernels.sh)")
          ->capture_default_str();
  app.callback([&] {
    if (per_rank->count() > 0 && !options.tokens.empty()) {
      throw CLI::ValidationError(per_rank->get_name(), "does not go with --tokens");
    }
    if (of_peers->count() > 0 && !with_peers) {
      throw CLI::ValidationError(of_peers->get_name(), "goes with --peers");
    }
    if (engine == "cuda" && threads->count() > 0) {
      throw CLI::ValidationError(threads->get_name(), "goes with --engine cpu alone");
    }
  });
  if (const std::optional<int> code = ParseArguments(app, argc, argv)) return *code;
  const bool on_gpus = engine == "cuda";
  options.are_tokens_per_rank = per_rank->count() > 0;
  if (options.are_tokens_per_rank) options.tokens = of_a_rank;
  if (options.tokens.empty()) options.tokens = {on_gpus ? 32768 : 4096};
  if (options.densities.empty()) {
    options.densities = on_gpus ? std::vector{5.0} : std::vector{5.0, 20.0, 50.0};
  }
  if (options.ranks.empty()) options.ranks = on_gpus ? std::vector{1, 2, 4} : std::vector{2, 4};
  if (repetitions->count() == 0) options.repetitions = on_gpus ? 9 : 5;
  for (const std::string& name : masks.empty() ? known : masks) {
    options.masks.push_back(
        static_cast<kernels::MaskKind>(std::ranges::find(known, name) - known.begin()));
  }
  if (patterns.empty()) patterns = {"block_topk", "vertical_slash"};
  for (const std::string& name : patterns) {
    if (name != kNone) options.patterns.push_back(PatternCalled(name));
  }
  const absl::StatusOr<int> wrong = Run(&options, on_gpus, with_peers ? &python : nullptr);
  if (!wrong.ok()) {
    std::fprintf(stderr, "ringleader-bench: %s\n", std::string(wrong.status().message()).c_str());
  }
  return wrong.ok() && *wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  return ringleader::bench::Main(argc, argv);
}
