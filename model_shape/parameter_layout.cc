#include "model_shape/parameter_layout.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/numbers/ceil_div.h"
#include "base/numbers/split_mix.h"

namespace ringleader::model {
namespace {

// FNV-1a: stable over machines and library versions, unlike std::hash.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

// Standard normal numbers by index (Box and Muller), so that no draw waits for the one before it.
class NormalDraws {
 public:
  explicit NormalDraws(uint64_t key) : key_(SplitMix64(key)) {}

  double At(int64_t i) const {
    const uint64_t radius = SplitMix64(key_ + 2 * static_cast<uint64_t>(i));
    const uint64_t angle = SplitMix64(key_ + 2 * static_cast<uint64_t>(i) + 1);
    constexpr double kUnit = 0x1p-53;
    // (0, 1]: its logarithm is finite.
    const double u = static_cast<double>((radius >> 11) + 1) * kUnit;
    const double v = static_cast<double>(angle >> 11) * kUnit;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  }

 private:
  const uint64_t key_;
};

// Lays slots out one after the other.
class Builder {
 public:
  explicit Builder(ParameterLayout& layout) : layout_(layout) {}

  // Groups added until the next Block belong together.
  void Block() {
    EndBlock();
    layout_.blocks.push_back({.begin = layout_.elements});
  }
  void EndBlock() {
    if (layout_.blocks.empty()) return;
    layout_.blocks.back().elements = layout_.elements - layout_.blocks.back().begin;
  }

  // Slots added until the next Group lie without a gap.
  void Group() { end_ = RoundUp(end_, ParameterLayout::kAlignment); }

  void Add(std::string name, std::vector<int64_t> shape) {
    const int64_t elements =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
    layout_.slots.push_back(
        {.name = std::move(name), .shape = std::move(shape), .offset = end_, .elements = elements});
    end_ += elements;
    layout_.elements = RoundUp(end_, ParameterLayout::kAlignment);
  }

 private:
  ParameterLayout& layout_;
  int64_t end_ = 0;
};

}  // namespace

// Shards are of one size, whatever parameter their borders cut: the optimizer works element by
// element.
int64_t ParameterLayout::ShardElements(int ranks) const {
  return RoundUp(CeilDiv(elements, ranks), kAlignment);
}

int64_t ParameterLayout::ParameterCount() const {
  int64_t count = 0;
  for (const ParameterSlot& slot : slots) count += slot.elements;
  return count;
}

const ParameterSlot* ParameterLayout::Find(const std::string& name) const {
  const auto it = std::find_if(slots.begin(), slots.end(),
                               [&](const ParameterSlot& slot) { return slot.name == name; });
  return it == slots.end() ? nullptr : &*it;
}

ParameterLayout MakeParameterLayout(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t query = config.heads * config.head_dim;
  const int64_t kv = config.kv_heads * config.head_dim;
  const int64_t inner = config.intermediate_size;

  ParameterLayout layout;
  Builder add(layout);
  // The order of the forward pass; Hugging Face's names.
  add.Block();
  add.Group();
  add.Add("model.embed_tokens.weight", {config.vocab_size, hidden});
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
    add.Block();
    add.Group();
    add.Add(layer + "input_layernorm.weight", {hidden});
    add.Group();
    add.Add(layer + "self_attn.q_proj.weight", {query, hidden});
    add.Add(layer + "self_attn.k_proj.weight", {kv, hidden});
    add.Add(layer + "self_attn.v_proj.weight", {kv, hidden});
    if (config.qkv_bias) {
      add.Group();
      add.Add(layer + "self_attn.q_proj.bias", {query});
      add.Add(layer + "self_attn.k_proj.bias", {kv});
      add.Add(layer + "self_attn.v_proj.bias", {kv});
    }
    add.Group();
    add.Add(layer + "self_attn.o_proj.weight", {hidden, query});
    if (config.attention_output_bias) {
      add.Group();
      add.Add(layer + "self_attn.o_proj.bias", {hidden});
    }
    add.Group();
    add.Add(layer + "post_attention_layernorm.weight", {hidden});
    add.Group();
    add.Add(layer + "mlp.gate_proj.weight", {inner, hidden});
    add.Add(layer + "mlp.up_proj.weight", {inner, hidden});
    if (config.mlp_bias) {
      add.Group();
      add.Add(layer + "mlp.gate_proj.bias", {inner});
      add.Add(layer + "mlp.up_proj.bias", {inner});
    }
    add.Group();
    add.Add(layer + "mlp.down_proj.weight", {hidden, inner});
    if (config.mlp_bias) {
      add.Group();
      add.Add(layer + "mlp.down_proj.bias", {hidden});
    }
  }
  add.Block();
  add.Group();
  add.Add("model.norm.weight", {hidden});
  if (!config.tied_embeddings) {
    add.Group();
    add.Add("lm_head.weight", {config.vocab_size, hidden});
  }
  add.EndBlock();
  return layout;
}

void InitializeParameters(const ModelConfig& config, const ParameterLayout& layout, uint64_t seed,
                          int64_t first, int64_t count, float* values) {
  std::fill(values, values + count, 0.0f);
  for (const ParameterSlot& slot : layout.slots) {
    const int64_t begin = std::max(slot.offset, first);
    const int64_t end = std::min(slot.offset + slot.elements, first + count);
    if (begin >= end) continue;
    if (slot.is_matrix()) {
      const NormalDraws draws(SplitMix64(seed) ^ HashName(slot.name));
      for (int64_t i = begin; i < end; ++i) {
        values[i - first] =
            static_cast<float>(config.initializer_range * draws.At(i - slot.offset));
      }
    } else if (slot.name.ends_with("norm.weight")) {
      std::fill(values + (begin - first), values + (end - first), 1.0f);
    }
  }
}

}  // namespace ringleader::model
