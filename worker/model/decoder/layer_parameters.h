// One layer's parameters, or their gradients, as views of a block of the flat buffer.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "model_shape/parameter_layout.h"

namespace ringleader::model {

// Undefined where the family has no bias.
struct LayerParameters {
  torch::Tensor input_norm;            // [hidden]
  torch::Tensor qkv_weight, qkv_bias;  // [(heads + 2 kv_heads) d, hidden], [(heads + 2 kv_heads) d]
  torch::Tensor output_weight, output_bias;    // [hidden, heads d], [hidden]
  torch::Tensor post_norm;                     // [hidden]
  torch::Tensor gate_up_weight, gate_up_bias;  // [2 intermediate, hidden], [2 intermediate]
  torch::Tensor down_weight, down_bias;        // [hidden, intermediate], [hidden]
};

// Where a group of adjacent slots lies: q, k and v are one matrix to the decoder, gate and up too.
struct SlotGroup {
  int64_t offset = 0, elements = 0;
  std::vector<int64_t> shape;  // stacked along the first dimension; empty: the model has none
};

// The slots `prefix` + each of `names`.
SlotGroup FindGroup(const ParameterLayout& layout, const std::string& prefix,
                    const std::vector<const char*>& names);

// make(group) gives each member, or an undefined tensor where the group's shape is empty.
template <typename Make>
LayerParameters MakeLayerParameters(const ParameterLayout& layout, int64_t layer, Make make) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
  const auto group = [&](const std::string& at, const std::vector<const char*>& names) {
    return make(FindGroup(layout, at, names));
  };
  return {
      .input_norm = group(prefix, {"input_layernorm.weight"}),
      .qkv_weight = group(attention, {"q_proj.weight", "k_proj.weight", "v_proj.weight"}),
      .qkv_bias = group(attention, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
      .output_weight = group(attention, {"o_proj.weight"}),
      .output_bias = group(attention, {"o_proj.bias"}),
      .post_norm = group(prefix, {"post_attention_layernorm.weight"}),
      .gate_up_weight = group(mlp, {"gate_proj.weight", "up_proj.weight"}),
      .gate_up_bias = group(mlp, {"gate_proj.bias", "up_proj.bias"}),
      .down_weight = group(mlp, {"down_proj.weight"}),
      .down_bias = group(mlp, {"down_proj.bias"}),
  };
}

// A member of `block`, whose first element is the flat buffer's element `begin`.
torch::Tensor ViewGroup(const SlotGroup& group, const torch::Tensor& block, int64_t begin);

}  // namespace ringleader::model
