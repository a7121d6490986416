// Shapes of the tests of choices of blocks, and what a rank has of their tensors.
#pragma once

#include <cuda_bf16.h>

#include <vector>

#include "kernels/index/testing/gate_rows.h"
#include "kernels/reference/testing/sight.h"

namespace ringleader::kernels::index {

using Bf16 = __nv_bfloat16;
using reference::testing::Sight;

struct Shape {
  LayoutKind kind;
  int ranks;
  int64_t tokens;
  int heads, kv_heads, head_dim, tile, block_size, topk;
  bool documents = false;  // several in the sequence
  Sight::Mask mask = Sight::Mask::kCausal;
  float logits = 2.0f;  // their standard deviation, where all queries count

  Sight SightOf() const {
    const std::vector<int64_t> several = {0, 1, tile, tokens / 8 + 3, tokens / 2, tokens - 70};
    return Sight(mask, tokens, documents ? several : std::vector<int64_t>());
  }
};

inline std::vector<float> Floats(const std::vector<Bf16>& in) {
  std::vector<float> out;
  out.reserve(in.size());
  for (const Bf16 x : in) out.push_back(__bfloat162float(x));
  return out;
}

// Rows of `whole` [tokens, width] that `layout`'s rank has.
template <typename T>
std::vector<T> Shard(const std::vector<T>& whole, int64_t width, const ShardLayout& layout) {
  std::vector<T> out;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    const auto row = whole.begin() + layout.Position(i) * width;
    out.insert(out.end(), row, row + width);
  }
  return out;
}

// What a rank's queries see.
struct LocalSight {
  const Sight whole;
  const reference::testing::RankSight host;
  const DeviceSight device;

  LocalSight(const Shape& s, const ShardLayout& layout)
      : whole(s.SightOf()), host(whole.Of(layout)), device(host) {}
};

}  // namespace ringleader::kernels::index
