// What tests of both devices hold a gathered layer's casts to.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include "worker/model/decoder/cast_block.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::optim {

// NaN equals NaN.
inline bool SameBits(const torch::Tensor& a, const torch::Tensor& b) {
  const auto bytes = [](const torch::Tensor& x) {
    return x.contiguous().view({-1}).view(torch::kByte);
  };
  return a.sizes() == b.sizes() && torch::equal(bytes(a), bytes(b));
}

// `block`, as ranks gathered it, has the casts of the layer's whole weights in `flat`
// [layout.elements], and its norms and biases.
inline void ExpectCastsOf(const model::ParameterLayout& layout, int64_t layer,
                          const model::CastBlock& block, const torch::Tensor& flat,
                          const model::TokenOps& ops) {
  using model::LayerParameters;
  const model::GatheredLayer gathered = model::ViewCastBlock(layout, block);
  const LayerParameters whole = model::MakeLayerParameters(
      layout, layer,
      [&](const model::SlotGroup& group) { return model::ViewGroup(group, flat, 0); });
  const auto expect_cast = [&](const model::WeightCast& cast, const torch::Tensor& weight,
                               const torch::Tensor& in_place) {
    const model::ScaledRows expected = ops.CastRows(weight);
    EXPECT_TRUE(SameBits(cast.forward.codes, expected.codes));
    EXPECT_TRUE(SameBits(cast.forward.scales, expected.scales));
    EXPECT_EQ(in_place.sizes(), weight.sizes());
    EXPECT_EQ(in_place.scalar_type(), weight.scalar_type());
    EXPECT_TRUE(in_place.isnan().all().item<bool>()) << "who reads it is to notice";
    // As a product takes them.
    const auto product = [&](const model::ScaledRows& b) {
      torch::Tensor y = torch::empty({16, weight.size(0)}, weight.options());
      const torch::Tensor x = torch::ones({16, weight.size(1)}, weight.options());
      ops.ScaledProduct(ops.CastRows(x), b, {}, y);
      return y;
    };
    EXPECT_TRUE(SameBits(product(cast.forward), product(expected)));
  };
  expect_cast(gathered.casts.qkv, whole.qkv_weight, gathered.parameters.qkv_weight);
  expect_cast(gathered.casts.output, whole.output_weight, gathered.parameters.output_weight);
  expect_cast(gathered.casts.gate_up, whole.gate_up_weight, gathered.parameters.gate_up_weight);
  expect_cast(gathered.casts.down, whole.down_weight, gathered.parameters.down_weight);
  for (const auto vector : {&LayerParameters::input_norm, &LayerParameters::post_norm,
                            &LayerParameters::qkv_bias, &LayerParameters::output_bias,
                            &LayerParameters::gate_up_bias, &LayerParameters::down_bias}) {
    ASSERT_EQ((gathered.parameters.*vector).defined(), (whole.*vector).defined());
    if ((whole.*vector).defined()) {
      EXPECT_TRUE(SameBits(gathered.parameters.*vector, whole.*vector));
    }
  }
}

}  // namespace ringleader::optim
