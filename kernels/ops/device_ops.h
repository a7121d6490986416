// The operators of attention_ops.h over an engine, as they are registered for a device.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch/types.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "kernels/ops/attention_calls.h"
#include "kernels/ops/choice_calls.h"

namespace ringleader::kernels::ops {

template <typename Engine>
struct DeviceOps {
  using Tensor = torch::Tensor;
  using MaybeTensor = std::optional<torch::Tensor>;

  static double ScaleOf(std::optional<double> scale, const AttentionSizes& sizes) {
    return scale.value_or(1 / std::sqrt(static_cast<double>(sizes.head_dim)));
  }

  static std::tuple<Tensor, Tensor> Attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                              int64_t pattern, at::TensorList lists,
                                              const MaybeTensor& documents,
                                              const MaybeTensor& intervals, int64_t tile,
                                              int64_t size, int64_t topk_blocks, double density,
                                              std::optional<double> scale,
                                              std::optional<bool> /*deterministic*/) {
    const c10::DeviceGuard guard(q.device());
    const AttentionSizes sizes = SizesOf(q, k, v);
    const Visit visit(q, sizes, pattern, lists, documents, intervals, tile, size,
                      {.topk_blocks = topk_blocks, .density = density});
    Engine engine;
    return AttentionCalls<Engine>(engine, sizes, visit, ScaleOf(scale, sizes)).Forward(q, k, v);
  }

  static std::tuple<Tensor, Tensor, Tensor> AttentionBackward(
      const MaybeTensor& d_out, const MaybeTensor& d_lse, const Tensor& q, const Tensor& k,
      const Tensor& v, const Tensor& out, const Tensor& lse, int64_t pattern, at::TensorList lists,
      const MaybeTensor& documents, const MaybeTensor& intervals, int64_t tile, int64_t size,
      int64_t topk_blocks, double density, std::optional<double> scale, bool deterministic) {
    const c10::DeviceGuard guard(q.device());
    const AttentionSizes sizes = SizesOf(q, k, v);
    const Visit visit(q, sizes, pattern, lists, documents, intervals, tile, size,
                      {.topk_blocks = topk_blocks, .density = density});
    Engine engine;
    return AttentionCalls<Engine>(engine, sizes, visit, ScaleOf(scale, sizes))
        .Backward(d_out, d_lse, q, k, v, out, lse, deterministic);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> TileLists(const Tensor& chosen, int64_t tokens,
                                                              int64_t tile, int64_t block_size,
                                                              int64_t capacity) {
    const c10::DeviceGuard guard(chosen.device());
    Engine engine;
    return TileListsOf(engine, chosen, tokens, tile, block_size, capacity);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> VerticalSlash(
      const Tensor& q, const Tensor& k, const Tensor& positions, const MaybeTensor& starts,
      int64_t tile, double scale, double column_mass, double diagonal_mass, int64_t max_columns,
      int64_t max_diagonals, double density, int64_t sink_tokens, int64_t local_blocks) {
    const c10::DeviceGuard guard(q.device());
    Engine engine;
    return ChooseColumnsAndDiagonals(engine, q, k, positions, starts, scale,
                                     {.tile = tile,
                                      .sink_tokens = sink_tokens,
                                      .local_blocks = local_blocks,
                                      .max_columns = max_columns,
                                      .column_mass = column_mass,
                                      .diagonal_mass = diagonal_mass,
                                      .max_diagonals = max_diagonals,
                                      .density = density});
  }

  static std::tuple<Tensor, Tensor> Moba(const Tensor& q, const Tensor& k,
                                         const MaybeTensor& documents, int64_t tile,
                                         int64_t block_size, int64_t topk_blocks, double density) {
    const c10::DeviceGuard guard(q.device());
    Engine engine;
    return ChooseMoba(engine, q, k, documents, tile, block_size, topk_blocks, density);
  }

  static Tensor XAttention(const Tensor& q, const Tensor& k, const MaybeTensor& documents,
                           int64_t tile, int64_t stride, double scale, double threshold,
                           double density) {
    const c10::DeviceGuard guard(q.device());
    Engine engine;
    return ChooseXAttention(engine, q, k, documents, tile, stride, scale, threshold, density);
  }

  static std::tuple<Tensor, Tensor, Tensor> KeyGroups(const Tensor& q, const Tensor& k,
                                                      const MaybeTensor& documents, double scale,
                                                      double density) {
    const c10::DeviceGuard guard(q.device());
    Engine engine;
    return ChooseKeyGroups(engine, q, k, documents, scale, density);
  }

  static void Register(torch::Library& library) {
    library.impl("attention", Attention);
    library.impl("attention_backward", AttentionBackward);
    library.impl("tile_lists", TileLists);
    library.impl("choose_vertical_slash", VerticalSlash);
    library.impl("choose_moba", Moba);
    library.impl("choose_xattention", XAttention);
    library.impl("choose_key_groups", KeyGroups);
  }
};

}  // namespace ringleader::kernels::ops
