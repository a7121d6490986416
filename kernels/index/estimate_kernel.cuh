// What the kernels of the estimate share: a block keeps up to four runs of 64 estimate queries (of
// the heads of one KV head) in shared memory, and streams tiles of 128 keys past them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <climits>
#include <cstdint>

#include "kernels/sm90/ptx/exp2.cuh"
#include "kernels/sm90/ptx/mbarrier.cuh"
#include "kernels/sm90/ptx/sync.cuh"
#include "kernels/sm90/ptx/tma.cuh"
#include "kernels/sm90/ptx/wgmma.cuh"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::index {

namespace ptx = sm90::ptx;
using ptx::Exp2;

inline constexpr int kKeyTile = 128;
inline constexpr int kRun = kMassRun;  // queries in a run
inline constexpr int kGroup = 8;       // of them that a quad of lanes has side by side
inline constexpr int kBlockRuns = 4;   // runs of queries in a block
inline constexpr int kBlockQueries = kBlockRuns * kRun;
inline constexpr int kConsumers = 4;  // warpgroups
inline constexpr int kConsumerThreads = kConsumers * ptx::kWarpgroupThreads;
inline constexpr int kBlockThreads = kConsumerThreads + 32;  // and a warp that loads
// Warpgroups take two or four turns at the tiles where there are few runs. With a multiple of that
// a stage is always the same ones': whoever waits for a parity has seen all phases before it, of
// which every second one has the same.
inline constexpr int kStages = 4;
static_assert(kStages % kConsumers == 0);
inline constexpr int kNoQuery = INT_MAX;  // sees every key, and its sums are dropped

struct EstimateParams {
  const __nv_bfloat16* q;
  int64_t q_token_stride, q_head_stride;
  const int64_t* query_positions;
  const int64_t* query_starts;  // may be null
  float* row_max;
  int64_t* row_sum;
  float* run_sums;
  int32_t* column_mass;
  int32_t* diagonal_mass;
  ShardLayout key_layout;
  int keys;  // local
  int key_tiles;
  int key_runs;
  int queries;       // E
  int runs;          // of queries a head
  int group;         // query heads a KV head
  int block_groups;  // blocks that share the runs of one KV head
  int chunks;        // blocks that share its keys
  int tile;          // of the diagonals
  int64_t blocks;    // of the sequence
  float scale;
  float scale_log2;
};

template <int kHeadDim>
struct EstimateShared {
  // Both in the 128-byte swizzle: [head_dim / 64][rows][64].
  alignas(1024) __nv_bfloat16 q[kBlockQueries * kHeadDim];
  alignas(1024) __nv_bfloat16 k[kStages][kKeyTile * kHeadDim];
  int query_position[kBlockQueries];  // kNoQuery for a row that is none
  float bias[kBlockQueries];          // what exponentials of a row are relative to
  int key_position[kStages][2];       // of each half of a tile
  ptx::Mbarrier full[kStages];
  ptx::Mbarrier empty[kStages];
  // The first key that a query sees, in kernels that know packed documents.
  int query_start[kBlockQueries];
};

// Where a row of a block's queries belongs: to one of its runs, and to a place there.
struct RunRow {
  int run, row;
};

// What a block works on: every p.chunks-th tile of keys, as late ones are seen by fewer queries.
struct BlockWork {
  int kv_head;
  int first_run;  // among the group * runs runs of the KV head
  int run_count;  // 1 to kBlockRuns
  int first_tile, tile_step;
  int tile_count;

  __device__ BlockWork(const EstimateParams& p, int block) {
    const int combination = block / p.chunks;
    kv_head = combination / p.block_groups;
    first_run = combination % p.block_groups * kBlockRuns;
    run_count = min(kBlockRuns, p.group * p.runs - first_run);
    first_tile = block % p.chunks;
    tile_step = p.chunks;
    tile_count = (p.key_tiles - first_tile + p.chunks - 1) / p.chunks;
  }
  // The number of the block's `i`-th tile in the sequence's shard.
  __device__ int Tile(int i) const { return first_tile + i * tile_step; }
  // Every 64 rows, which a warpgroup multiplies, are a run; or, crossed, a quarter of each of four
  // runs, one a warp. Of queries that are spread over the sequence a quarter as a whole comes
  // before many keys, and each of the multiprocessor's schedulers has a warp of each quarter.
  static __device__ RunRow Place(int row, bool crossed) {
    const int sixty_four = row / kRun, within = row % kRun;
    if (!crossed) return {sixty_four, within};
    return {within / 16, sixty_four * 16 + within % 16};
  }
  // The query head of run `run` of this block.
  __device__ int Head(const EstimateParams& p, int run) const {
    return kv_head * p.group + (first_run + run) / p.runs;
  }
  __device__ int FirstQuery(const EstimateParams& p, int run) const {
    return (first_run + run) % p.runs * kRun;
  }
};

// Consumer threads load their block's queries; all threads must then synchronise. position_of(e) is
// the position of query e, start_of(e) where its document starts; `crossed`: BlockWork::Place.
template <int kHeadDim, typename PositionOf, typename StartOf>
__device__ __forceinline__ void LoadQueries(const EstimateParams& p, const BlockWork& work,
                                            EstimateShared<kHeadDim>& shared,
                                            PositionOf position_of, StartOf start_of,
                                            bool crossed = false) {
  constexpr int kChunks = kHeadDim / 8;  // of 16 bytes in a row
  for (int i = threadIdx.x; i < kBlockQueries * kChunks; i += kConsumerThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const auto [run, of_run] = BlockWork::Place(row, crossed);
    const int query = work.FirstQuery(p, run) + of_run;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (run < work.run_count && query < p.queries) {
      value = *reinterpret_cast<const uint4*>(p.q + query * p.q_token_stride +
                                              work.Head(p, run) * p.q_head_stride + chunk * 8);
    }
    char* base = reinterpret_cast<char*>(shared.q) + chunk / 8 * (kBlockQueries * 128);
    *reinterpret_cast<uint4*>(base + row * 128 + ((chunk % 8) ^ (row % 8)) * 16) = value;
  }
  for (int row = threadIdx.x; row < kBlockQueries; row += kConsumerThreads) {
    const auto [run, of_run] = BlockWork::Place(row, crossed);
    const int query = work.FirstQuery(p, run) + of_run;
    const bool valid = run < work.run_count && query < p.queries;
    shared.query_position[row] = valid ? static_cast<int>(position_of(query)) : kNoQuery;
    shared.query_start[row] = valid ? static_cast<int>(start_of(query)) : 0;
  }
  ptx::FenceAsyncShared();
}

// `consumers` warpgroups read each tile. The thread that will load does it: it need not wait for
// others before its first loads.
template <int kHeadDim>
__device__ __forceinline__ void InitBarriers(EstimateShared<kHeadDim>& shared, int consumers) {
  if (threadIdx.x != kConsumerThreads) return;
  for (int stage = 0; stage < kStages; ++stage) {
    ptx::MbarrierInit(&shared.full[stage], 1);
    ptx::MbarrierInit(&shared.empty[stage], consumers * 4);
  }
  ptx::MbarrierInitFence();
}

// The loading warp: keys of tiles [begin, end) of this block's in turn, and the positions where the
// tiles' halves begin.
template <int kHeadDim>
__device__ __forceinline__ void ProduceKeys(const EstimateParams& p, const BlockWork& work,
                                            const CUtensorMap* key_map,
                                            EstimateShared<kHeadDim>& shared, int begin, int end) {
  if (threadIdx.x % 32 != 0) return;
  for (int i = begin; i < min(end, work.tile_count); ++i) {
    const int stage = i % kStages, key = work.Tile(i) * kKeyTile;
    if (i >= kStages) ptx::MbarrierWait(&shared.empty[stage], (i / kStages - 1) & 1);
    for (int half = 0; half < 2; ++half) {
      const int first = min(key + half * kRun, p.keys - 1);
      shared.key_position[stage][half] = static_cast<int>(p.key_layout.Position(first));
    }
    ptx::MbarrierArriveExpect(&shared.full[stage], kKeyTile * kHeadDim * 2);
    ptx::TmaLoadTile(shared.k[stage], key_map, &shared.full[stage], key, work.kv_head);
  }
}

// The position at which half `half` of a tile begins, read by the lane that will release the tile.
template <int kHeadDim>
__device__ __forceinline__ int KeyPosition(const EstimateShared<kHeadDim>& shared, int stage,
                                           int half) {
  const int position = threadIdx.x % 32 == 0 ? shared.key_position[stage][half] : 0;
  return __shfl_sync(0xffffffffu, position, 0);
}

// Called when this warp is done with a tile.
template <int kHeadDim>
__device__ __forceinline__ void ReleaseStage(EstimateShared<kHeadDim>& shared, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(&shared.empty[stage]);
}

// D[64, 128] = A B^T over head_dim: rows of `a` (a_rows in its tile) against 128 rows of `b`.
template <int kHeadDim>
__device__ __forceinline__ void StartLogits(float (&d)[64], const char* a, int a_rows,
                                            const char* b, int b_rows) {
  const uint64_t rows = ptx::OperandDescriptor(a), columns = ptx::OperandDescriptor(b);
  ptx::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int column_block = step / 4, within = step % 4 * 32;
    ptx::Wgmma<128>::SharedShared(
        d, ptx::DescriptorAdvance(rows, column_block * a_rows * 128 + within),
        ptx::DescriptorAdvance(columns, column_block * b_rows * 128 + within), step > 0);
  }
  ptx::WgmmaCommit();
}
__device__ __forceinline__ void FinishLogits(float (&d)[64]) {
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(d);
}

// Warpgroups that share every tile take turns at the tensor cores; left alone they
// would all multiply at the same time and then all compute exponentials, each unit idle half of the
// time.
class ProductTurn {
 public:
  // `ordered` false: no turns, as when warpgroups work on different tiles. All of a warpgroup call.
  __device__ ProductTurn(bool ordered, int warpgroup) : ordered_(ordered), warpgroup_(warpgroup) {
    if (ordered_ && warpgroup_ == kConsumers - 1) ptx::NamedBarrierArrive(kFirst, kThreads);
  }
  __device__ void Begin() const {
    if (ordered_) ptx::NamedBarrierSync(kFirst + warpgroup_, kThreads);
  }
  // The last warpgroup's last turn has no successor.
  __device__ void End(bool last_tile) const {
    if (!ordered_ || (last_tile && warpgroup_ == kConsumers - 1)) return;
    ptx::NamedBarrierArrive(kFirst + (warpgroup_ + 1) % kConsumers, kThreads);
  }

 private:
  static constexpr int kFirst = 1;  // named barriers kFirst to kFirst + kConsumers - 1
  static constexpr int kThreads = 2 * ptx::kWarpgroupThreads;  // who waits and who lets them go on
  bool ordered_;
  int warpgroup_;
};

// The logits of the 64 queries at `q` with the tile of a stage, in this warpgroup's turn, which it
// has begun; then gives the tile back.
template <int kHeadDim>
__device__ __forceinline__ void Multiply(float (&s)[64], EstimateShared<kHeadDim>& shared,
                                         int stage, const char* q, const ProductTurn& turn,
                                         bool last_tile) {
  StartLogits<kHeadDim>(s, q, kBlockQueries, reinterpret_cast<const char*>(shared.k[stage]),
                        kKeyTile);
  turn.End(last_tile);
  FinishLogits(s);
  ReleaseStage(shared, stage);
}

// One tile's logits of the 64 queries at `q`, once it is there; then gives the tile back. Leaves in
// key_position where the tile's halves begin. False, without logits, for a tile after
// `last_position`, up to which the warpgroup's queries see keys.
template <int kHeadDim>
__device__ __forceinline__ bool RowLogits(float (&s)[64], EstimateShared<kHeadDim>& shared,
                                          const BlockWork& work, int tile, const char* q,
                                          int last_position, const ProductTurn& turn,
                                          int (&key_position)[2]) {
  const int stage = tile % kStages;
  ptx::MbarrierWait(&shared.full[stage], tile / kStages & 1);
  key_position[0] = KeyPosition(shared, stage, 0);
  key_position[1] = KeyPosition(shared, stage, 1);
  turn.Begin();
  const bool last_tile = tile + 1 == work.tile_count;
  if (key_position[0] > last_position) {
    turn.End(last_tile);
    ReleaseStage(shared, stage);
    return false;
  }
  Multiply(s, shared, stage, q, turn, last_tile);
  return true;
}

// v[row half][s] of the four lanes of a quad are summed; lane l returns the sum of v[l / 2][l % 2].
__device__ __forceinline__ float QuadSum(const float (&v)[2][2]) {
  const int lane = threadIdx.x;
  float kept[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float mine = lane & 1 ? v[half][1] : v[half][0];
    const float other = lane & 1 ? v[half][0] : v[half][1];
    kept[half] = mine + __shfl_xor_sync(0xffffffffu, other, 1);
  }
  const float mine = lane & 2 ? kept[1] : kept[0], other = lane & 2 ? kept[0] : kept[1];
  return mine + __shfl_xor_sync(0xffffffffu, other, 2);
}

}  // namespace ringleader::kernels::index
