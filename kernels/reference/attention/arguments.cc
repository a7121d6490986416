#include "kernels/reference/attention/arguments.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/reference/attention/tile_steps.h"

namespace ringleader::kernels::reference {

namespace {

template <typename T>
absl::Status CheckTensor(const char* name, const TokenMajor<T>& tensor, int64_t tokens, int heads,
                         int head_dim) {
  if (tensor.data == nullptr && tokens > 0) {
    return absl::InvalidArgumentError(absl::StrFormat("%s is null", name));
  }
  if (tensor.tokens != tokens || tensor.heads != heads || tensor.head_dim != head_dim) {
    return absl::InvalidArgumentError(absl::StrFormat("%s is [%d, %d, %d], must be [%d, %d, %d]",
                                                      name, tensor.tokens, tensor.heads,
                                                      tensor.head_dim, tokens, heads, head_dim));
  }
  return absl::OkStatus();
}

// What a rank holds of its part: all or, in stripes under a causal mask, the beginning.
int64_t HeldTokens(const ShardLayout& layout, const TileSelection& tiles, int64_t given) {
  const bool may_be_part = layout.ranks > 1 && layout.kind == LayoutKind::kStriped &&
                           tiles.pattern == TilePattern::kCausal;
  return may_be_part ? std::min(given, layout.local_tokens()) : layout.local_tokens();
}

absl::Status CheckInputs(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                         const TokenMajor<const float>& v, const ShardLayout& query_layout,
                         const ShardLayout& key_layout, const TileSelection& tiles, float scale) {
  if (q.head_dim < 1 || q.head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(
        absl::StrFormat("head_dim is %d; allowed are 1 to %d", q.head_dim, kMaxHeadDim));
  }
  if (k.heads < 1 || q.heads % k.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d heads are not a multiple of %d kv_heads", q.heads, k.heads));
  }
  RETURN_IF_ERROR(
      CheckTensor("q", q, HeldTokens(query_layout, tiles, q.tokens), q.heads, q.head_dim));
  // Without a mask keys have no positions: dense columns and cross attention.
  const bool unmasked = tiles.pattern == TilePattern::kFull && tiles.intervals == nullptr;
  const int64_t keys = unmasked ? k.tokens : HeldTokens(key_layout, tiles, k.tokens);
  RETURN_IF_ERROR(CheckTensor("k", k, keys, k.heads, q.head_dim));
  RETURN_IF_ERROR(CheckTensor("v", v, keys, k.heads, q.head_dim));
  if (!std::isfinite(scale)) return absl::InvalidArgumentError("scale is not finite");
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckForward(const AttentionForwardArgs<float>& args) {
  RETURN_IF_ERROR(CheckInputs(args.q, args.k, args.v, args.query_layout, args.key_layout,
                              args.tiles, args.scale));
  RETURN_IF_ERROR(CheckTensor("out", args.out, args.q.tokens, args.q.heads, args.q.head_dim));
  if (args.lse == nullptr) return absl::InvalidArgumentError("lse is null");
  return absl::OkStatus();
}

absl::Status CheckBackward(const AttentionBackwardArgs<float>& args) {
  RETURN_IF_ERROR(CheckInputs(args.q, args.k, args.v, args.query_layout, args.key_layout,
                              args.tiles, args.scale));
  const int heads = args.q.heads, d = args.q.head_dim;
  RETURN_IF_ERROR(CheckTensor("d_out", args.d_out, args.q.tokens, heads, d));
  RETURN_IF_ERROR(CheckTensor("dq", args.dq, args.q.tokens, heads, d));
  if (args.rounded_dk.data != nullptr || args.rounded_dv.data != nullptr) {
    return absl::InvalidArgumentError(
        "rounded_dk and rounded_dv are for bf16; the CPU engine adds to dk and dv");
  }
  RETURN_IF_ERROR(CheckTensor("dk", args.dk, args.k.tokens, args.k.heads, d));
  RETURN_IF_ERROR(CheckTensor("dv", args.dv, args.k.tokens, args.k.heads, d));
  if (args.lse == nullptr) return absl::InvalidArgumentError("lse is null");
  if (args.delta == nullptr) return absl::InvalidArgumentError("delta is null");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::reference
