#include "worker/model/parameter_layout.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringleader::model {
namespace {

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// FNV-1a: stable over machines and library versions, unlike std::hash.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

// Lays slots out one behind the other.
class Builder {
 public:
  explicit Builder(ParameterLayout& layout) : layout_(layout) {}

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
  return RoundUp((elements + ranks - 1) / ranks, kAlignment);
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
  add.Group();
  add.Add("model.embed_tokens.weight", {config.vocab_size, hidden});
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
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
  add.Group();
  add.Add("model.norm.weight", {hidden});
  if (!config.tied_embeddings) {
    add.Group();
    add.Add("lm_head.weight", {config.vocab_size, hidden});
  }
  return layout;
}

void InitializeParameters(const ModelConfig& config, const ParameterLayout& layout, uint64_t seed,
                          float* values) {
  std::fill(values, values + layout.elements, 0.0f);
  for (const ParameterSlot& slot : layout.slots) {
    float* begin = values + slot.offset;
    float* end = begin + slot.elements;
    if (slot.is_matrix()) {
      // A generator a tensor: the draw does not depend on what else the model has, or on the order.
      std::seed_seq mixed{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                          static_cast<uint32_t>(HashName(slot.name)),
                          static_cast<uint32_t>(HashName(slot.name) >> 32)};
      std::mt19937_64 generator(mixed);
      std::normal_distribution<double> normal(0.0, config.initializer_range);
      std::generate(begin, end, [&] { return static_cast<float>(normal(generator)); });
    } else if (slot.name.ends_with("norm.weight")) {
      std::fill(begin, end, 1.0f);
    }
  }
}

}  // namespace ringleader::model
