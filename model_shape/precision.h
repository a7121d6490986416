// What the products of the decoder's linear layers read (training.precision; docs/precision.md).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "model_shape/model_config.h"

namespace ringleader::model {

// kModelType: weights, activations and gradients as they are, bf16 on GPUs and fp32 on CPUs. kFp8:
// their casts to e4m3, in all layers but the first and the last, whose rounding costs most of what
// FP8 learns less. kFp8AllLayers: in those, too.
enum class Precision { kModelType, kFp8, kFp8AllLayers };

// Layers [begin, end) read casts.
struct CastLayers {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  bool contains(int64_t layer) const { return begin <= layer && layer < end; }
};
CastLayers CastLayersOf(int64_t layers, Precision precision);

// FP8's products for weights' gradients sum over so many tokens at a time, whose rows share a
// scale.
inline constexpr int64_t kWeightGradientTokens = 32768;

// INVALID_ARGUMENT names a width that FP8's products do not take, or a model of so few layers that
// none would be cast. OK where the model is not known.
absl::Status CheckPrecision(const ModelConfig& config, Precision precision);

}  // namespace ringleader::model
