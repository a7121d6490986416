// A decoder's shape, from and to Hugging Face's config.json. Families: qwen2 and llama.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::model {

enum class Family { kQwen2, kLlama };

// How rotary frequencies are stretched beyond the length that a model was pretrained with.
enum class RopeScaling { kDefault, kLinear, kDynamic, kYarn, kLlama3 };

struct RopeConfig {
  RopeScaling scaling = RopeScaling::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                       // all but kDefault
  int64_t original_max_positions = 0;        // tokens, before stretching
  double beta_fast = 32.0, beta_slow = 1.0;  // kYarn
  double attention_factor = 1.0;             // kYarn: multiplies cos and sin
  bool truncate = true;                      // kYarn: whole-numbered correction range
  double low_frequency_factor = 1.0, high_frequency_factor = 4.0;  // kLlama3
};

struct ModelConfig {
  Family family = Family::kQwen2;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;  // tokens
  double rms_norm_epsilon = 1e-6;
  double initializer_range = 0.02;
  bool tied_embeddings = false;
  bool qkv_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  RopeConfig rope;

  // All zero: not known.
  bool known() const { return layers > 0; }
  int64_t parameters() const;
  int64_t mlp_weights() const { return 3 * hidden_size * intermediate_size; }  // of a layer
  // Elements of the matrices that every token is multiplied with: all but the embedding table.
  int64_t weights_per_token() const;

  // The file this came from, so that an export keeps what only the inference side reads (token ids
  // and the like).
  std::string source_json;
};

// What backward recomputes instead of keeping. Attention's output and log-sum-exp are always kept,
// so attention itself is never computed twice; docs/memory.md has the bytes.
enum class Recompute {
  kNone,           // keep every matrix product's result
  kAttentionOnly,  // keep a layer's input, q, k, v and attention output; recompute the rest
  kFull,           // keep a layer's input and attention output
};

// Parses the text of a config.json. INVALID_ARGUMENT names `source` and the key that is missing, of
// the wrong type, out of range or not supported (and what is).
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, const std::string& source);

// No config.json comes near it.
inline constexpr size_t kMaxConfigBytes = size_t{1} << 20;

// Reads and parses `path`: a regular file of at most kMaxConfigBytes, as in ReadRegularFile().
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& path);

// The config.json of an export in fp32: `source_json` with the stored type set.
std::string ModelConfigJson(const ModelConfig& config);

}  // namespace ringleader::model
