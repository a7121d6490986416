// Rotary position embedding: frequencies under each scaling rule.
#pragma once

#include <cstdint>
#include <vector>

#include "model_shape/model_config.h"

namespace ringleader::model {

struct RopeFrequencies {
  std::vector<float> inverse;     // [head_dim / 2], radians per token
  double attention_factor = 1.0;  // multiplies cos and sin
};

// `sequence_length` in tokens matters to dynamic NTK scaling only (bloc97's rule, theta grows with
// length). YaRN follows section 3.2 of Peng et al. 2023; llama3 the rule shipped with Llama 3.1.
RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config, int64_t sequence_length);

}  // namespace ringleader::model
