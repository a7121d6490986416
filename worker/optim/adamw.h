// AdamW (Loshchilov and Hutter 2019): its options, a rank's state, and the passes over it on the
// CPU. Without LibTorch. sharded_adamw.h has the optimizer.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

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

// One update of `count` elements that are all decayed, or none is. Bias correction is folded into
// rate and root, and clipping and the mean over tokens into the gradient's scale:
//   g = gradient scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   master = master kept - rate m / (sqrt(v) root + epsilon)
struct AdamWPass {
  // weight_decay: 0 where these elements are not decayed. step: from 1.
  AdamWPass(const AdamWOptions& options, double learning_rate, double weight_decay, int64_t step,
            double scale);
  // Works on the calling thread; elements do not depend on each other.
  void Run(float* master, float* m, float* v, const float* gradient, int64_t count) const;

 private:
  float beta1_, beta2_, epsilon_, rate_, root_, kept_, scale_;
};

// The sum is in fp64, in a fixed order: a float sum over a large shard would lose small gradients.
double SumOfSquares(const float* values, int64_t count);

}  // namespace ringleader::optim
