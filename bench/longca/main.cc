// ringleader-bench: every mask x kernels, choices and schemes x directions x lengths on the CPU
// ranks of this machine, each cell checked against fp64 by the mask's definition
// (docs/attention.md), caches flushed before each run. `ringctl bench attention` starts it. Times
// of several ranks are of threads that share the cores.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "bench/longca/cell.h"
#include "bench/longca/kernel_cells.h"
#include "bench/longca/problem.h"
#include "bench/longca/ring_cells.h"

namespace ringleader::bench {
namespace {

// Longer sequences are measured with few tiles alone: on CPUs others take hours.
constexpr int64_t kLongestDense = 131072;
constexpr double kFew = 0.2;

struct Options {
  std::string folder = ".";
  std::vector<int64_t> tokens = {4096};
  std::vector<double> densities = {5, 20, 50};  // percent
  std::vector<int> ranks = {2, 4};
  int threads = 1;
  int repetitions = 5;
};

int Run(const Options& options) {
  std::vector<Choice> choices = {{}};
  for (const double percent : options.densities) {
    choices.push_back({Choice::Kind::kUniform, percent / 100});
    choices.push_back({Choice::Kind::kLearned, percent / 100});
  }
  std::vector<Cell> kernel_cells, ring_cells;
  int wrong = 0;
  for (const int64_t tokens : options.tokens) {
    for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
      const auto mask = static_cast<kernels::MaskKind>(kind);
      for (const Choice& choice : choices) {
        if (tokens > kLongestDense && choice.density > kFew) continue;
        wrong += AddCells(KernelCells(mask, choice, tokens, options.threads, options.repetitions),
                          kHeads, kHeadDim, &kernel_cells);
      }
      if (tokens > kLongestDense) continue;
      for (const int ranks : options.ranks) {
        const int64_t multiple = int64_t{2} * ranks * kTile;
        for (const Scheme& scheme : SchemesOn(ranks)) {
          wrong += AddCells(RingCells(mask, scheme, (tokens + multiple - 1) / multiple * multiple,
                                      options.repetitions),
                            kHeads, kHeadDim, &ring_cells);
        }
      }
    }
  }
  std::error_code error;
  std::filesystem::create_directories(options.folder, error);
  if (!WriteTable(options.folder, "longca_kernels", kernel_cells, kHeads, kHeadDim) ||
      !WriteTable(options.folder, "longca_rings", ring_cells, kHeads, kHeadDim)) {
    std::fprintf(stderr, "ringleader-bench: cannot write into %s; give --folder\n",
                 options.folder.c_str());
    return 1;
  }
  std::printf(
      "%zu cells, %d of them wrong; in %s: longca_kernels and longca_rings, .csv and .svg\n",
      kernel_cells.size() + ring_cells.size(), wrong, options.folder.c_str());
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  ringleader::bench::Options options;
  CLI::App app("masks x kernels, choices and schemes x directions x lengths on CPU ranks",
               "ringleader-bench");
  app.add_option("--folder", options.folder, "gets the tables and pictures")->capture_default_str();
  app.add_option("--tokens", options.tokens,
                 "lengths; of those beyond 131072 choices of at most 20 % on one rank alone")
      ->check(CLI::Range(int64_t{64}, int64_t{524288}))
      ->capture_default_str();
  app.add_option("--densities", options.densities, "of choices of tiles, percent")
      ->check(CLI::Range(1.0, 100.0))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "ranks that share a sequence")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "of the kernels' cells")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--repetitions", options.repetitions, "of which medians and quantiles are")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return ringleader::bench::Run(options);
}
