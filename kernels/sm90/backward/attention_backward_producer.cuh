// What a CTA of backward attention holds in shared memory, and the warp that fills it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_tiles.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "kernels/sm90/warpgroup/ring_cursor.cuh"

namespace ringleader::kernels::sm90 {

template <int kHeadDim>
struct BackwardTile {
  // Q of a step is read from the middle of the step before it (scores) to the start of the step
  // after it (dK); dO within its own step.
  static constexpr int kQueryStages = 3;
  static constexpr int kOutStages = 2;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kQueryBytes = kBackwardQueries * kHeadDim * 2;
  static constexpr int kKeyBytes = kBackwardKeys * kHeadDim * 2;
  static constexpr int kScoreBytes = kBackwardKeys * kBackwardQueries * 2;
  // Bytes between the 64-column halves of a tile.
  static constexpr int kQueryBlock = kBackwardQueries * ptx::kSwizzleRowBytes;
  static constexpr int kKeyBlock = kBackwardKeys * ptx::kSwizzleRowBytes;
  // A consumer adds this many columns of dQ.
  static constexpr int kDqColumns = kHeadDim / 2;
  static constexpr int kDqBytes = kBackwardQueries * kDqColumns * 4;
};

template <int kHeadDim, typename Step = BackwardStep>
struct BackwardShared {
  using Tile = BackwardTile<kHeadDim>;
  alignas(1024) uint8_t key[Tile::kKeyBytes];
  alignas(1024) uint8_t value[Tile::kKeyBytes];
  alignas(1024) uint8_t query[Tile::kQueryStages][Tile::kQueryBytes];
  alignas(1024) uint8_t d_out[Tile::kOutStages][Tile::kQueryBytes];
  alignas(1024) uint8_t d_scores[Tile::kScoreBytes];
  alignas(1024) uint8_t staged[2][Tile::kConsumers][Tile::kDqBytes];  // gradients to be added
  alignas(16) RowStats stats[Tile::kQueryStages];
  Step step[Tile::kQueryStages];
  BackwardItem item;
  ptx::Mbarrier item_arrived, item_released;
  ptx::Mbarrier query_arrived[Tile::kQueryStages], query_released[Tile::kQueryStages];
  ptx::Mbarrier d_out_arrived[Tile::kOutStages], d_out_released[Tile::kOutStages];
  ptx::Mbarrier d_scores_released;
};

template <int kHeadDim, WalkKind kKind, bool kDocuments>
__device__ __forceinline__ void BackwardProduce(
    const BackwardParams& params, const CUtensorMap* query_map, const CUtensorMap* key_map,
    const CUtensorMap* value_map, const CUtensorMap* d_out_map,
    BackwardShared<kHeadDim, KeyStepOf<kKind>>& shared) {
  using Tile = BackwardTile<kHeadDim>;
  using Tiles = BackwardTiles<kKind, kDocuments>;
  const int lane = threadIdx.x % 32;
  const int32_t tile_tokens = params.walk.tile();
  RingCursor<1> item_cursor;
  RingCursor<Tile::kQueryStages> query;
  RingCursor<Tile::kOutStages> d_out;
  while (true) {
    int32_t index = 0;
    if (lane == 0) {
      index = atomicAdd(params.next_item, 1);
      if (kMayBeLists<kKind> && params.items != nullptr) index = params.items[index];
    }
    index = __shfl_sync(0xFFFFFFFFu, index, 0);
    const BackwardItem item = BackwardItemAt<kKind>(params, index);
    if (item.kv_head < 0) break;
    int32_t head = item.first_head;
    Tiles tiles(params, head, item);
    const auto next_tile = [&] {
      TileRef tile = tiles.Next();
      while (tile.index < 0 && head < item.end_head - 1) {
        tiles = Tiles(params, ++head, {.key_block = item.key_block, .descending = item.descending});
        tile = tiles.Next();
      }
      return tile;
    };
    TileRef tile = next_tile();
    if (tile.index < 0) continue;  // nobody attends to these keys: their gradients stay

    ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
    if (lane == 0) {
      shared.item = item;
      ptx::MbarrierArriveExpect(&shared.item_arrived, 2 * Tile::kKeyBytes);
      ptx::TmaLoadTile(shared.key, key_map, &shared.item_arrived, item.key_block * kBackwardKeys,
                       item.kv_head);
      ptx::TmaLoadTile(shared.value, value_map, &shared.item_arrived,
                       item.key_block * kBackwardKeys, item.kv_head);
    }
    item_cursor.Advance();
    while (tile.index >= 0) {
      const int32_t step_head = head;
      const TileRef following = next_tile();
      for (int32_t offset = 0; offset < tile_tokens; offset += kBackwardQueries) {
        const int32_t first_query = tile.index * tile_tokens + offset;
        if (first_query >= params.walk.query_tokens) break;
        const bool last =
            following.index < 0 && (offset + kBackwardQueries >= tile_tokens ||
                                    first_query + kBackwardQueries >= params.walk.query_tokens);
        ptx::MbarrierWait(&shared.query_released[query.index], query.lap ^ 1);
        // The copies start before the step is described; consumers come after the arrival.
        KeyStepOf<kKind>& step = shared.step[query.index];
        ptx::Mbarrier* const query_arrived = &shared.query_arrived[query.index];
        if (lane == 0) {
          const int64_t block = static_cast<int64_t>(step_head) * params.query_blocks +
                                first_query / kBackwardQueries;
          ptx::MbarrierExpect(query_arrived, Tile::kQueryBytes + sizeof(RowStats));
          ptx::TmaLoadTile(shared.query[query.index], query_map, query_arrived, first_query,
                           step_head);
          ptx::BulkLoad(&shared.stats[query.index], params.row_stats + block, sizeof(RowStats),
                        query_arrived);
          step.head = step_head;
          step.first_query = first_query;
        }
        tiles.Describe(step, params.walk, step_head, tile, offset, last);
        if (lane < Tiles::kDescribers) ptx::MbarrierArrive(query_arrived);
        query.Advance();
        ptx::MbarrierWait(&shared.d_out_released[d_out.index], d_out.lap ^ 1);
        if (lane == 0) {
          ptx::Mbarrier* const arrived = &shared.d_out_arrived[d_out.index];
          ptx::MbarrierArriveExpect(arrived, Tile::kQueryBytes);
          ptx::TmaLoadTile(shared.d_out[d_out.index], d_out_map, arrived, first_query, step_head);
        }
        d_out.Advance();
      }
      tile = following;
    }
  }
  ptx::MbarrierWait(&shared.item_released, item_cursor.lap ^ 1);
  if (lane == 0) {
    shared.item = {};
    ptx::MbarrierArrive(&shared.item_arrived);
  }
}

}  // namespace ringleader::kernels::sm90
