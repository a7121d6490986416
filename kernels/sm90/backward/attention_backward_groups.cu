// Host side of backward attention to groups of keys: tensor maps, launch.
#include <string_view>

#include "base/status_macros.h"
#include "kernels/sm90/backward/attention_backward_groups.h"
#include "kernels/sm90/backward/attention_backward_groups_kernel.cuh"
#include "kernels/sm90/forward/attention_forward_launch.h"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/tensor_map.h"

namespace ringleader::kernels::sm90 {
namespace {

using Args = AttentionBackwardArgs<__nv_bfloat16>;

// K, V, dK and dV of a part of the keys of a head: half of an H100's L2.
constexpr int32_t kPartBytes = 24 << 20;

constexpr int32_t PartGroups(int32_t head_dim) {
  const int32_t key_bytes =
      2 * head_dim * static_cast<int32_t>(sizeof(float) + sizeof(__nv_bfloat16));
  return kPartBytes / (key_bytes * kGroupKeys);
}

template <int kHeadDim, WalkKind kKind>
absl::Status Launch(const Args& args, const GroupBackwardParams& params, int multiprocessors,
                    cudaStream_t stream) {
  using Tile = ForwardTile<kHeadDim, kKind>;
  ASSIGN_OR_RETURN(const CUtensorMap query_map, LoadMap(args.q, Tile::kQueries, "q"));
  ASSIGN_OR_RETURN(const CUtensorMap key_map, (StageMap<kHeadDim, kKind>(args.k, "k")));
  ASSIGN_OR_RETURN(const CUtensorMap value_map, (StageMap<kHeadDim, kKind>(args.v, "v")));
  ASSIGN_OR_RETURN(const CUtensorMap d_out_map, LoadMap(args.d_out, Tile::kQueries, "d_out"));
  const auto add_map = [](const TokenMajor<float>& sum, std::string_view name) {
    return AddMap(sum, sum.head_dim / 32, kGroupKeys, name);
  };
  ASSIGN_OR_RETURN(const CUtensorMap dq_map, add_map(args.dq, "dq"));
  ASSIGN_OR_RETURN(const CUtensorMap dk_map, add_map(args.dk, "dk"));
  ASSIGN_OR_RETURN(const CUtensorMap dv_map, add_map(args.dv, "dv"));
  const auto kernel = params.walk.document_starts == nullptr
                          ? GroupBackwardKernel<kHeadDim, kKind, /*kDocuments=*/false>
                          : GroupBackwardKernel<kHeadDim, kKind, /*kDocuments=*/true>;
  return LaunchPersistent("backward of groups: launch", kernel, multiprocessors, Tile::kThreads,
                          Tile::kPipelines * sizeof(GroupBackwardPipeline<kHeadDim, kKind>), stream,
                          params, query_map, key_map, value_map, d_out_map, dq_map, dk_map, dv_map);
}

}  // namespace

absl::Status AddGroups(const Args& args, const AttentionShape& shape, const RowStats* row_stats,
                       int32_t* next_item, int multiprocessors, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckVectors("dk", args.dk));
  RETURN_IF_ERROR(CheckVectors("dv", args.dv));
  RETURN_IF_ERROR(CheckVectors("dq", args.dq));
  GroupBackwardParams params;
  static_cast<ForwardWalk&>(params) =
      MakeForwardWalk(shape, args.query_layout, args.key_layout, args.tiles, {}, next_item);
  params.walk.SetGroups(args.tiles.groups, PartGroups(shape.head_dim));
  params.row_stats = row_stats;
  params.dq = args.dq;
  params.dk = args.dk;
  params.dv = args.dv;
  params.query_blocks =
      static_cast<int32_t>((shape.query_tokens + kBackwardQueries - 1) / kBackwardQueries);
  params.scale = args.scale;
  params.scale_log2 = args.scale * kLog2E;
  const auto launch = [&]<WalkKind kKind>() {
    return shape.head_dim == 128 ? Launch<128, kKind>(args, params, multiprocessors, stream)
                                 : Launch<64, kKind>(args, params, multiprocessors, stream);
  };
  return args.tiles.groups.heads_together == 2
             ? launch.template operator()<WalkKind::kPairGroups64>()
             : launch.template operator()<WalkKind::kGroups64>();
}

}  // namespace ringleader::kernels::sm90
