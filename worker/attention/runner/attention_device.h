// What RingRunner asks of a device: the CPU engine (cpu/cpu_attention_call.h) or a
// GPU (cuda/cuda_attention_call.h). The runner owns the order of hops and steps; a device owns
// tensors, memory, transfers and arithmetic.
//
// On GPUs every verb enqueues work on LibTorch's current stream and returns; allocation may throw
// c10::Error there.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/index_device.h"
#include "patterns/index/layer_index.h"
#include "patterns/index/vertical_slash.h"
#include "ring/ring_schedule.h"
#include "ringleader/kernels/shard_layout.h"
#include "worker/attention/runner/ring_slots.h"
#include "worker/attention/stats/attention_stats.h"

namespace ringleader::attention {

using patterns::DeviceArray;
using patterns::DeviceDocuments;
using patterns::DeviceMemory;
using patterns::IndexDevice;
using patterns::LayerIndex;
using patterns::SequenceDocuments;

// The sizes of one rank's q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim].
struct CallShape {
  int64_t tokens = 0;
  int32_t heads = 0, kv_heads = 0, head_dim = 0;

  int64_t kv_elements(int64_t keys) const { return keys * kv_heads * head_dim; }  // of keys alone
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
};

// What a call attends to at a step of the ring: the keys and values of one owner.
struct Step {
  const LayerIndex& index;
  kernels::ShardLayout mine;   // of the queries
  kernels::ShardLayout owner;  // of the keys
  int64_t keys = 0;            // tokens that the owner holds
  size_t number = 0;           // in the schedule
  // [2, keys, kv_heads, d]: keys, then values. Null for a rank's own, which are read where the
  // model left them while the slot is being sent.
  const void* slot = nullptr;
};

// Whether keys and values are gathered before the first step, and gradients summed after the last,
// instead of travelling hop by hop.
inline bool Gathers(const ring::RingSchedule& schedule) {
  return schedule.shape.kind == ring::RingKind::kAllGather && schedule.ranks > 1;
}

// One layer's forward or backward: its tensors, and the arithmetic on them. Verbs of forward and of
// backward stand in the order in which the runner calls them.
class AttentionCall : public IndexDevice {
 public:
  virtual int layer() const = 0;
  virtual CallShape shape() const = 0;
  // shape()'s, where only k and v are there, too; and elements of a token's keys.
  virtual int64_t tokens() const = 0;
  virtual int64_t kv_row() const = 0;
  // The schedule's slots with this rank's keys and values in their place, from where hops take
  // them. Where the schedule gathers, all slots are on their way. Without memory where there is one
  // rank. Needs no tensors but k and v. `slot_tokens`: for which a slot has room, the most that any
  // rank holds.
  virtual absl::StatusOr<std::unique_ptr<RingSlots>> PlaceKv(const ring::RingSchedule& schedule,
                                                             int64_t slot_tokens) = 0;

  // From here on `value` stands in the place of the local queries `rows` in what Run(BlockStep)
  // chooses, until LetSpeak(). `rows` outlives that.
  virtual absl::Status Silence(const DeviceArray<int64_t>& rows, float value) = 0;
  virtual absl::Status LetSpeak() = 0;

  // Forward: output without a sum yet; then, with each owner's keys, their selected columns are
  // picked up and attention to their selected tiles is merged into the output, and counted.
  virtual absl::Status StartOutput() = 0;
  virtual absl::Status GatherColumns(const Step& step) = 0;
  virtual absl::Status Attend(const Step& step) = 0;
  virtual absl::Status AttendColumns(const Step& own) = 0;
  virtual absl::Status FinishOutput() = 0;
  // After FinishOutput, where this step probes: adds to the layer's statistics the share of the
  // attention of `work`'s queries, whose rows patterns::EstimateRows has summed, that the output
  // holds: the exponential of how much less the logarithm of its row sum is.
  virtual absl::Status CountProbe(const patterns::VerticalSlash& work, ProbedRows rows) = 0;

  // Backward. Slots for gradients hold float32, [2, keys, kv_heads, d]: of keys, then of values.
  virtual absl::StatusOr<std::unique_ptr<RingSlots>> PlaceGradients(
      const ring::RingSchedule& schedule, int64_t slot_tokens) = 0;
  virtual absl::Status StartGradients() = 0;
  // The gradients of the selected columns' keys and values.
  virtual absl::Status ColumnsBackward(const Step& own) = 0;
  // Adds to the gradient of q and to the gradients of the step's keys in `slot`.
  virtual absl::Status AttendBackward(const Step& step, void* slot) = 0;
  // Adds the gradients of the columns that the step's owner has to `slot`.
  virtual absl::Status ScatterColumns(const Step& step, void* slot) = 0;
  // The gradient of q is complete.
  virtual absl::Status FinishQueries() = 0;
  // The gradients of this rank's keys and values are complete: in the schedule's home slot or,
  // where it gathers, as this rank's part of the sum over ranks. No transfer is in flight.
  virtual absl::Status ReturnGradients(const ring::RingSchedule& schedule, int64_t slot_tokens,
                                       RingSlots& slots) = 0;
};

// What outlives a call. Not thread-safe.
class AttentionDevice {
 public:
  virtual ~AttentionDevice() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  // A hop carries the rows that somebody attends to where they are no more than this share of their
  // shard, and all of it where they are more. 0: always all.
  virtual double most_carried() const { return 0.0; }

  // What happens between Begin and End belongs to `phase`, less the waits for transfers in it.
  virtual absl::Status Begin(double AttentionSeconds::*phase) = 0;
  virtual absl::Status End() = 0;

  // The host's counts of a layer in this step.
  virtual LayerStats& StatsOf(int layer) = 0;
  // Forwards since the last mark, or TakeStats, were of one micro-batch.
  virtual void MarkMicroBatch() = 0;
  // What happened since the last call, by steps of `forward`.
  virtual AttentionStats TakeStats(const ring::RingSchedule& forward) = 0;

  // `documents` on the device, for forwards that estimate from `queries`.
  virtual std::shared_ptr<const DeviceDocuments> Upload(
      std::shared_ptr<const SequenceDocuments> documents,
      const patterns::EstimateQueries& queries) = 0;
};

}  // namespace ringleader::attention
