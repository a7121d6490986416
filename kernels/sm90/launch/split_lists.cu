#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/launch/split_lists.h"

namespace ringleader::kernels::sm90 {
namespace {

constexpr int kThreads = 128;

// A thread a line, of part blockIdx.y and head blockIdx.z.
template <WalkDirection kDirection>
__global__ void __launch_bounds__(kThreads)
    SplitListsKernel(const __grid_constant__ TileWalk walk, ListParts parts, SplitMemory memory) {
  const int32_t line = blockIdx.x * kThreads + threadIdx.x, lines = LinesOf<kDirection>(walk);
  if (line >= lines) return;
  const int32_t part = blockIdx.y, head = blockIdx.z;
  const LineRange range = PartOfList<kDirection>(walk, parts, head, line, part);
  int32_t* const begins = memory.begins + (head * (parts.most + 1) + part) * lines + line;
  begins[0] = range.begin;
  if (part + 1 == parts.most) begins[lines] = range.end;
  if (range.begin == range.end) return;
  if (memory.lines != nullptr) atomicMax(memory.lines + head * parts.most + part, line + 1);
  if (memory.first_items != nullptr) memory.first_items[part] = 0;
}

}  // namespace

template <WalkDirection kDirection>
absl::Status SplitLists(const ListParts& parts, int32_t heads, const SplitMemory& memory,
                        TileWalk* walk, cudaStream_t stream) {
  const int32_t lines = LinesOf<kDirection>(*walk);
  const dim3 grid((lines + kThreads - 1) / kThreads, parts.most, heads);
  SplitListsKernel<kDirection><<<grid, kThreads, 0, stream>>>(*walk, parts, memory);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "parts of lists");
  walk->list_offsets = memory.begins;
  walk->list_head = (parts.most + 1) * lines;
  walk->list_part = walk->list_end = lines;
  return absl::OkStatus();
}

template absl::Status SplitLists<WalkDirection::kAlongRow>(const ListParts&, int32_t,
                                                           const SplitMemory&, TileWalk*,
                                                           cudaStream_t);
template absl::Status SplitLists<WalkDirection::kAlongColumn>(const ListParts&, int32_t,
                                                              const SplitMemory&, TileWalk*,
                                                              cudaStream_t);

}  // namespace ringleader::kernels::sm90
