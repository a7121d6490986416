// What PyTorch has beside our own cells, in the same run: masks/main.py, every mask of
// ringleader.kernels beside cuDNN, FlashAttention, FlexAttention and what else is installed, and
// rings/peers.py, PyTorch's ring attention. Both write tables and pictures of their own.
#pragma once

#include <filesystem>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/longca/bench_options.h"

namespace ringleader::bench {

class PythonPeers {
 public:
  // FAILED_PRECONDITION where this program lies without the Python ones, or `python` has no PyTorch
  // or no ringleader.kernels; it says what to do.
  static absl::StatusOr<PythonPeers> Find(const std::string& python);

  // Runs both, in `options`' lengths, masks, densities and documents, PyTorch's ring on as many of
  // options.ranks as there are `gpus` for, or on CPUs. Returns how many failed; they have said why.
  absl::StatusOr<int> Run(const BenchOptions& options, bool on_gpus, int gpus) const;

 private:
  PythonPeers(std::string python, std::filesystem::path programs)
      : python_(std::move(python)), programs_(std::move(programs)) {}

  std::string python_;
  std::filesystem::path programs_;  // the folder bench/longca
};

}  // namespace ringleader::bench
