#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/backward/split_lists.h"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kThreads = 128;

__host__ __device__ int32_t KeyBlocks(const TileWalk& walk) {
  return (walk.key_tokens + kBackwardKeys - 1) / kBackwardKeys;
}

// A thread a key tile, of part blockIdx.y and head blockIdx.z.
__global__ void __launch_bounds__(kThreads)
    SplitListsKernel(const __grid_constant__ TileWalk walk, ListParts parts, int32_t* memory) {
  const int32_t line = blockIdx.x * kThreads + threadIdx.x;
  if (line >= walk.key_tiles) return;
  const int32_t part = blockIdx.y, head = blockIdx.z;
  const int32_t blocks = KeyBlocks(walk);
  const LineRange range = PartOfList(walk, parts, blocks, head, line, part);
  int32_t* const begins = memory + (head * (parts.most + 1) + part) * walk.key_tiles + line;
  begins[0] = range.begin;
  if (part + 1 == parts.most) begins[walk.key_tiles] = range.end;
  if (range.begin == range.end) return;
  const ListPartsMemory at(gridDim.z, walk.key_tiles, blocks, parts.most);
  atomicMax(memory + at.counts + head * parts.most + part, line * walk.tile() / kBackwardKeys + 1);
}

// A CTA a part of a head, blockIdx.x: writes its items after those of the parts before it.
__global__ void __launch_bounds__(kThreads)
    ListItemsKernel(const int32_t* __restrict__ counts, int32_t blocks, int32_t* items) {
  int32_t before = 0;
  for (uint32_t i = threadIdx.x; i < blockIdx.x; i += kThreads) before += counts[i];
  __shared__ int32_t first;
  if (threadIdx.x == 0) first = 0;
  __syncthreads();
  atomicAdd(&first, before);
  __syncthreads();
  for (int32_t block = threadIdx.x; block < counts[blockIdx.x]; block += kThreads) {
    items[first + block] = static_cast<int32_t>(blockIdx.x) * blocks + block;
  }
}

}  // namespace

absl::Status SplitLists(const ListParts& parts, int32_t* memory, BackwardParams* params,
                        cudaStream_t stream) {
  TileWalk& walk = params->walk;
  const int32_t blocks = KeyBlocks(walk);
  const ListPartsMemory at(params->heads, walk.key_tiles, blocks, parts.most);
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(memory + at.counts, 0, (at.items - at.counts) * sizeof(int32_t), stream),
      "backward: memset of counts");
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(memory + at.items, 0x7F, (at.end - at.items) * sizeof(int32_t), stream),
      "backward: memset of items");
  const dim3 grid((walk.key_tiles + kThreads - 1) / kThreads, parts.most, params->heads);
  SplitListsKernel<<<grid, kThreads, 0, stream>>>(walk, parts, memory);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "backward: parts of lists");
  ListItemsKernel<<<params->heads * parts.most, kThreads, 0, stream>>>(memory + at.counts, blocks,
                                                                       memory + at.items);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "backward: items of parts");
  walk.list_offsets = memory;
  walk.list_head = (parts.most + 1) * walk.key_tiles;
  walk.list_part = walk.list_end = walk.key_tiles;
  params->list_parts = parts.most;
  params->items = memory + at.items;
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::sm90
