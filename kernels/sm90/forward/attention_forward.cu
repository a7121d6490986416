// Host side of forward attention: checks, tensor maps, launch.
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/columns.h"
#include "kernels/sm90/forward/attention_forward_launch.cuh"
#include "kernels/sm90/launch/launch.h"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/prepare_mask.h"

namespace ringleader::kernels::sm90 {

// These are attention_forward_intervals.cu's and attention_forward_groups.cu's.
extern template absl::Status LaunchForward<64, WalkKind::kIntervals128>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
extern template absl::Status LaunchForward<64, WalkKind::kIntervals64>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
extern template absl::Status LaunchForward<128, WalkKind::kIntervals128>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
extern template absl::Status LaunchForward<128, WalkKind::kIntervals64>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
extern template absl::Status LaunchForward<64, WalkKind::kGroups64>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
extern template absl::Status LaunchForward<128, WalkKind::kGroups64>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);

namespace {

using Args = AttentionForwardArgs<__nv_bfloat16>;

absl::Status Check(const Args& args, const AttentionShape& shape) {
  const auto check = [](const char* name, const auto& tensor, int64_t tokens, int32_t heads,
                        int32_t head_dim) {
    return CheckTensor(name, tensor.data, tensor.tokens, tensor.heads, tensor.head_dim, tokens,
                       heads, head_dim);
  };
  RETURN_IF_ERROR(check("q", args.q, shape.query_tokens, shape.heads, shape.head_dim));
  RETURN_IF_ERROR(check("k", args.k, shape.key_tokens, shape.kv_heads, shape.head_dim));
  RETURN_IF_ERROR(check("v", args.v, shape.key_tokens, shape.kv_heads, shape.head_dim));
  RETURN_IF_ERROR(check("out", args.out, shape.query_tokens, shape.heads, shape.head_dim));
  if (reinterpret_cast<uintptr_t>(args.out.data) % 8 != 0 || args.out.token_stride % 2 != 0 ||
      args.out.head_stride % 2 != 0) {
    return absl::InvalidArgumentError("out: data must be aligned to 8 bytes and strides be even");
  }
  if (args.lse == nullptr) return absl::InvalidArgumentError("lse is null");
  if (args.tiles.pattern == TilePattern::kCsr &&
      (args.tiles.row_offsets == nullptr || args.tiles.columns == nullptr)) {
    return absl::InvalidArgumentError(
        "tiles.row_offsets or tiles.columns is missing; kCsr needs both in forward");
  }
  return absl::OkStatus();
}

template <WalkKind kKind>
absl::Status Run(const Args& args, const AttentionShape& shape, const ColumnWalk& columns,
                 const Workspace& workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args, shape));
  RETURN_IF_ERROR(CheckWorkspace(workspace, kCounterBytes + MaskBytes(shape, args.tiles)));
  AttentionShape walked = shape;
  if constexpr (kHasIntervals<kKind>) {
    char* const memory = static_cast<char*>(workspace.data) + kCounterBytes;
    RETURN_IF_ERROR(PrepareMask(shape, args.query_layout, args.key_layout, args.tiles,
                                /*by_column=*/false, memory, stream));
    walked.mask_memory = memory;
  }
  ForwardParams params;
  static_cast<ForwardWalk&>(params) =
      MakeForwardWalk(walked, args.query_layout, args.key_layout, args.tiles, columns,
                      static_cast<int32_t*>(workspace.data));
  params.out = args.out.data;
  params.lse = args.lse;
  params.out_token_stride = args.out.token_stride;
  params.out_head_stride = args.out.head_stride;
  params.scale_log2 = args.scale * kLog2E;
  if constexpr (kKind == WalkKind::kGroups64)
    params.walk.SetGroups(args.tiles.groups, /*part_groups=*/0);
  return shape.head_dim == 128 ? LaunchForward<128, kKind>(args, params, stream)
                               : LaunchForward<64, kKind>(args, params, stream);
}

}  // namespace

int64_t ForwardWorkspaceBytes(const Args& args) {
  return kCounterBytes + MaskBytes(TileShape(args), args.tiles);
}

absl::Status AttentionForward(const Args& args, Workspace workspace, cudaStream_t stream) {
  const AttentionShape shape = TileShape(args);
  RETURN_IF_ERROR(CheckShape(shape, args.query_layout, args.key_layout, args.tiles));
  const auto run = [&]<WalkKind kKind>() { return Run<kKind>(args, shape, {}, workspace, stream); };
  if (args.tiles.groups.groups != nullptr) {
    // They take turns: both add to the same rows.
    RETURN_IF_ERROR(run.template operator()<WalkKind::kGroups64>());
  }
  // Each row walks by itself, whatever the density, because the diagonals are known on the device
  // alone. Two rows together would take fewer cycles where most diagonals are set
  // (kernels/EXPERIMENTS.md).
  if (args.tiles.tile == 64 && args.tiles.pattern == TilePattern::kToeplitz) {
    return run.template operator()<WalkKind::kDiagonals64>();
  }
  return RunForTiles(args.tiles, run);
}

int64_t ColumnForwardWorkspaceBytes(const ColumnForwardArgs&) {
  return kCounterBytes;
}

absl::Status ColumnForward(const ColumnForwardArgs& args, Workspace workspace,
                           cudaStream_t stream) {
  ASSIGN_OR_RETURN(const AttentionShape shape,
                   ColumnShape(args.q, args.columns, args.tiles, args.query_layout, args.scale));
  RETURN_IF_ERROR(CheckDense("keys", args.keys));
  RETURN_IF_ERROR(CheckDense("values", args.values));
  const Args as_tiles = {.q = args.q,
                         .k = ColumnRows(args.keys, shape),
                         .v = ColumnRows(args.values, shape),
                         .out = args.out,
                         .lse = args.lse,
                         .query_layout = args.query_layout,
                         .key_layout = args.query_layout,
                         .tiles = args.tiles,
                         .scale = args.scale};
  return Run<WalkKind::kColumns>(as_tiles, shape, ColumnWalkOf(args.columns), workspace, stream);
}

}  // namespace ringleader::kernels::sm90
