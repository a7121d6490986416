// Where every parameter lies in one flat fp32 buffer. Gradients, master weights and Adam moments
// use the same offsets, so that a shard of the model is a range of elements, whatever the number of
// ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model_shape/model_config.h"

namespace ringleader::model {

struct ParameterSlot {
  std::string name;            // Hugging Face's, e.g. model.layers.0.self_attn.q_proj.weight
  std::vector<int64_t> shape;  // Hugging Face's: linear weights are [out, in]
  int64_t offset = 0;          // elements
  int64_t elements = 0;
  bool is_matrix() const { return shape.size() > 1; }
};

// A range of the flat buffer that is used, and whose gradient is complete, at one time.
struct ParameterBlock {
  int64_t begin = 0;  // elements, a multiple of kAlignment
  int64_t elements = 0;
};

// Slots in rising order. q, k and v projections follow each other without a gap, and so do gate and
// up: each group is one matrix to the decoder. Groups start at multiples of kAlignment.
struct ParameterLayout {
  static constexpr int64_t kAlignment = 16;  // elements; one cache line

  std::vector<ParameterSlot> slots;
  int64_t elements = 0;  // including gaps; a multiple of kAlignment
  // Covering all elements: the embedding, each layer, the final norm with the head (which is the
  // embedding's block where embeddings are tied).
  std::vector<ParameterBlock> blocks = {};

  // Elements of one rank's shard when `ranks` share the buffer, a multiple of kAlignment. The last
  // shard may reach past `elements`: buffers are allocated with PaddedElements.
  int64_t ShardElements(int ranks) const;
  int64_t PaddedElements(int ranks) const { return ShardElements(ranks) * ranks; }

  // Parameters in the model, without gaps.
  int64_t ParameterCount() const;

  // nullptr if there is no such parameter. Linear in the number of slots.
  const ParameterSlot* Find(const std::string& name) const;
};

ParameterLayout MakeParameterLayout(const ModelConfig& config);

// Fills `values` with elements [first, first + count) of a new model's buffer, as Hugging Face
// initialises: matrices from N(0, initializer_range), norms 1, biases and gaps 0. An element
// depends on the seed, its parameter's name and its place there only: any split into ranges, on any
// rank or thread, gives the same model.
void InitializeParameters(const ModelConfig& config, const ParameterLayout& layout, uint64_t seed,
                          int64_t first, int64_t count, float* values);

}  // namespace ringleader::model
