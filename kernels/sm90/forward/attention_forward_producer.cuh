// The producer warp of kernels that hold queries and walk the keys these attend to, and the stages
// of keys and values that it fills.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/forward/attention_forward_tiles.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"

namespace ringleader::kernels::sm90 {

// What such a kernel walks.
struct ForwardWalk {
  TileWalk walk;
  ColumnWalk columns;  // WalkKind::kColumns
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t* next_item = nullptr;
};

// A pipeline's shared memory, less what an item keeps there.
template <int kHeadDim, WalkKind kKind, int kDepth>
struct KeyStages {
  using Tile = ForwardTile<kHeadDim, kKind>;
  static constexpr int kStages = kDepth;
  alignas(1024) uint8_t key[kStages][Tile::kKeyBytes];
  alignas(1024) uint8_t value[kStages][Tile::kKeyBytes];
  ptx::Mbarrier item_arrived, item_released;
  ptx::Mbarrier key_arrived[kStages], key_released[kStages];
  ptx::Mbarrier value_arrived[kStages], value_released[kStages];
  StepOf<kKind> step[kStages];
  ItemOf<kKind> item;

  // One thread calls.
  __device__ __forceinline__ void InitBarriers() {
    constexpr int kConsumerThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
    // Documents do not change who describes a step.
    constexpr int kDescribers = ForwardTiles<kKind, false>::kDescribers;
    ptx::MbarrierInit(&item_arrived, 1);
    ptx::MbarrierInit(&item_released, kConsumerThreads);
    for (int i = 0; i < kStages; ++i) {
      ptx::MbarrierInit(&key_arrived[i], kDescribers);
      ptx::MbarrierInit(&key_released[i], kConsumerThreads);
      ptx::MbarrierInit(&value_arrived[i], 1);
      ptx::MbarrierInit(&value_released[i], kConsumerThreads);
    }
  }
};

// All threads of a CTA call, before they take their roles.
template <typename Pipeline, typename... Maps>
__device__ __forceinline__ Pipeline* InitPipelines(void* raw_shared, const Maps*... maps) {
  const auto pipelines = static_cast<Pipeline*>(raw_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Pipeline::Tile::kPipelines; ++i) pipelines[i].InitBarriers();
    ptx::MbarrierInitFence();
    (ptx::PrefetchTensorMap(maps), ...);
  }
  __syncthreads();
  return pipelines;
}

template <int kHeadDim, int kBytes>
__device__ __forceinline__ void LoadStage(uint8_t (&stage)[kBytes], const CUtensorMap* map,
                                          ptx::Mbarrier* arrived, const TileRef& tile,
                                          int32_t head) {
  ptx::TmaLoadTile(stage, map, arrived, tile.index * (kBytes / (2 * kHeadDim)), head);
}
// Loads block of columns by block, so that the two tiles lie in the stage like one of 128 keys.
template <int kHeadDim, int kBytes>
__device__ __forceinline__ void LoadStage(uint8_t (&stage)[kBytes], const CUtensorMap* map,
                                          ptx::Mbarrier* arrived, const TilePair& tiles,
                                          int32_t head) {
#pragma unroll
  for (int block = 0; block < kHeadDim / 64; ++block) {
    uint8_t* const rows = stage + block * 128 * ptx::kSwizzleRowBytes;
    ptx::TmaLoadBlock(rows, map, arrived, tiles.index * 64, block, head);
    // No second tile: rows before the tensor's first are zeros, as are those beyond its last.
    ptx::TmaLoadBlock(rows + 64 * ptx::kSwizzleRowBytes, map, arrived, tiles.second * 64, block,
                      head);
  }
}

// Loads the groups of a stage, each by a lane: to issue a copy takes as long whatever its size. A
// whole warp calls; `arrived` expects the bytes.
template <int kHeadDim, int kBytes>
__device__ __forceinline__ void LoadGroups(uint8_t (&stage)[kBytes], const CUtensorMap* map,
                                           ptx::Mbarrier* arrived, const TileRef& groups,
                                           int32_t head) {
  constexpr int kSlots = kBytes / (2 * kHeadDim * kGroupKeys);
  __syncwarp();  // the barrier expects them
  const int slot = threadIdx.x % 32;
  if (slot >= kSlots) return;
  // No group: rows before the tensor's first are zeros.
  ptx::TmaLoadTile(stage + slot * (kBytes / kSlots), map, arrived,
                   static_cast<int32_t>(groups.bits) * kGroupKeys, head);
}

// Walks items until there are no more. `load_item(item)`, by one lane, arrives at item_arrived and
// starts the copies of what the consumers keep of an item.
template <bool kDocuments, int kHeadDim, WalkKind kKind, int kDepth, typename LoadItem>
__device__ __forceinline__ void ProduceStages(const ForwardWalk& params, const CUtensorMap* key_map,
                                              const CUtensorMap* value_map,
                                              KeyStages<kHeadDim, kKind, kDepth>& shared,
                                              const LoadItem& load_item) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  using Tiles = ForwardTiles<kKind, kDocuments>;
  constexpr bool kGroups = kHasGroups<kKind>;
  const int lane = threadIdx.x % 32;
  const int32_t group = params.heads / params.kv_heads;
  const int32_t blocks = (params.walk.query_tokens + Tile::kQueries - 1) / Tile::kQueries;
  RingCursor<1> item_cursor;
  RingCursor<kDepth> stage;
  while (true) {
    int32_t index = 0;
    if (lane == 0) index = atomicAdd(params.next_item, 1);
    index = __shfl_sync(0xFFFFFFFFu, index, 0);
    ItemOf<kKind> item;
    if constexpr (kGroups) {
      item = GroupItemAt<Tile::kHeads>(params.heads, params.kv_heads, blocks,
                                       params.walk.GroupParts(), index);
    } else {
      item = ForwardItemAt(params.heads, params.kv_heads, blocks, index);
    }
    if (item.head < 0) break;
    Tiles tiles(params.walk, params.columns, item);
    auto tile = tiles.Next();
    if (tile.index < 0) continue;  // nothing to attend to: outputs keep what they hold

    const int32_t kv_head = item.head / group;
    ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
    if (lane == 0) {
      shared.item = item;
      load_item(item);
    }
    item_cursor.Advance();
    while (tile.index >= 0) {
      const auto following = tiles.Next();
      ptx::MbarrierWait(&shared.key_released[stage.index], stage.lap ^ 1);
      // The copy starts before the step is described; consumers come after the arrival.
      if (lane == 0) {
        ptx::MbarrierExpect(&shared.key_arrived[stage.index], Tile::kKeyBytes);
        if constexpr (!kGroups) {
          LoadStage<kHeadDim>(shared.key[stage.index], key_map, &shared.key_arrived[stage.index],
                              tile, kv_head);
        }
      }
      if constexpr (kGroups) {
        LoadGroups<kHeadDim>(shared.key[stage.index], key_map, &shared.key_arrived[stage.index],
                             tile, kv_head);
      }
      tiles.Describe(shared.step[stage.index], tile, following.index < 0);
      if (lane < Tiles::kDescribers) ptx::MbarrierArrive(&shared.key_arrived[stage.index]);
      ptx::MbarrierWait(&shared.value_released[stage.index], stage.lap ^ 1);
      if (lane == 0) {
        ptx::MbarrierArriveExpect(&shared.value_arrived[stage.index], Tile::kKeyBytes);
        if constexpr (!kGroups) {
          LoadStage<kHeadDim>(shared.value[stage.index], value_map,
                              &shared.value_arrived[stage.index], tile, kv_head);
        }
      }
      if constexpr (kGroups) {
        LoadGroups<kHeadDim>(shared.value[stage.index], value_map,
                             &shared.value_arrived[stage.index], tile, kv_head);
      }
      stage.Advance();
      tile = following;
    }
  }
  ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
  if (lane == 0) {
    static_cast<ForwardItem&>(shared.item) = {-1, 0};
    ptx::MbarrierArrive(&shared.item_arrived);
  }
}

}  // namespace ringleader::kernels::sm90
