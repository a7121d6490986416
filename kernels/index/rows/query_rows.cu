#include <climits>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/rows/query_rows.h"
#include "kernels/index/rows/tile_ranges.cuh"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kWarp = 0xffffffffu;
// A document's start beyond all keys.
constexpr int32_t kSeesNothing = INT_MAX / 2 - 1;

// The block of the 32 queries of a word, which lie in one tile.
__device__ __forceinline__ int OwnBlock(const QueryRowsArgs& args, int word) {
  return static_cast<int>(args.query_layout.Position(int64_t{word} * 32) / args.block_size);
}

__device__ __forceinline__ int KeyTilesBefore(const QueryRowsArgs& args, int block) {
  return TilesBefore(args.key_layout, args.tile, int64_t{block} * args.block_size);
}

// A warp a block of a head.
__global__ void CountRowsKernel(const QueryRowsArgs args, int blocks, int words) {
  const int block = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= blocks) return;
  const int64_t row = int64_t{blockIdx.y} * blocks + block;
  const bool has_keys = KeyTilesBefore(args, block) < KeyTilesBefore(args, block + 1);
  int sum = 0;
  for (int first = 0; first < words; first += 32) {
    const int word = first + lane;
    int count = 0;
    if (has_keys && word < words && block < OwnBlock(args, word)) {
      count = __popc(args.chosen[row * words + word]);
    }
    int through = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kWarp, through, distance);
      if (lane >= distance) through += other;
    }
    if (word < words) args.before[row * words + word] = sum + through - count;
    sum += __shfl_sync(kWarp, through, 31);
  }
  if (lane == 0) args.counts[row] = sum;
}

// A CTA a head: where each block's rows and entries begin, and the lists in both directions.
__global__ void __launch_bounds__(kThreads)
    ListRowsKernel(const QueryRowsArgs args, int blocks, int row_tiles, int key_tiles,
                   int64_t entries) {
  __shared__ int first_tiles[kMaxGatedBlocks + 1];
  __shared__ int first_entries[kMaxGatedBlocks + 1];
  const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t* const counts = args.counts + int64_t{head} * blocks;
  for (int block = threadIdx.x; block < blocks; block += kThreads) {
    const int tiles = (counts[block] + args.tile - 1) / args.tile;
    first_tiles[block + 1] = tiles;
    first_entries[block + 1] =
        tiles * (KeyTilesBefore(args, block + 1) - KeyTilesBefore(args, block));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    first_tiles[0] = 0;
    first_entries[0] = static_cast<int>(head * entries);
    for (int block = 1; block <= blocks; ++block) {
      first_tiles[block] += first_tiles[block - 1];
      first_entries[block] += first_entries[block - 1];
    }
  }
  __syncthreads();
  if (first_tiles[blocks] > row_tiles) {
    __syncthreads();
    for (int block = threadIdx.x; block <= blocks; block += kThreads) {
      first_tiles[block] = 0;
      first_entries[block] = static_cast<int>(head * entries);
    }
    __syncthreads();
  }
  int32_t* const row_offsets = args.row_offsets + int64_t{head} * (row_tiles + 1);
  int32_t* const column_offsets = args.column_offsets + int64_t{head} * (key_tiles + 1);
  for (int block = threadIdx.x; block <= blocks; block += kThreads) {
    args.first_rows[int64_t{head} * (blocks + 1) + block] = first_tiles[block] * args.tile;
  }
  for (int block = warp; block < blocks; block += kWarps) {
    const int first_tile = first_tiles[block], tiles = first_tiles[block + 1] - first_tile;
    const int first_key = KeyTilesBefore(args, block),
              keys = KeyTilesBefore(args, block + 1) - first_key;
    const int first = first_entries[block];
    for (int i = lane; i < tiles; i += 32) row_offsets[first_tile + i] = first + i * keys;
    for (int i = lane; i < keys; i += 32) column_offsets[first_key + i] = first + i * tiles;
    for (int i = lane; i < tiles * keys; i += 32) {
      args.columns[first + i] = first_key + i % keys;
      args.rows[first + i] = first_tile + i % tiles;
    }
  }
  const int end = first_entries[blocks];
  for (int tile = first_tiles[blocks] + static_cast<int>(threadIdx.x); tile <= row_tiles;
       tile += kThreads) {
    row_offsets[tile] = end;
  }
  if (threadIdx.x == 0) column_offsets[key_tiles] = end;
}

__global__ void CountTilesKernel(const QueryRowsArgs args, int row_tiles, int64_t entries,
                                 int64_t* tiles) {
  int64_t sum = 0;
  for (int head = 0; head < args.heads; ++head) {
    sum += args.row_offsets[int64_t{head} * (row_tiles + 1) + row_tiles] - head * entries;
  }
  *tiles += sum;
}

__global__ void OwnBlocksKernel(const ShardLayout queries, int32_t tile, int32_t block_size,
                                int words, int64_t count, uint32_t* chosen) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t tiles = (queries.local_tokens() + tile - 1) / tile;
  const int64_t block = queries.Position(i / words % tiles * tile) / block_size;
  chosen[i] = block / 32 == i % words ? 1u << block % 32 : 0;
}

// The rows of the 32 queries of a word of one head: for each block the word's bits and the row of
// the first of its queries.
struct WordRows {
  uint32_t bits[kMaxGatedBlocks];
  int32_t rows[kMaxGatedBlocks];
};

// The whole CTA calls.
__device__ __forceinline__ void FindRows(const QueryRowsArgs& args, int blocks, int words, int head,
                                         int word, WordRows& found) {
  const int own = OwnBlock(args, word);
  const int32_t* const first_rows = args.first_rows + int64_t{head} * (blocks + 1);
  for (int block = threadIdx.x; block < blocks; block += kThreads) {
    const int64_t at = (int64_t{head} * blocks + block) * words + word;
    const int first = first_rows[block];
    const bool has_rows = block < own && first < first_rows[block + 1];
    found.bits[block] = has_rows ? args.chosen[at] : 0;
    found.rows[block] = first + args.before[at];
  }
  __syncthreads();
}

// A warp calls take(row) for each row of query `i` of the word, by block.
template <typename Take>
__device__ __forceinline__ void ForRows(const WordRows& found, int blocks, int i, Take take) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < blocks; first += 32) {
    const int block = first + lane;
    const uint32_t bits = block < blocks ? found.bits[block] : 0;
    const int row = block < blocks ? found.rows[block] + __popc(bits & ((1u << i) - 1)) : 0;
    for (uint32_t left = __ballot_sync(kWarp, bits >> i & 1); left != 0; left &= left - 1) {
      take(__shfl_sync(kWarp, row, __ffs(static_cast<int>(left)) - 1));
    }
  }
}

// A lane's part of a row.
template <typename T, int kHeadDim>
struct alignas(sizeof(T) * kHeadDim / 32) Part {
  T values[kHeadDim / 32];
};
template <int kHeadDim, typename T>
__device__ __forceinline__ Part<T, kHeadDim> Load(const T* row) {
  return reinterpret_cast<const Part<T, kHeadDim>*>(row)[threadIdx.x % 32];
}
template <int kHeadDim, typename T>
__device__ __forceinline__ void Store(T* row, const Part<T, kHeadDim>& part) {
  reinterpret_cast<Part<T, kHeadDim>*>(row)[threadIdx.x % 32] = part;
}

// Calls visit(i, query) for the queries of word blockIdx.x, which the CTA's warps share out.
template <typename Visit>
__device__ __forceinline__ void ForQueries(int64_t tokens, Visit visit) {
  for (int i = threadIdx.x / 32; i < 32; i += kWarps) {
    const int64_t query = int64_t{blockIdx.x} * 32 + i;
    if (query < tokens) visit(i, query);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    GatherKernel(const QueryRowsArgs lists, int blocks, int words, int first_head,
                 const GatherQueriesArgs args) {
  __shared__ WordRows found;
  const int head = first_head + blockIdx.y;
  FindRows(lists, blocks, words, head, blockIdx.x, found);
  const int64_t first = int64_t{blockIdx.y} * lists.capacity;
  const int64_t tokens = args.q.tokens;
  ForQueries(tokens, [&](int i, int64_t query) {
    const auto q =
        Load<kHeadDim>(args.q.data + query * args.q.token_stride + head * args.q.head_stride);
    Part<__nv_bfloat16, kHeadDim> d_out;
    float lse = -INFINITY, delta = 0.0f;
    if (args.rows_d_out != nullptr) {
      d_out = Load<kHeadDim>(args.d_out.data + query * args.d_out.token_stride +
                             head * args.d_out.head_stride);
      lse = args.lse[head * tokens + query];
      delta = args.delta[head * tokens + query];
    }
    const int start = args.document_starts == nullptr ? 0 : args.document_starts[query];
    ForRows(found, blocks, i, [&](int row) {
      const int64_t at = first + row;
      Store<kHeadDim>(args.rows_q + at * kHeadDim, q);
      if (args.rows_d_out != nullptr) Store<kHeadDim>(args.rows_d_out + at * kHeadDim, d_out);
      if (threadIdx.x % 32 != 0) return;
      args.rows_lse[at] = lse;
      if (args.rows_d_out != nullptr) args.rows_delta[at] = delta;
      if (args.document_starts != nullptr) args.rows_starts[row] = start;
    });
  });
}

// A CTA a block of a head, a warp a row.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    PadKernel(const QueryRowsArgs lists, int blocks, int first_head, const GatherQueriesArgs args) {
  const int head = first_head + blockIdx.y, block = blockIdx.x;
  const int32_t* const first_rows = lists.first_rows + int64_t{head} * (blocks + 1);
  const int end = first_rows[block + 1];
  const int padding = first_rows[block] + lists.counts[int64_t{head} * blocks + block];
  for (int row = padding + static_cast<int>(threadIdx.x) / 32; row < end; row += kWarps) {
    const int64_t at = int64_t{blockIdx.y} * lists.capacity + row;
    Part<__nv_bfloat16, kHeadDim> zeros;
#pragma unroll
    for (auto& value : zeros.values) value = __float2bfloat16_rn(0.0f);
    Store<kHeadDim>(args.rows_q + at * kHeadDim, zeros);
    if (args.rows_d_out != nullptr) Store<kHeadDim>(args.rows_d_out + at * kHeadDim, zeros);
    if (threadIdx.x % 32 != 0) continue;
    args.rows_lse[at] = -INFINITY;
    if (args.rows_d_out != nullptr) args.rows_delta[at] = 0.0f;
    if (args.document_starts != nullptr) args.rows_starts[row] = kSeesNothing;
  }
}

// Weights e^(lse - m) relative to the largest lse so far.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    MergeKernel(const QueryRowsArgs lists, int blocks, int words, int first_head,
                const float* rows_out, const float* rows_lse, const TokenMajor<float> out,
                float* lse) {
  __shared__ WordRows found;
  const int head = first_head + blockIdx.y;
  FindRows(lists, blocks, words, head, blockIdx.x, found);
  const int64_t first = int64_t{blockIdx.y} * lists.capacity;
  ForQueries(out.tokens, [&](int i, int64_t query) {
    float* const to = out.data + query * out.token_stride + head * out.head_stride;
    float* const to_lse = lse + head * out.tokens + query;
    float largest = *to_lse, sum = largest == -INFINITY ? 0.0f : 1.0f;
    Part<float, kHeadDim> merged;
    if (sum == 0.0f) {
#pragma unroll
      for (float& value : merged.values) value = 0.0f;
    } else {
      merged = Load<kHeadDim>(to);
    }
    bool has_changed = false;
    ForRows(found, blocks, i, [&](int row) {
      const float of_row = rows_lse[first + row];
      if (of_row == -INFINITY) return;
      has_changed = true;
      const float next = fmaxf(largest, of_row);
      const float keep = largest == -INFINITY ? 0.0f : expf(largest - next);
      const float weight = expf(of_row - next);
      const auto part = Load<kHeadDim>(rows_out + (first + row) * kHeadDim);
#pragma unroll
      for (int j = 0; j < kHeadDim / 32; ++j) {
        merged.values[j] = merged.values[j] * keep + part.values[j] * weight;
      }
      sum = sum * keep + weight;
      largest = next;
    });
    if (!has_changed) return;
    const float inverse = 1.0f / sum;
#pragma unroll
    for (float& value : merged.values) value *= inverse;
    Store<kHeadDim>(to, merged);
    if (threadIdx.x % 32 == 0) *to_lse = largest + logf(sum);
  });
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    AddKernel(const QueryRowsArgs lists, int blocks, int words, int first_head,
              const float* rows_dq, const TokenMajor<float> dq) {
  __shared__ WordRows found;
  const int head = first_head + blockIdx.y;
  FindRows(lists, blocks, words, head, blockIdx.x, found);
  const int64_t first = int64_t{blockIdx.y} * lists.capacity;
  ForQueries(dq.tokens, [&](int i, int64_t query) {
    float* const to = dq.data + query * dq.token_stride + head * dq.head_stride;
    auto sum = Load<kHeadDim>(to);
    ForRows(found, blocks, i, [&](int row) {
      const auto part = Load<kHeadDim>(rows_dq + (first + row) * kHeadDim);
#pragma unroll
      for (int j = 0; j < kHeadDim / 32; ++j) sum.values[j] += part.values[j];
    });
    Store<kHeadDim>(to, sum);
  });
}

struct Sizes {
  int blocks, words;
};

absl::Status Check(const QueryRowsArgs& args) {
  RETURN_IF_ERROR(fused::CheckTile(args.tile, "query rows: tile"));
  RETURN_IF_ERROR(CheckSize(args.heads, "query rows: heads", 1, 65535));
  RETURN_IF_ERROR(
      CheckSize(args.block_size, "query rows: block_size", args.tile, 1 << 24, args.tile));
  RETURN_IF_ERROR(
      CheckSize(args.query_layout.local_tokens(), "query rows: local tokens", 1, int64_t{1} << 30));
  RETURN_IF_ERROR(CheckSize(args.blocks(), "query rows: blocks", 1, kMaxGatedBlocks));
  RETURN_IF_ERROR(
      CheckSize(args.capacity, "query rows: capacity", args.tile, int64_t{1} << 29, args.tile));
  RETURN_IF_ERROR(CheckSize(args.heads * args.entries(), "query rows: entries", 1, INT_MAX));
  RETURN_IF_ERROR(CheckPointer(args.chosen, "query rows: chosen"));
  RETURN_IF_ERROR(CheckPointer(args.before, "query rows: before"));
  RETURN_IF_ERROR(CheckPointer(args.counts, "query rows: counts"));
  RETURN_IF_ERROR(CheckPointer(args.first_rows, "query rows: first_rows"));
  RETURN_IF_ERROR(CheckPointer(args.row_offsets, "query rows: row_offsets"));
  RETURN_IF_ERROR(CheckPointer(args.columns, "query rows: columns"));
  RETURN_IF_ERROR(CheckPointer(args.column_offsets, "query rows: column_offsets"));
  return CheckPointer(args.rows, "query rows: rows");
}

absl::Status Check(const QueryRowsArgs& lists, const HeadRange& heads, int32_t head_dim) {
  RETURN_IF_ERROR(Check(lists));
  if (head_dim != 64 && head_dim != 128) {
    return CheckSize(head_dim, "query rows: head_dim", 64, 128, 64);
  }
  RETURN_IF_ERROR(CheckSize(heads.first, "query rows: first head", 0, lists.heads - 1));
  return CheckSize(heads.count, "query rows: heads of a range", 1, lists.heads - heads.first);
}

Sizes SizesOf(const QueryRowsArgs& args) {
  return {static_cast<int>(args.blocks()),
          static_cast<int>(QueryWords(args.query_layout.local_tokens()))};
}

}  // namespace

absl::Status ListQueryRows(const QueryRowsArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args));
  const auto [blocks, words] = SizesOf(args);
  CountRowsKernel<<<dim3((blocks + kWarps - 1) / kWarps, args.heads), kThreads, 0, stream>>>(
      args, blocks, words);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ListQueryRows: counts");
  ListRowsKernel<<<args.heads, kThreads, 0, stream>>>(args, blocks, static_cast<int>(args.tiles()),
                                                      static_cast<int>(args.key_tiles()),
                                                      args.entries());
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ListQueryRows: lists");
  return absl::OkStatus();
}

absl::Status CountQueryRowTiles(const QueryRowsArgs& args, int64_t* tiles, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args));
  CountTilesKernel<<<1, 1, 0, stream>>>(args, static_cast<int>(args.tiles()), args.entries(),
                                        tiles);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CountQueryRowTiles");
  return absl::OkStatus();
}

absl::Status ChooseOwnBlocks(const ShardLayout& queries, int32_t heads, int32_t tile,
                             int32_t block_size, uint32_t* chosen, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckPointer(chosen, "ChooseOwnBlocks: chosen"));
  const int64_t tiles = (queries.local_tokens() + tile - 1) / tile;
  const int words =
      BlockWords(static_cast<int32_t>((queries.tokens + block_size - 1) / block_size));
  const int64_t count = heads * tiles * words;
  OwnBlocksKernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                    stream>>>(queries, tile, block_size, words, count, chosen);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ChooseOwnBlocks");
  return absl::OkStatus();
}

absl::Status GatherQueries(const QueryRowsArgs& lists, const HeadRange& heads,
                           const GatherQueriesArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(lists, heads, args.q.head_dim));
  RETURN_IF_ERROR(CheckPointer(args.rows_q, "GatherQueries: rows_q"));
  RETURN_IF_ERROR(CheckPointer(args.rows_lse, "GatherQueries: rows_lse"));
  if (args.rows_d_out != nullptr) {
    RETURN_IF_ERROR(CheckPointer(args.d_out.data, "GatherQueries: d_out"));
    RETURN_IF_ERROR(CheckPointer(args.lse, "GatherQueries: lse"));
    RETURN_IF_ERROR(CheckPointer(args.delta, "GatherQueries: delta"));
    RETURN_IF_ERROR(CheckPointer(args.rows_delta, "GatherQueries: rows_delta"));
  }
  if (args.document_starts != nullptr) {
    RETURN_IF_ERROR(CheckPointer(args.rows_starts, "GatherQueries: rows_starts"));
    RETURN_IF_ERROR(CheckSize(heads.count, "GatherQueries: heads beside document_starts", 1, 1));
  }
  const auto [blocks, words] = SizesOf(lists);
  const dim3 by_word(words, heads.count), by_block(blocks, heads.count);
  if (args.q.head_dim == 128) {
    GatherKernel<128><<<by_word, kThreads, 0, stream>>>(lists, blocks, words, heads.first, args);
    PadKernel<128><<<by_block, kThreads, 0, stream>>>(lists, blocks, heads.first, args);
  } else {
    GatherKernel<64><<<by_word, kThreads, 0, stream>>>(lists, blocks, words, heads.first, args);
    PadKernel<64><<<by_block, kThreads, 0, stream>>>(lists, blocks, heads.first, args);
  }
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "GatherQueries");
  return absl::OkStatus();
}

absl::Status MergeQueryRows(const QueryRowsArgs& lists, const HeadRange& heads,
                            const float* rows_out, const float* rows_lse,
                            const TokenMajor<float>& out, float* lse, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(lists, heads, out.head_dim));
  RETURN_IF_ERROR(CheckPointer(rows_out, "MergeQueryRows: rows_out"));
  RETURN_IF_ERROR(CheckPointer(rows_lse, "MergeQueryRows: rows_lse"));
  const auto [blocks, words] = SizesOf(lists);
  const auto kernel = out.head_dim == 128 ? MergeKernel<128> : MergeKernel<64>;
  kernel<<<dim3(words, heads.count), kThreads, 0, stream>>>(lists, blocks, words, heads.first,
                                                            rows_out, rows_lse, out, lse);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "MergeQueryRows");
  return absl::OkStatus();
}

absl::Status AddQueryRows(const QueryRowsArgs& lists, const HeadRange& heads, const float* rows_dq,
                          const TokenMajor<float>& dq, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(lists, heads, dq.head_dim));
  RETURN_IF_ERROR(CheckPointer(rows_dq, "AddQueryRows: rows_dq"));
  const auto [blocks, words] = SizesOf(lists);
  const auto kernel = dq.head_dim == 128 ? AddKernel<128> : AddKernel<64>;
  kernel<<<dim3(words, heads.count), kThreads, 0, stream>>>(lists, blocks, words, heads.first,
                                                            rows_dq, dq);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "AddQueryRows");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
