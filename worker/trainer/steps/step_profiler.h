// Traces steps into files that Chrome's and Perfetto's trace viewers open.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace ringleader::trainer {

// Not thread-safe. Problems cost the trace, never the training: they are printed.
class StepProfiler {
 public:
  // Files go to `directory`/step-{first}-rank-{rank}.json. cuda: GPU kernels and copies, too.
  StepProfiler(std::string directory, int rank, bool cuda)
      : directory_(std::move(directory)), rank_(rank), cuda_(cuda) {}
  ~StepProfiler();

  // Traces `steps` steps, beginning with the one after `done`. A trace under way is saved first.
  void Start(uint64_t done, uint32_t steps);
  // Called after every step.
  void StepDone(uint64_t step);

 private:
  void Save();

  const std::string directory_;
  const int rank_;
  const bool cuda_;
  uint64_t first_ = 0, last_ = 0;  // steps under trace; 0: none
};

}  // namespace ringleader::trainer
