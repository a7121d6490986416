// Chooses what a layer attends to, on all ranks together. Everything that ranks merge is an integer
// sum, a maximum or a concatenation in rank order, so that the index is the same on any number of
// ranks.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "worker/attention/index/index_device.h"
#include "worker/attention/index/layer_index.h"

namespace ringleader::attention {

// One rank's view of a layer's call.
struct IndexInputs {
  kernels::ShardLayout layout;  // of this rank
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0.0f;                                          // of logits
  std::shared_ptr<const DeviceDocuments> documents = nullptr;  // null: one
};

// The index of a layer under `budget`. INVALID_ARGUMENT names a pattern that it does not know.
absl::StatusOr<std::shared_ptr<LayerIndex>> BuildIndex(const patterns::AttentionOptions& options,
                                                       const patterns::LayerBudget& budget,
                                                       const IndexInputs& inputs,
                                                       IndexDevice& device);

}  // namespace ringleader::attention
