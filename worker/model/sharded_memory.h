// How much GPU memory a rank of ShardedDecoder and ShardedAdamW takes, and which recompute policy
// that leaves room for; before anything is allocated. docs/memory.md has the terms.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/model_config.h"

namespace ringleader::model {

struct ShardedShape {
  int ranks = 1;              // that share the model
  int64_t tokens = 0;         // of a sequence, on this rank
  int64_t element_bytes = 2;  // of parameters and activations
  int64_t mlp_chunk_tokens = 32768;
  int64_t loss_chunk_tokens = 8192;
};

// Where parameters are held: whole on every rank (ZeRO stage 2), or only this rank's shard, with
// the embedding, the head and two layers at a time gathered from their owners (stage 3).
enum class ParameterSharding { kWhole, kShard };

// What backward recomputes: `recompute` in all layers but the last `kept_layers`, which keep every
// product.
struct RecomputePlan {
  Recompute recompute = Recompute::kFull;
  int64_t kept_layers = 0;
};

// Bytes on one rank.
struct ShardedMemory {
  int64_t parameters = 0;  // in the working type, what is gathered included
  int64_t optimizer = 0;   // this rank's shard: master weights, two moments, the reduced gradient
  int64_t buckets = 0;     // gradients on their way to their owners
  int64_t saved = 0;       // what forward keeps for backward
  int64_t working = 0;  // the largest of a layer in backward, attention in work, a chunk of logits
  int64_t total() const { return parameters + optimizer + buckets + saved + working; }
};

ShardedMemory EstimateShardedMemory(const ModelConfig& config, const ShardedShape& shape,
                                    const RecomputePlan& plan, ParameterSharding sharding);

struct TrainingPlan {
  RecomputePlan recompute;
  ParameterSharding sharding = ParameterSharding::kWhole;
  ShardedMemory memory;
};

// The plan that recomputes least and fits `available` bytes; of `wanted`, if that is set.
// Parameters are sharded only where nothing else fits. What could be recomputed is kept only in the
// first kComfortableShare of the memory: estimates are not exact, and products are not worth a
// failure. FAILED_PRECONDITION, with the arithmetic and what to change, where none fits. What NCCL,
// the attention index and the driver take is not part of it: leave them their share.
inline constexpr double kComfortableShare = 0.87;
absl::StatusOr<TrainingPlan> PlanTraining(const ModelConfig& config, const ShardedShape& shape,
                                          std::optional<Recompute> wanted, int64_t available);

// "attention_only, 5 of 36 layers kept whole"
std::string DescribeRecompute(const ModelConfig& config, const RecomputePlan& plan);
// "81.2 GiB: parameters 5.7, optimizer 11.5, …"
std::string DescribeMemory(const ShardedMemory& memory);

}  // namespace ringleader::model
