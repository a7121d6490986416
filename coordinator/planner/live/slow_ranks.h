// Ranks that take longer for the same work than others: for a lower clock, corrected memory errors,
// a neighbour on their machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

// Goes by the time a rank takes for a token of what is not attention (StepReport.rank_paces), of
// which all ranks have the same.
class SlowRanks {
 public:
  explicit SlowRanks(uint32_t world_size) : world_size_(world_size) {}

  // Takes in one merged report.
  void Observe(const v1::StepReport& report);

  // Those that took a tenth longer than the median rank in nearly all of the last 50 steps, until
  // they do so in hardly any. Their nodes are not known here.
  std::vector<v1::SlowRank> List() const;

  // Whether enough steps have been seen to say of a rank that it is not slow.
  bool know() const { return steps_ >= kSteps; }

  // How fast each of `groups` groups is, in thousandths of the usual: as its slowest rank. Empty:
  // all alike.
  std::vector<uint32_t> GroupPermille(size_t groups) const;

 private:
  static constexpr int kSteps = 50;
  struct Rank {
    uint64_t window = 0;   // a bit a step, the newest lowest: it took a tenth longer
    double ratio = 1;      // its time over the median's in those steps, a moving average
    uint64_t slow_at = 0;  // the step at which it was found slow; 0: it is not
  };
  const uint32_t world_size_;
  std::vector<Rank> ranks_;
  int steps_ = 0;  // that were compared, up to kSteps
};

}  // namespace ringleader::planner
