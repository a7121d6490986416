// Host side of forward attention: checks, tensor maps, launch.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/columns.h"
#include "kernels/sm90/forward/attention_forward_launch.cuh"
#include "kernels/sm90/launch/launch.h"
#include "kernels/sm90/launch/launch_kernel.cuh"
#include "kernels/sm90/launch/prepare_mask.h"
#include "kernels/sm90/launch/split_lists.h"

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
extern template absl::Status LaunchForward<64, WalkKind::kPairGroups128>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
extern template absl::Status LaunchForward<128, WalkKind::kPairGroups128>(
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
  const auto check_out = [&](const char* name, const auto& out) -> absl::Status {
    RETURN_IF_ERROR(check(name, out, shape.query_tokens, shape.heads, shape.head_dim));
    if (reinterpret_cast<uintptr_t>(out.data) % (2 * sizeof(*out.data)) != 0 ||
        out.token_stride % 2 != 0 || out.head_stride % 2 != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: data must be aligned to %d bytes and strides be even", name, 2 * sizeof(*out.data)));
    }
    return absl::OkStatus();
  };
  if (args.rounded_out.data == nullptr) {
    RETURN_IF_ERROR(check_out("out", args.out));
  } else if (args.out.data != nullptr) {
    return absl::InvalidArgumentError(
        "out and rounded_out both have data; a call that is all of its queries' attention takes "
        "rounded_out alone");
  } else {
    RETURN_IF_ERROR(check_out("rounded_out", args.rounded_out));
  }
  if (args.lse == nullptr) return absl::InvalidArgumentError("lse is null");
  if (args.tiles.pattern == TilePattern::kCsr &&
      (args.tiles.row_offsets == nullptr || args.tiles.columns == nullptr)) {
    return absl::InvalidArgumentError(
        "tiles.row_offsets or tiles.columns is missing; kCsr needs both in forward");
  }
  return absl::OkStatus();
}

// Parts of the keys that take half of a Hopper's L2, and few of them where lists are short.
ListParts PartsOf(const Args& args, const AttentionShape& shape) {
  constexpr int64_t kPartBytes = int64_t{24} << 20;
  constexpr int64_t kMostParts = kCounterBytes / sizeof(int32_t);
  if (args.tiles.pattern != TilePattern::kCsr) return {};
  const int64_t bytes = shape.key_tokens * shape.head_dim * (2 + 2);  // K and V, in bf16
  const int64_t most = std::clamp<int64_t>((bytes + kPartBytes - 1) / kPartBytes, 1, kMostParts);
  return {.most = static_cast<int32_t>(most), .fewest_tiles = args.tiles.tile == 64 ? 24 : 40};
}

bool Rounds(const Args& args) {
  return args.rounded_out.data != nullptr;
}

int64_t QueryTiles(const Args& args) {
  const int64_t tile = args.tiles.tile == 64 ? 64 : 128;  // others are refused
  return (args.q.tokens + tile - 1) / tile;
}

// Where a call's workspace has what, in bytes: a counter for each part, the mask memory and, of
// lists in parts, where these begin and, where the output is rounded, ForwardParams::written and
// the sums of all parts but the last, [n_q, heads, d] in fp32.
struct Room {
  int64_t mask = kCounterBytes, begins = 0, written = 0, sums = 0, end = 0;

  Room(const Args& args, const AttentionShape& shape)
      : begins(mask + MaskBytes(shape, args.tiles)), written(begins), sums(begins), end(begins) {
    const ListParts parts = PartsOf(args, shape);
    if (parts.most == 1) return;
    const auto after = [](int64_t begin, int64_t bytes) {
      return begin + (bytes + 255) / 256 * 256;
    };
    written = sums = end =
        after(begins, shape.heads * (parts.most + 1) * QueryTiles(args) * int64_t{sizeof(int32_t)});
    if (!Rounds(args)) return;
    sums = after(written, shape.heads * ((args.q.tokens + 63) / 64));
    end = after(sums, args.q.tokens * shape.heads * shape.head_dim * int64_t{sizeof(float)});
  }
};

// The rows of a rounded output that no item wrote: zero where the logarithm says that a query
// attends to nothing, else, where params.out has it, what the parts before the last one left. A
// warp looks at 32 rows of a head.
__global__ void FinishRowsKernel(const __grid_constant__ ForwardParams params, int32_t head_dim) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32 * 32;
  const int64_t tokens = params.walk.query_tokens, head = blockIdx.y;
  if (first >= tokens) return;
  const int64_t row = min(first + threadIdx.x % 32, tokens - 1);
  const uint32_t empty = __ballot_sync(0xFFFFFFFFu, params.lse[head * tokens + row] == -INFINITY);
  const bool is_left =
      params.written != nullptr && params.written[head * ((tokens + 63) / 64) + first / 64] == 0;
  for (uint32_t left = is_left ? 0xFFFFFFFFu : empty; left != 0; left &= left - 1) {
    const int bit = __ffs(static_cast<int>(left)) - 1;
    const int64_t query = first + bit;
    if (query >= tokens) break;
    auto* const to =
        reinterpret_cast<__nv_bfloat162*>(params.rounded_out + query * params.rounded_token_stride +
                                          head * params.rounded_head_stride);
    const auto* const from = reinterpret_cast<const float2*>(
        params.out + query * params.out_token_stride + head * params.out_head_stride);
    for (int i = threadIdx.x % 32; i < head_dim / 2; i += 32) {
      to[i] = __float22bfloat162_rn(empty >> bit & 1 ? float2{0.0f, 0.0f} : from[i]);
    }
  }
}

absl::Status FinishRows(const ForwardParams& params, const AttentionShape& shape,
                        cudaStream_t stream) {
  constexpr int kThreads = 256;
  const dim3 blocks((params.walk.query_tokens + kThreads - 1) / kThreads, shape.heads);
  FinishRowsKernel<<<blocks, kThreads, 0, stream>>>(params, shape.head_dim);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "forward: rows that no item wrote");
  return absl::OkStatus();
}

template <WalkKind kKind>
absl::Status Launch(const Args& args, const AttentionShape& shape, const ForwardParams& params,
                    cudaStream_t stream) {
  return shape.head_dim == 128 ? LaunchForward<128, kKind>(args, params, stream)
                               : LaunchForward<64, kKind>(args, params, stream);
}

// All queries to one part of the keys after the other, each merged with what those before left.
template <WalkKind kKind>
absl::Status LaunchParts(const Args& args, const AttentionShape& shape, const ListParts& parts,
                         char* memory, ForwardParams* params, cudaStream_t stream) {
  const Room at(args, shape);
  int32_t* const first_items = params->next_item;
  RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(first_items, kNoItemByte, parts.most * sizeof(int32_t), stream),
      "forward: memset of parts");
  RETURN_IF_ERROR(SplitLists<WalkDirection::kAlongRow>(
      parts, shape.heads,
      {.begins = reinterpret_cast<int32_t*>(memory + at.begins), .first_items = first_items},
      &params->walk, stream));
  if (Rounds(args)) {
    params->written = reinterpret_cast<uint8_t*>(memory + at.written);
    params->out = reinterpret_cast<float*>(memory + at.sums);
    params->out_token_stride = int64_t{shape.heads} * shape.head_dim;
    params->out_head_stride = shape.head_dim;
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(params->written, 0, at.sums - at.written, stream),
                         "forward: memset of marks");
  }
  for (int32_t part = 0; part < parts.most; ++part) {
    ForwardParams of_part = *params;
    of_part.walk.list_offsets += part * params->walk.list_part;
    of_part.next_item = first_items + part;
    if (part + 1 < parts.most) of_part.rounded_out = nullptr;
    RETURN_IF_ERROR(Launch<kKind>(args, shape, of_part, stream));
  }
  return absl::OkStatus();
}

template <WalkKind kKind>
absl::Status Run(const Args& args, const AttentionShape& shape, const ColumnWalk& columns,
                 const Workspace& workspace, cudaStream_t stream) {
  RETURN_IF_ERROR(Check(args, shape));
  const Room at(args, shape);
  RETURN_IF_ERROR(CheckWorkspace(workspace, at.end));
  char* const memory = static_cast<char*>(workspace.data);
  AttentionShape walked = shape;
  if constexpr (kHasIntervals<kKind>) {
    RETURN_IF_ERROR(PrepareMask(shape, args.query_layout, args.key_layout, args.tiles,
                                /*by_column=*/false, memory + at.mask, stream));
    walked.mask_memory = memory + at.mask;
  }
  ForwardParams params;
  static_cast<ForwardWalk&>(params) =
      MakeForwardWalk(walked, args.query_layout, args.key_layout, args.tiles, columns,
                      static_cast<int32_t*>(workspace.data));
  params.out = args.out.data;
  params.lse = args.lse;
  params.out_token_stride = args.out.token_stride;
  params.out_head_stride = args.out.head_stride;
  params.rounded_out = args.rounded_out.data;
  params.rounded_token_stride = args.rounded_out.token_stride;
  params.rounded_head_stride = args.rounded_out.head_stride;
  params.scale_log2 = args.scale * kLog2E;
  if constexpr (kHasGroups<kKind>) {
    params.walk.SetGroups(args.tiles.groups, /*part_groups=*/0);
  }
  if (const ListParts parts = PartsOf(args, shape); parts.most > 1) {
    RETURN_IF_ERROR(LaunchParts<kKind>(args, shape, parts, memory, &params, stream));
  } else {
    RETURN_IF_CUDA_ERROR(cudaMemsetAsync(params.next_item, 0, sizeof(int32_t), stream),
                         "forward: memset");
    RETURN_IF_ERROR(Launch<kKind>(args, shape, params, stream));
  }
  return Rounds(args) ? FinishRows(params, shape, stream) : absl::OkStatus();
}

}  // namespace

int64_t ForwardWorkspaceBytes(const Args& args) {
  return Room(args, TileShape(args)).end;
}

absl::Status AttentionForward(const Args& args, Workspace workspace, cudaStream_t stream) {
  const AttentionShape shape = TileShape(args);
  RETURN_IF_ERROR(CheckShape(shape, args.query_layout, args.key_layout, args.tiles));
  const auto run = [&]<WalkKind kKind>() { return Run<kKind>(args, shape, {}, workspace, stream); };
  if (args.tiles.groups.groups != nullptr) {
    if (args.rounded_out.data != nullptr) {
      return absl::InvalidArgumentError(
          "rounded_out: groups of keys are attended to in several parts, which add to out");
    }
    // They take turns: both add to the same rows.
    RETURN_IF_ERROR(args.tiles.groups.heads_together == 2
                        ? run.template operator()<WalkKind::kPairGroups128>()
                        : run.template operator()<WalkKind::kGroups64>());
    if (args.tiles.diagonals == nullptr) return absl::OkStatus();
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
