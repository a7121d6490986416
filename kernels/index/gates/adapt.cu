// Budgets of heads by what they recalled under the same one (AdaSpa, arXiv 2502.21079,
// section 4.3).
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/select.h"

namespace ringleader::kernels::index {
namespace {

using fused::CheckPointer;
using fused::CheckSize;

constexpr int kMaxHeads = kMaxAdaptedHeads;

// Where a head stands among all heads.
struct Standing {
  int better;  // heads before this one, by falling recall, ties by number
  int good;    // heads whose recall exceeds the threshold
};

// The standing of this thread's head; all threads of the block call.
__device__ Standing StandingOf(double recall, int heads, double threshold) {
  __shared__ double recalls[kMaxHeads];
  const int head = threadIdx.x;
  recalls[head] = recall;
  const int good = __syncthreads_count(head < heads && recall > threshold);
  int better = 0;
  for (int other = 0; other < heads; ++other) {
    better += recalls[other] > recall || (recalls[other] == recall && other < head);
  }
  return {better, good};
}

__global__ void AdaptDensityKernel(const AdaptDensityStep step) {
  const int head = threadIdx.x;
  const Standing standing =
      StandingOf(head < step.heads ? RecallOf(step.kept[head], step.total[head]) : 0.0, step.heads,
                 static_cast<double>(step.threshold));
  if (head >= step.heads) return;
  step.head_density[head] =
      AdaptedDensity(step.density, standing.better, standing.good, step.heads);
}

__global__ void AdaptBudgetsKernel(const IndexMass* masses, int heads, int32_t* max_counts) {
  const int head = threadIdx.x;
  const Standing standing =
      StandingOf(head < heads ? masses[head].Recall() : 0.0, heads, kGoodRecall);
  if (head >= heads) return;
  for (int kind = 0; kind < 2; ++kind) {
    int32_t& count = max_counts[kind * heads + head];
    count = AdaptedCount(count, standing.better, standing.good, heads);
  }
}

}  // namespace

absl::Status AdaptDensity(const AdaptDensityStep& step, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(step.heads, "AdaptDensity: heads", 1, kMaxHeads));
  RETURN_IF_ERROR(CheckPointer(step.kept, "AdaptDensity: kept"));
  RETURN_IF_ERROR(CheckPointer(step.total, "AdaptDensity: total"));
  RETURN_IF_ERROR(CheckPointer(step.head_density, "AdaptDensity: head_density"));
  if (!(step.density > 0) || step.density > 2.0f / 3.0f) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "AdaptDensity: density is %g; it must be in (0, 2/3], so that half more is at most 1",
        step.density));
  }
  AdaptDensityKernel<<<1, kMaxHeads, 0, stream>>>(step);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "AdaptDensity");
  return absl::OkStatus();
}

absl::Status AdaptBudgets(const IndexMass* masses, int32_t heads, int32_t* max_counts,
                          cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(heads, "AdaptBudgets: heads", 1, kMaxHeads));
  RETURN_IF_ERROR(CheckPointer(masses, "AdaptBudgets: masses"));
  RETURN_IF_ERROR(CheckPointer(max_counts, "AdaptBudgets: max_counts"));
  AdaptBudgetsKernel<<<1, kMaxHeads, 0, stream>>>(masses, heads, max_counts);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "AdaptBudgets");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
