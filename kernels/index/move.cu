#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/move.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ unsigned long long WarpSum(unsigned long long value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// A thread a row of the choice; *work starts from 0.
__global__ void CountWorkKernel(const CountWorkStep step, int64_t rows, int64_t query_tiles,
                                int words) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t tiles = row < rows ? TilesOfRow(step, row, query_tiles, words) : 0;
  const unsigned long long sum = WarpSum(static_cast<unsigned long long>(tiles));
  if (threadIdx.x % 32 == 0 && sum > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(step.work), sum);
  }
}

__global__ void FindMoveKernel(const FindMoveStep step) {
  kernels::FindMove(step);
}

// One warp.
__global__ void SumChoicesKernel(const SumChoicesStep step) {
  unsigned long long sum = 0;
  for (int head = threadIdx.x; head < step.heads; head += 32) {
    sum += static_cast<unsigned long long>(step.choices[head].Work(step.blocks, step.tile));
  }
  sum = WarpSum(sum);
  if (threadIdx.x == 0) *step.work = static_cast<int64_t>(sum);
}

__global__ void MoveBudgetsKernel(const MoveBudgetsStep step) {
  const int head = blockIdx.x * kThreads + threadIdx.x;
  if (head < step.heads) kernels::MoveBudgets(step, head);
}

__global__ void HoldMassKernel(const HoldMassStep step) {
  const int head = blockIdx.x * kThreads + threadIdx.x;
  if (head < step.heads) kernels::HoldMass(step, head);
}

// A block a head.
__global__ void NoteChoicesKernel(const SelectArgs selected, int blocks, HeadChoice* choices) {
  __shared__ unsigned long long of_warp[kWarps];
  const int head = blockIdx.x, words = (blocks + 63) / 64;
  const uint64_t* const bits = selected.diagonals + static_cast<int64_t>(head) * words;
  unsigned long long tiles = 0;
  for (int delta = threadIdx.x; delta < blocks; delta += kThreads) {
    if (bits[delta / 64] >> delta % 64 & 1) {
      tiles += static_cast<unsigned long long>(
          DiagonalCost(/*by_tiles=*/true, selected.content_blocks(), delta));
    }
  }
  tiles = WarpSum(tiles);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = tiles;
  __syncthreads();
  if (threadIdx.x != 0) return;
  tiles = 0;
  for (int warp = 0; warp < kWarps; ++warp) tiles += of_warp[warp];
  const IndexMass& mass = selected.masses[head];
  choices[head] = {.columns = selected.column_counts[head],
                   .column_mass = mass.columns,
                   .diagonal_tiles = static_cast<int64_t>(tiles),
                   .diagonal_mass = mass.diagonals,
                   .total = mass.total};
}

__global__ void CountMoveKernel(const int64_t* before, const int64_t* after, const float* factor,
                                LayerCounters* counters) {
  if (*factor == 1.0f) return;
  ++counters->balanced;
  counters->anchor_missed += MissesAnchor(*before, *after, *factor) ? 1 : 0;
}

unsigned BlocksOf(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

absl::Status CountWork(const CountWorkStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(step.heads, "CountWork: heads", 1, 65535));
  RETURN_IF_ERROR(CheckSize(step.tile, "CountWork: tile", 64, 128, 64));
  RETURN_IF_ERROR(
      CheckSize(step.block_size, "CountWork: block_size", step.tile, 1 << 24, step.tile));
  RETURN_IF_ERROR(CheckPointer(step.chosen, "CountWork: chosen"));
  // One of an array of them, which is not aligned to 16 bytes.
  if (step.work == nullptr) return absl::InvalidArgumentError("CountWork: work is null");
  const int64_t query_tiles = (step.query_layout.local_tokens() + step.tile - 1) / step.tile,
                blocks = (step.query_layout.tokens + step.block_size - 1) / step.block_size,
                rows = step.heads * query_tiles;
  RETURN_IF_CUDA_ERROR(cudaMemsetAsync(step.work, 0, sizeof(int64_t), stream), "CountWork");
  if (rows == 0) return absl::OkStatus();
  CountWorkKernel<<<BlocksOf(rows), kThreads, 0, stream>>>(
      step, rows, query_tiles, BlockWords(static_cast<int32_t>(blocks)));
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CountWork");
  return absl::OkStatus();
}

absl::Status FindMove(const FindMoveStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(step.ranks, "FindMove: ranks", 1, 65536));
  RETURN_IF_ERROR(CheckSize(step.rank, "FindMove: rank", 0, step.ranks - 1));
  RETURN_IF_ERROR(CheckPointer(step.factor, "FindMove: factor"));
  FindMoveKernel<<<1, 1, 0, stream>>>(step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "FindMove");
  return absl::OkStatus();
}

absl::Status SumChoices(const SumChoicesStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckPointer(step.choices, "SumChoices: choices"));
  RETURN_IF_ERROR(CheckPointer(step.work, "SumChoices: work"));
  SumChoicesKernel<<<1, 32, 0, stream>>>(step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "SumChoices");
  return absl::OkStatus();
}

absl::Status MoveBudgets(const MoveBudgetsStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(step.heads, "MoveBudgets: heads", 1, 65535));
  RETURN_IF_ERROR(CheckPointer(step.choices, "MoveBudgets: choices"));
  RETURN_IF_ERROR(CheckPointer(step.factor, "MoveBudgets: factor"));
  RETURN_IF_ERROR(CheckPointer(step.masses, "MoveBudgets: masses"));
  RETURN_IF_ERROR(CheckPointer(step.counts, "MoveBudgets: counts"));
  MoveBudgetsKernel<<<BlocksOf(step.heads), kThreads, 0, stream>>>(step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "MoveBudgets");
  return absl::OkStatus();
}

absl::Status HoldMass(const HoldMassStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(step.heads, "HoldMass: heads", 1, 65535));
  RETURN_IF_ERROR(CheckPointer(step.before, "HoldMass: before"));
  RETURN_IF_ERROR(CheckPointer(step.moved, "HoldMass: moved"));
  RETURN_IF_ERROR(CheckPointer(step.masses, "HoldMass: masses"));
  RETURN_IF_ERROR(CheckPointer(step.counts, "HoldMass: counts"));
  HoldMassKernel<<<BlocksOf(step.heads), kThreads, 0, stream>>>(step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "HoldMass");
  return absl::OkStatus();
}

absl::Status NoteChoices(const SelectArgs& selected, HeadChoice* choices, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckPointer(choices, "NoteChoices: choices"));
  const int64_t blocks = (selected.layout.tokens + selected.tile - 1) / selected.tile;
  NoteChoicesKernel<<<selected.heads, kThreads, 0, stream>>>(selected, static_cast<int>(blocks),
                                                             choices);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "NoteChoices");
  return absl::OkStatus();
}

absl::Status CountMove(const int64_t* work_before, const int64_t* work_after, const float* factor,
                       LayerCounters* counters, cudaStream_t stream) {
  if (work_before == nullptr) return absl::InvalidArgumentError("CountMove: work_before is null");
  RETURN_IF_ERROR(CheckPointer(work_after, "CountMove: work_after"));
  RETURN_IF_ERROR(CheckPointer(factor, "CountMove: factor"));
  if (counters == nullptr) return absl::InvalidArgumentError("CountMove: counters is null");
  CountMoveKernel<<<1, 1, 0, stream>>>(work_before, work_after, factor, counters);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CountMove");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
