// What the optimizer's tests share: a small model, its gradients, a shard.
#pragma once

#include <torch/types.h>

#include <random>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "worker/optim/sharded/sharded_adamw.h"

namespace ringleader::optim {

inline model::ModelConfig SmallModel() {
  model::ModelConfig config;
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.intermediate_size = 40;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.qkv_bias = true;
  return config;
}

// A normally distributed value for every parameter, 0 in the gaps between them and past the last
// of `padded` elements.
inline std::vector<float> Random(const model::ParameterLayout& layout, int64_t padded,
                                 uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(padded, 0.0f);
  for (const model::ParameterSlot& slot : layout.slots) {
    for (int64_t i = 0; i < slot.elements; ++i) values[slot.offset + i] = normal(generator);
  }
  return values;
}

// One backward's worth of gradients: `values` [elements] times `factor`, from the last block to the
// first.
inline void AddGradients(ShardedAdamW& adamw, const model::ParameterLayout& layout,
                         const std::vector<float>& values, float factor = 1.0f) {
  for (int block = static_cast<int>(layout.blocks.size()) - 1; block >= 0; --block) {
    const model::ParameterBlock& range = layout.blocks[block];
    const torch::Tensor bucket = adamw.OpenGradient(block);
    const torch::Tensor part =
        torch::from_blob(const_cast<float*>(values.data()) + range.begin, {range.elements});
    bucket.add_(part.to(bucket.device()), factor);
    adamw.CloseGradient(block);
  }
}

// A rank's shard at once.
inline absl::StatusOr<OptimizerShard> TakeShard(ShardedAdamW& adamw) {
  ASSIGN_OR_RETURN(ShardSource source, adamw.Snapshot());
  return std::move(source)();
}

}  // namespace ringleader::optim
