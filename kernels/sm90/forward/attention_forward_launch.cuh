// The launch of forward attention, whose instances are spread over several compilations.
#pragma once

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/forward/attention_forward_kernel.cuh"
#include "kernels/sm90/forward/attention_forward_launch.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::sm90 {

// *params.next_item is the first item that is walked.
template <int kHeadDim, WalkKind kKind>
absl::Status LaunchForward(const AttentionForwardArgs<__nv_bfloat16>& args,
                           const ForwardParams& params, cudaStream_t stream) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  ASSIGN_OR_RETURN(const int multiprocessors, MultiprocessorCount());
  ASSIGN_OR_RETURN(const CUtensorMap query_map, LoadMap(args.q, Tile::kQueries, "q"));
  ASSIGN_OR_RETURN(const CUtensorMap key_map, (StageMap<kHeadDim, kKind>(args.k, "k")));
  ASSIGN_OR_RETURN(const CUtensorMap value_map, (StageMap<kHeadDim, kKind>(args.v, "v")));
  auto* kernel = AttentionForwardKernel<kHeadDim, kKind, /*kDocuments=*/false>;
  if constexpr (!kHasIntervals<kKind>) {
    if (params.walk.document_starts != nullptr) {
      kernel = AttentionForwardKernel<kHeadDim, kKind, /*kDocuments=*/true>;
    }
  }
  return LaunchPersistent("forward: launch", kernel, multiprocessors, Tile::kThreads,
                          Tile::kPipelines * sizeof(ForwardPipeline<kHeadDim, kKind>), stream,
                          params, query_map, key_map, value_map);
}

}  // namespace ringleader::kernels::sm90
