// Makes one merged StepReport out of the reports of all ranks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::lifecycle {

// `reports`: one of each rank, all of the same step, not empty. Loss, tokens and learning rate are
// global already; phases, seconds and memory are the maximum; layers are means over ranks, but
// tiles_per_ring_step sums; worker_imbalance is max/mean over ranks of visited tiles, and
// step_imbalance max/mean over ring steps of the worst rank.
v1::StepReport MergeSteps(const std::vector<v1::StepReport>& reports);

// Collects the reports of one attempt. A step is complete when every rank has reported it.
//
// A report is known to the store only once merged. Until then whoever sent it must keep it, so the
// merger remembers where each came from and says when it may be let go.
//
// Ranks train in step, but their reports may come far apart: a worker that was cut off keeps as
// many as 100,000 messages, with 64 MiB of layers (worker/agent/link/event_buffer.h), and all of
// them may come before the first of another worker. So the merger holds many, and is bounded by
// their bytes: beyond, the oldest go without their figures by layer, length and document, as they
// do where a worker has no room, and if that is not enough, they go.
class StepMerger {
 public:
  // Where a report came from: the sequence of its message from this worker process.
  struct Origin {
    std::string node;
    std::string incarnation;
    uint64_t sequence = 0;

    bool operator==(const Origin&) const = default;
  };

  // 100,000 reports without layers, which is what a worker holds at most.
  static constexpr size_t kMostBytes = size_t{96} << 20;

  // Steps up to `last_step` are complete already.
  explicit StepMerger(uint32_t world_size = 0, uint64_t last_step = 0,
                      size_t most_bytes = kMostBytes)
      : world_size_(world_size), last_step_(last_step), most_bytes_(most_bytes) {}

  // Returns the merged report if this one completes a step. `released` receives the origins that
  // nobody waits for any longer (this one's too, if it is a duplicate or late).
  std::optional<v1::StepReport> Add(v1::StepReport report, Origin origin,
                                    std::vector<Origin>* released);

  struct Unfinished {
    v1::StepReport merged;
    bool is_believed = false;
  };
  // The attempt is over: merges what there is of incomplete steps. Some rank did complete them, so
  // the next attempt may begin after them. Ranks train in step: whichever of them says so is
  // believed to have completed the one after `trained`, the last that all are known to have. How
  // much further they came, rank 0 says, as it does of checkpoints.
  std::vector<Unfinished> Finish(uint64_t trained, std::vector<Origin>* released);

 private:
  struct Reported {
    v1::StepReport report;
    Origin origin;
    size_t bytes = 0;
  };
  using Partial = std::map<int32_t, Reported>;  // by rank

  // Ends with the step; its reports are left, without an origin.
  std::vector<v1::StepReport> Take(std::map<uint64_t, Partial>::iterator partial,
                                   std::vector<Origin>* released);
  void MakeRoom(std::vector<Origin>* released);

  uint32_t world_size_;
  uint64_t last_step_;
  size_t most_bytes_;
  size_t bytes_ = 0;                      // of all reports, with what holds them
  uint64_t bare_until_ = 0;               // reports up to this step have no details
  std::map<uint64_t, Partial> partials_;  // by step, all > last_step_
};

}  // namespace ringleader::lifecycle
