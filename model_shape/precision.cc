#include "model_shape/precision.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace ringleader::model {

CastLayers CastLayersOf(int64_t layers, Precision precision) {
  switch (precision) {
    case Precision::kModelType:
      return {};
    case Precision::kFp8:
      return layers > 2 ? CastLayers{.begin = 1, .end = layers - 1} : CastLayers{};
    case Precision::kFp8AllLayers:
      return {.begin = 0, .end = layers};
  }
  return {};
}

absl::Status CheckPrecision(const ModelConfig& config, Precision precision) {
  if (precision == Precision::kModelType) return absl::OkStatus();
  constexpr int64_t kMultiple = 16;  // of what a matrix is read by: 16 bytes
  constexpr int64_t kMost = 32768;   // of a row that kernels cast at once (kernels/fused/cast.h)
  const std::pair<const char*, int64_t> widths[] = {
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_attention_heads * head_dim", config.heads * config.head_dim},
      {"(num_attention_heads + 2 * num_key_value_heads) * head_dim",
       (config.heads + 2 * config.kv_heads) * config.head_dim}};
  for (const auto& [name, width] : widths) {
    if (width % kMultiple == 0 && width <= kMost) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("training.precision: fp8 needs widths that are multiples of %d, at most "
                        "%d, and the model's "
                        "%s is %d; set training.precision: bfloat16, or change the model",
                        kMultiple, kMost, name, width));
  }
  if (config.layers > 0 && CastLayersOf(config.layers, precision).count() == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("training.precision: fp8 leaves a model's first and last layer as they "
                        "are, and num_hidden_layers is %d; set training.precision: fp8_all_layers "
                        "or bfloat16",
                        config.layers));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::model
