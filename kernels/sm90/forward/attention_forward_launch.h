// What the launches of forward and of the deterministic dQ share: both hold queries and walk keys.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/sm90/forward/attention_forward_producer.cuh"
#include "kernels/sm90/launch/launch.h"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::sm90 {

// `*next_item` must be the first item, 0, when the kernel starts.
inline ForwardWalk MakeForwardWalk(const AttentionShape& shape, const ShardLayout& query_layout,
                                   const ShardLayout& key_layout, const TileSelection& tiles,
                                   const ColumnWalk& columns, int32_t* next_item) {
  return {.walk = MakeTileWalk(shape, query_layout, key_layout, tiles, /*by_column=*/false),
          .columns = columns,
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .next_item = next_item};
}

// How LoadStage reads keys or values.
template <int kHeadDim, WalkKind kKind>
absl::StatusOr<CUtensorMap> StageMap(const TokenMajor<const __nv_bfloat16>& tensor,
                                     std::string_view name) {
  if (kHasGroups<kKind>) return LoadMap(tensor, kGroupKeys, name);
  return kKind == WalkKind::kTiles64 ? LoadBlockMap(tensor, 64, name)
                                     : LoadMap(tensor, ForwardTile<kHeadDim, kKind>::kKeys, name);
}

}  // namespace ringleader::kernels::sm90
