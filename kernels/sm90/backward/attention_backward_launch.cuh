// Starts the key-stationary kernel of backward attention.
#pragma once

#include "base/status_macros.h"
#include "kernels/sm90/backward/attention_backward_kernel.cuh"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::sm90 {

template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient>
absl::Status LaunchBackward(const AttentionBackwardArgs<__nv_bfloat16>& args,
                            const BackwardParams& params, int multiprocessors,
                            cudaStream_t stream) {
  using Tile = BackwardTile<kHeadDim>;
  ASSIGN_OR_RETURN(const CUtensorMap query_map, LoadMap(args.q, kBackwardQueries, "q"));
  ASSIGN_OR_RETURN(const CUtensorMap key_map, LoadMap(args.k, kBackwardKeys, "k"));
  ASSIGN_OR_RETURN(const CUtensorMap value_map, LoadMap(args.v, kBackwardKeys, "v"));
  ASSIGN_OR_RETURN(const CUtensorMap d_out_map, LoadMap(args.d_out, kBackwardQueries, "d_out"));
  ASSIGN_OR_RETURN(const CUtensorMap dq_map, AddMap(args.dq, 1, kBackwardQueries, "dq"));
  ASSIGN_OR_RETURN(const CUtensorMap dk_map, AddMap(args.dk, 1, kBackwardKeys / 2, "dk"));
  ASSIGN_OR_RETURN(const CUtensorMap dv_map, AddMap(args.dv, 1, kBackwardKeys / 2, "dv"));
  auto* kernel = AttentionBackwardKernel<kHeadDim, kKind, kQueryGradient, /*kDocuments=*/false>;
  if constexpr (!kHasIntervals<kKind>) {
    if (params.walk.document_starts != nullptr) {
      kernel = AttentionBackwardKernel<kHeadDim, kKind, kQueryGradient, /*kDocuments=*/true>;
    }
  }
  return LaunchPersistent("backward: launch", kernel, multiprocessors, Tile::kThreads,
                          sizeof(BackwardShared<kHeadDim, KeyStepOf<kKind>>), stream, params,
                          query_map, key_map, value_map, d_out_map, dq_map, dk_map, dv_map);
}

}  // namespace ringleader::kernels::sm90
