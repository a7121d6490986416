#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/visited_share.h"

namespace ringleader::kernels::index {
namespace {

// A warp a head.
__global__ void CountVisitedKernel(const ProbeArgs args) {
  const int32_t head = blockIdx.x;
  const int64_t n = args.layout.local_tokens();
  int32_t sum = 0;
  for (int32_t e = threadIdx.x; e < args.queries; e += 32) {
    const int64_t position = args.positions[e];
    if (args.layout.Owner(position) != args.layout.rank) continue;
    const int64_t row = int64_t{head} * args.queries + e;
    sum += VisitedShare(args.lse[head * n + args.layout.LocalIndex(position)], args.row_max[row],
                        args.row_sum[row]);
  }
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (threadIdx.x == 0) args.visited[head] = sum;
}

}  // namespace

absl::Status CountVisited(const ProbeArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(fused::CheckSize(args.heads, "CountVisited: heads", 1, 65535));
  RETURN_IF_ERROR(fused::CheckSize(args.queries, "CountVisited: queries", 1, kMaxEstimateQueries));
  RETURN_IF_ERROR(fused::CheckPointer(args.positions, "CountVisited: positions"));
  RETURN_IF_ERROR(fused::CheckPointer(args.row_max, "CountVisited: row_max"));
  RETURN_IF_ERROR(fused::CheckPointer(args.row_sum, "CountVisited: row_sum"));
  RETURN_IF_ERROR(fused::CheckPointer(args.lse, "CountVisited: lse"));
  RETURN_IF_ERROR(fused::CheckPointer(args.visited, "CountVisited: visited"));
  CountVisitedKernel<<<args.heads, 32, 0, stream>>>(args);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "CountVisited");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
