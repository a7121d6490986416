// Host side of dQ in the deterministic backward: tensor maps, launch.
#include "base/status_macros.h"
#include "kernels/sm90/backward/attention_query_gradient.h"
#include "kernels/sm90/backward/attention_query_gradient_kernel.cuh"
#include "kernels/sm90/forward/attention_forward_launch.h"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::sm90 {
namespace {

using Args = AttentionBackwardArgs<__nv_bfloat16>;

template <int kHeadDim, WalkKind kKind>
absl::Status Launch(const Args& args, const QueryGradientParams& params, int multiprocessors,
                    cudaStream_t stream) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  ASSIGN_OR_RETURN(const CUtensorMap query_map, LoadMap(args.q, Tile::kQueries, "q"));
  ASSIGN_OR_RETURN(const CUtensorMap key_map, (StageMap<kHeadDim, kKind>(args.k, "k")));
  ASSIGN_OR_RETURN(const CUtensorMap value_map, (StageMap<kHeadDim, kKind>(args.v, "v")));
  ASSIGN_OR_RETURN(const CUtensorMap d_out_map, LoadMap(args.d_out, Tile::kQueries, "d_out"));
  auto* kernel = QueryGradientKernel<kHeadDim, kKind, /*kDocuments=*/false>;
  if constexpr (!kHasIntervals<kKind>) {
    if (params.walk.document_starts != nullptr) {
      kernel = QueryGradientKernel<kHeadDim, kKind, /*kDocuments=*/true>;
    }
  }
  return LaunchPersistent("dq: launch", kernel, multiprocessors, Tile::kThreads,
                          Tile::kPipelines * sizeof(QueryGradientPipeline<kHeadDim, kKind>), stream,
                          params, query_map, key_map, value_map, d_out_map);
}

}  // namespace

template <WalkKind kKind>
absl::Status AddQueryGradient(const Args& args, const AttentionShape& shape,
                              const ColumnWalk& columns, const RowStats* row_stats,
                              int32_t* next_item, int multiprocessors, cudaStream_t stream) {
  QueryGradientParams params;
  static_cast<ForwardWalk&>(params) =
      MakeForwardWalk(shape, args.query_layout, args.key_layout, args.tiles, columns, next_item);
  params.row_stats = row_stats;
  params.dq = args.dq.data;
  params.token_stride = args.dq.token_stride;
  params.head_stride = args.dq.head_stride;
  params.query_blocks =
      static_cast<int32_t>((shape.query_tokens + kBackwardQueries - 1) / kBackwardQueries);
  params.scale = args.scale;
  params.scale_log2 = args.scale * kLog2E;
  return shape.head_dim == 128 ? Launch<128, kKind>(args, params, multiprocessors, stream)
                               : Launch<64, kKind>(args, params, multiprocessors, stream);
}

template absl::Status AddQueryGradient<WalkKind::kTiles128>(const Args&, const AttentionShape&,
                                                            const ColumnWalk&, const RowStats*,
                                                            int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kTiles64>(const Args&, const AttentionShape&,
                                                           const ColumnWalk&, const RowStats*,
                                                           int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kLists64>(const Args&, const AttentionShape&,
                                                           const ColumnWalk&, const RowStats*,
                                                           int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kColumns>(const Args&, const AttentionShape&,
                                                           const ColumnWalk&, const RowStats*,
                                                           int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kChosen128>(const Args&, const AttentionShape&,
                                                             const ColumnWalk&, const RowStats*,
                                                             int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kChosen64>(const Args&, const AttentionShape&,
                                                            const ColumnWalk&, const RowStats*,
                                                            int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kIntervals128>(const Args&, const AttentionShape&,
                                                                const ColumnWalk&, const RowStats*,
                                                                int32_t*, int, cudaStream_t);
template absl::Status AddQueryGradient<WalkKind::kIntervals64>(const Args&, const AttentionShape&,
                                                               const ColumnWalk&, const RowStats*,
                                                               int32_t*, int, cudaStream_t);

}  // namespace ringleader::kernels::sm90
