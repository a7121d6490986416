// AdamW (Loshchilov and Hutter 2019) with fp32 master weights, sharded over all ranks: every rank
// owns a range of the flat parameter buffer and keeps master weights and moments for that range
// only (ZeRO stage 2, Rajbhandari et al. 2020).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model_shape/parameter_layout.h"
#include "worker/comm/communicator.h"

namespace ringleader::optim {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // matrices only; norms and biases are never decayed
  double clip_norm = 1.0;     // largest global gradient norm; 0: no clipping
};

// This rank's range of the flat buffer, and its state there. Padding past the last parameter stays
// 0.
struct OptimizerShard {
  int64_t begin = 0;  // elements
  std::vector<float> master, first_moment, second_moment;
  int64_t elements() const { return static_cast<int64_t>(master.size()); }
};

// Makes a copy of a shard as it was when this was handed out, once, on any thread. Whoever holds it
// calls or drops it soon: training stops where it would change what is not yet copied.
using ShardSource = absl::AnyInvocable<absl::StatusOr<OptimizerShard>() &&>;

struct OptimizerStep {
  double gradient_norm = 0.0;  // global, before clipping
  bool skipped = false;        // the norm was NaN or infinite: nothing changed
};

// Not thread-safe. All ranks of `comm` make the same calls.
class AdamW {
 public:
  // `parameters` [layout.PaddedElements(comm.size())] is the start of the master weights. `comm`
  // must outlive this.
  AdamW(const AdamWOptions& options, const model::ParameterLayout& layout, comm::Communicator& comm,
        const float* parameters);

  // gradients: [padded], this rank's contribution (micro-batches added up, scaled so that the sum
  // over ranks is the gradient). Updates this rank's shard and gathers all shards into parameters
  // [padded]. The result is bit for bit the same in every run with this number of ranks, and the
  // same on all of them. Gradients are left as they are.
  absl::StatusOr<OptimizerStep> Step(double learning_rate, const float* gradients,
                                     float* parameters);

  // For checkpoints. updates(): steps taken, without skipped ones (bias correction).
  const OptimizerShard& shard() const { return shard_; }
  int64_t updates() const { return updates_; }

  // Takes a checkpoint's state for this rank's range, and gathers it into parameters [padded].
  // INVALID_ARGUMENT unless the shard is this rank's range.
  absl::Status Restore(OptimizerShard shard, int64_t updates, float* parameters);

 private:
  absl::Status GatherParameters(float* parameters);

  AdamWOptions options_;
  comm::Communicator& comm_;
  OptimizerShard shard_;
  std::vector<float> gradient_;  // [shard]
  // Ranges of the shard that are decayed, relative to its begin.
  struct Range {
    int64_t begin, end;
  };
  std::vector<Range> decayed_;
  int64_t updates_ = 0;
};

}  // namespace ringleader::optim
