// How much memory a rank of Decoder and ShardedAdamW takes on its device and on the host, and which
// recompute policy that leaves room for; before anything is allocated. For trainers, the planner
// and `ringctl plan` alike. docs/memory.md has the terms.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "model_shape/precision.h"

namespace ringleader::model {

struct TrainingShape {
  int ranks = 1;              // that share the model
  int64_t tokens = 0;         // of a sequence, on this rank
  int64_t element_bytes = 2;  // of parameters and activations
  Precision precision = Precision::kModelType;
  bool always_casts = true;  // with FP8: in every step
  int64_t mlp_chunk_tokens = 32768;
  int64_t loss_chunk_tokens = 8192;
  int ranks_per_node = 1;  // that share a host's memory
  // A CPU rank: there is no second memory, so nothing is moved there, and copies for checkpoints
  // and the export lie on the device too. Where its parameters are whole, its gradient is.
  bool device_is_host = false;
  // What attention has chosen in all layers, which lies on the device whatever is recomputed or
  // moved, and what choosing takes besides.
  int64_t choice_bytes = 0, choice_working_bytes = 0;
  int head_ranks = 1;  // that share out heads (ring/head_shares.h)
};

// Where parameters are held, in the working type or, of layers that are cast, in e4m3: whole on
// every rank (ZeRO stage 2), or the embedding, the head and two layers at a time, gathered from the
// owners of their master weights (stage 3).
enum class ParameterSharding { kWhole, kShard };

// What backward recomputes: `recompute` in all layers but the last `kept_layers`, which keep every
// product. What the first `host_layers` layers keep waits for backward in host memory, and the
// device holds no more at a time than the other layers do (offload_schedule.h); not together with
// kept_layers.
struct RecomputePlan {
  Recompute recompute = Recompute::kFull;
  int64_t kept_layers = 0;
  int64_t host_layers = 0;
};

// Bytes that one layer keeps for backward of a token.
int64_t KeptBytesPerToken(const ModelConfig& config, int64_t element_bytes, Recompute recompute);

// Bytes of one rank.
struct TrainingMemory {
  int64_t parameters = 0;  // in the working type, and layers that are gathered in any
  int64_t casts = 0;       // of weights, in e4m3, in place of those, with what comes with them
  int64_t optimizer = 0;   // this rank's shard: master weights, two moments, the reduced gradient
  int64_t buckets = 0;     // gradients on their way to their owners, which one rank alone needs not
  int64_t saved = 0;       // what forward keeps for backward, on the device
  int64_t working = 0;  // the largest of a layer in backward, attention in work, a chunk of logits
  int64_t copies = 0;   // a checkpoint's copy of the shard, a part of the export: device_is_host
  int64_t total() const {
    return parameters + casts + optimizer + buckets + saved + working + copies;
  }
  // What lies in host memory; counted only where something is kept there.
  int64_t host_saved = 0;   // pinned: what host_layers keep
  int64_t host_copies = 0;  // a checkpoint's copy of the shard; a rank's part of the export
  int64_t host_total() const { return host_saved + host_copies; }
};

TrainingMemory EstimateMemory(const ModelConfig& config, const TrainingShape& shape,
                              const RecomputePlan& plan, ParameterSharding sharding);

struct TrainingPlan {
  RecomputePlan recompute;
  ParameterSharding sharding = ParameterSharding::kWhole;
  TrainingMemory memory;
};

// Whether what layers keep for backward may wait in host memory: never, where nothing else fits, or
// all of it but what is on its way.
enum class Offload { kNone, kAuto, kHost };

struct MemoryWishes {
  std::optional<Recompute> recompute = {};  // unset: the least that fits
  Offload offload = Offload::kAuto;
};

// Estimates are not exact, and products are not worth a failure: less so where what is too much
// takes the machine's other memory, and ends processes.
constexpr double ComfortableShare(bool device_is_host) {
  return device_is_host ? 0.87 : 0.95;
}
// What a trainer leaves of its GPU's `total` bytes for what no plan counts, 4 to 5 GiB in use
// (docs/memory.md): the driver, NCCL's buffers, the attention index, kernels' code, and what the
// allocator loses in fragments, whose segments expand.
int64_t ReservedBytes(int64_t total);
// Layers on the device with Offload::kHost: one in work, one on its way, one ahead of need.
inline constexpr int64_t kStagedLayers = 3;

// Bytes that a rank may plan with: of its GPU, and its share of its host's memory.
struct MemoryLimits {
  int64_t device = 0, host = 0;
};

// The plan that recomputes least and fits, of what is wished for. Parameters are sharded only where
// no policy fits, and host memory is used only where that does not fit either: then with recompute
// full, and with as many layers as fit left on the device. What could be recomputed or copied is
// kept only in the first ComfortableShare() of the device's memory. FAILED_PRECONDITION, with the
// arithmetic and what to change, where none fits. What the driver, NCCL and indices that the shape
// does not name take is not part of it: leave them ReservedBytes(). Where device_is_host,
// limits.host and the wish for offload say nothing.
absl::StatusOr<TrainingPlan> PlanTraining(const ModelConfig& config, const TrainingShape& shape,
                                          const MemoryWishes& wishes, const MemoryLimits& limits);

// "attention_only, 5 of 36 layers kept whole"
std::string DescribeRecompute(const ModelConfig& config, const RecomputePlan& plan);
// "layer input, attention output, log-sum-exp: of 3 layers on the device, of 33 in host memory"
std::string DescribeKept(const ModelConfig& config, const RecomputePlan& plan);
// "81.2 GiB (parameters 5.7, optimizer 11.5, …)"
std::string DescribeMemory(const TrainingMemory& memory);

}  // namespace ringleader::model
