// longca_gpu_bench: masks x schemes x directions x lengths on the GPUs of this machine, each cell
// checked against fp64 in small (gpu_ring_cells.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/algorithm/container.h"
#include "bench/longca/cell.h"
#include "bench/longca/gpu/gpu_ring_cells.h"
#include "kernels/masks/masks.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/hopper.h"

namespace ringleader::bench {
namespace {

struct Options {
  std::string folder = ".";
  std::vector<int64_t> tokens = {32768};
  std::vector<int> ranks = {1, 2, 4};
  std::vector<std::string> masks;  // by name; none: all
  int repetitions = 9;
};

int Run(const Options& options) {
  for (const absl::Status& status : {kernels::ops::LoadTorchCuda(), kernels::sm90::CheckHopper()}) {
    if (status.ok()) continue;
    std::fprintf(stderr, "longca_gpu_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess) gpus = 0;
  std::error_code error;
  std::filesystem::create_directories(options.folder, error);
  GpuRingCells bench(gpus);
  std::vector<Cell> cells;
  int wrong = 0;
  for (const int64_t tokens : options.tokens) {
    for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
      const std::string mask(kernels::MaskName(static_cast<kernels::MaskKind>(kind)));
      if (!options.masks.empty() && !absl::c_linear_search(options.masks, mask)) continue;
      for (const int ranks : options.ranks) {
        const int64_t multiple = int64_t{2} * ranks * 128;
        for (const Scheme& scheme : SchemesOn(ranks)) {
          if (scheme.has_helpers) continue;  // on CPUs alone
          wrong += AddCells(
              bench.Measure(static_cast<kernels::MaskKind>(kind), scheme,
                            (tokens + multiple - 1) / multiple * multiple, options.repetitions),
              kGpuHeads, kGpuHeadDim, &cells);
        }
      }
      // As it grows: a run over all masks of long sequences takes many minutes.
      if (!WriteTable(options.folder, "longca_gpu_rings", cells, kGpuHeads, kGpuHeadDim)) {
        std::fprintf(stderr, "longca_gpu_bench: cannot write into %s; give --folder\n",
                     options.folder.c_str());
        return 1;
      }
    }
  }
  std::printf("%zu cells, %d of them wrong, on %d GPUs\n", cells.size(), wrong, gpus);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  ringleader::bench::Options options;
  CLI::App app("masks x schemes x directions x lengths on GPUs", "longca_gpu_bench");
  app.add_option("--folder", options.folder, "gets the table and the picture")
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "lengths")
      ->check(CLI::Range(int64_t{1024}, int64_t{1048576}))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "ranks that share a sequence")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  std::vector<std::string> masks;
  masks.reserve(ringleader::kernels::kMaskKinds);
  for (int kind = 0; kind < ringleader::kernels::kMaskKinds; ++kind) {
    masks.emplace_back(
        ringleader::kernels::MaskName(static_cast<ringleader::kernels::MaskKind>(kind)));
  }
  app.add_option("--masks", options.masks, "masks; all where none is named")
      ->check(CLI::IsMember(masks));
  app.add_option("--repetitions", options.repetitions, "of which medians and quantiles are")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return ringleader::bench::Run(options);
}
