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

inline const torch::Tensor& ValuesOf(const model::LayerParameters& parameters,
                                     model::Weight weight) {
  switch (weight) {
    case model::Weight::kQkv:
      return parameters.qkv_weight;
    case model::Weight::kOutput:
      return parameters.output_weight;
    case model::Weight::kGateUp:
      return parameters.gate_up_weight;
    case model::Weight::kDown:
      break;
  }
  return parameters.down_weight;
}

// `block`, as ranks gathered it, has the casts of the layer's whole weights in `flat`
// [layout.elements], and its norms and biases.
inline void ExpectCastsOf(const model::ParameterLayout& layout, int64_t layer,
                          const model::CastBlock& block, const torch::Tensor& flat,
                          const model::TokenOps& ops) {
  using model::LayerParameters;
  const model::CastLayer gathered = model::ViewCastBlock(layout, block);
  const LayerParameters whole = model::MakeLayerParameters(
      layout, layer,
      [&](const model::SlotGroup& group) { return model::ViewGroup(group, flat, 0); });
  for (int i = 0; i < model::kWeights; ++i) {
    const auto which = static_cast<model::Weight>(i);
    const torch::Tensor &weight = ValuesOf(whole, which),
                        in_place = ValuesOf(gathered.parameters, which);
    const model::ScaledRows &cast = gathered.weights[i], expected = ops.CastRows(weight);
    EXPECT_TRUE(SameBits(cast.codes, expected.codes));
    EXPECT_TRUE(SameBits(cast.scales, expected.scales));
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
    EXPECT_TRUE(SameBits(product(cast), product(expected)));
  }
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
