// How the blocks of a model lie in shards and buffers, and how their transfers end, for those who
// gather parameters and those who reduce gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "model_shape/parameter_layout.h"
#include "worker/optim/shard_device.h"

namespace ringleader::optim {

inline int LastBlock(const model::ParameterLayout& layout) {
  return static_cast<int>(layout.blocks.size()) - 1;
}
inline bool IsLayer(const model::ParameterLayout& layout, int block) {
  return block > 0 && block < LastBlock(layout);
}

// Four places hold what is in work: even layers, odd layers, the embedding, the final block.
inline constexpr int kPlaces = 4;
inline int PlaceOf(const model::ParameterLayout& layout, int block) {
  return block == 0 ? 2 : block == LastBlock(layout) ? 3 : block % 2;
}

// body(rank, begin, end) for the owners of the flat elements [begin, end) of `block`, in shards of
// `elements`.
template <typename Body>
absl::Status ForOwners(const model::ParameterBlock& block, int64_t elements, Body body) {
  const int64_t block_end = block.begin + block.elements;
  for (int64_t owner = block.begin / elements; owner * elements < block_end; ++owner) {
    const int64_t from = std::max(block.begin, owner * elements);
    const int64_t to = std::min(block_end, (owner + 1) * elements);
    RETURN_IF_ERROR(body(static_cast<int>(owner), from, to));
  }
  return absl::OkStatus();
}

// Waits for all of them; none is left.
inline absl::Status Await(std::vector<ShardTransferPtr>& transfers) {
  for (const ShardTransferPtr& transfer : transfers) {
    if (transfer != nullptr) RETURN_IF_ERROR(transfer->Await());
  }
  transfers.clear();
  return absl::OkStatus();
}

}  // namespace ringleader::optim
