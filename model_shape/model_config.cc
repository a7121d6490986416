#include "model_shape/model_config.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/files.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace ringleader::model {
namespace {

using Json = nlohmann::json;

// Estimates and layouts go through a model layer by layer.
constexpr int64_t kMaxLayers = 10'000;
// Beyond these, products of widths and tokens leave 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 20;

// For messages.
std::string Show(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

// Reads the members of one JSON object; keeps the first error, so that the parser below reads like
// the format.
class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool Has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

  void Fail(const char* key, const std::string& problem) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrFormat("%s: \"%s\" %s", where_, key, problem));
    }
  }

  // A whole number in [1, 2^40]; required unless there is a default.
  int64_t Positive(const char* key, std::optional<int64_t> otherwise = {}) {
    constexpr int64_t kLargest = int64_t{1} << 40;
    if (!Has(key)) return Missing(key, otherwise);
    const Json& value = object_[key];
    if (!value.is_number_integer() || value < 1 || value > kLargest) {
      Fail(key, absl::StrFormat("must be a whole number of at least 1; it is %s", Show(value)));
      return 1;
    }
    return value.get<int64_t>();
  }

  double PositiveReal(const char* key, std::optional<double> otherwise = {}) {
    if (!Has(key)) return Missing(key, otherwise);
    const Json& value = object_[key];
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() <= 0) {
      Fail(key, absl::StrFormat("must be a number above 0; it is %s", Show(value)));
      return 1.0;
    }
    return value.get<double>();
  }

  bool Bool(const char* key, bool otherwise) {
    if (!Has(key)) return otherwise;
    const Json& value = object_[key];
    if (!value.is_boolean()) {
      Fail(key, absl::StrFormat("must be true or false; it is %s", Show(value)));
      return otherwise;
    }
    return value.get<bool>();
  }

  std::string String(const char* key, const std::optional<std::string>& otherwise = {}) {
    if (!Has(key)) return Missing(key, otherwise);
    const Json& value = object_[key];
    if (!value.is_string()) {
      Fail(key, absl::StrFormat("must be a string; it is %s", Show(value)));
      return "";
    }
    return value.get<std::string>();
  }

  const absl::Status& status() const { return status_; }
  void Take(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }

 private:
  template <typename T>
  T Missing(const char* key, const std::optional<T>& otherwise) {
    if (!otherwise) Fail(key, "is missing");
    return otherwise.value_or(T{1});
  }
  std::string Missing(const char* key, const std::optional<std::string>& otherwise) {
    if (!otherwise) Fail(key, "is missing");
    return otherwise.value_or("");
  }

  const Json& object_;
  const std::string where_;
  absl::Status status_;
};

// YaRN multiplies cos and sin by 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22), unless the
// file says otherwise.
double YarnMagnitude(double factor, double weight) {
  return factor <= 1.0 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

double YarnAttentionFactor(Reader& in, double factor) {
  if (in.Has("attention_factor")) return in.PositiveReal("attention_factor");
  if (in.Has("mscale") && in.Has("mscale_all_dim")) {
    return YarnMagnitude(factor, in.PositiveReal("mscale")) /
           YarnMagnitude(factor, in.PositiveReal("mscale_all_dim"));
  }
  return YarnMagnitude(factor, 1.0);
}

// What a rule says, without what stands elsewhere too, in the words of transformers 5.
Json RuleOf(const Json& section) {
  Json rule = section;
  if (!rule.is_object()) return rule;
  rule.erase("rope_theta");
  if (rule.contains("type") && !rule.contains("rope_type")) rule["rope_type"] = rule["type"];
  rule.erase("type");
  return rule;
}

// What a rule may say, whichever it is: what another one reads is left unread. "finetuned" says how
// a model was made.
constexpr const char* kRopeKeys[] = {"attention_factor",
                                     "beta_fast",
                                     "beta_slow",
                                     "factor",
                                     "finetuned",
                                     "high_freq_factor",
                                     "low_freq_factor",
                                     "mscale",
                                     "mscale_all_dim",
                                     "original_max_position_embeddings",
                                     "partial_rotary_factor",
                                     "rope_theta",
                                     "rope_type",
                                     "truncate",
                                     "type"};

// A rule for each type of layer: {"full_attention": {...}, "sliding_attention": {...}}.
void RejectRulesByLayer(const Json& rule, const char* section, Reader& in) {
  for (const auto& [key, value] : rule.items()) {
    if (!value.is_object()) continue;
    in.Fail(section, absl::StrFormat("is given by layer type (%s), which is not supported; give "
                                     "one rule for all layers",
                                     Show(key)));
  }
}

void RejectUnknownRopeKeys(const Json& rule, const char* section, Reader& in) {
  for (const auto& [key, value] : rule.items()) {
    if (value.is_null() || std::ranges::find(kRopeKeys, key) != std::end(kRopeKeys)) continue;
    in.Fail(section, absl::StrFormat("has %s, which is not known here and may change what the "
                                     "model computes; remove it if it does not; known: %s",
                                     Show(key), absl::StrJoin(kRopeKeys, ", ")));
  }
}

// The scaling rule stands in "rope_scaling" (transformers 4) or "rope_parameters" (5, with theta
// inside). Versions differ in which of two that differ they take.
absl::Status ParseRope(const Json& root, const std::string& source, ModelConfig& config) {
  Reader top(root, source);
  RopeConfig& rope = config.rope;
  const char* section = top.Has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (top.Has("rope_parameters") && top.Has("rope_scaling") &&
      RuleOf(root["rope_parameters"]) != RuleOf(root["rope_scaling"])) {
    top.Fail("rope_scaling", "differs from \"rope_parameters\"; leave the one that is meant");
    return top.status();
  }
  rope.theta = top.PositiveReal("rope_theta", 10000.0);
  RETURN_IF_ERROR(top.status());
  if (!top.Has(section)) return absl::OkStatus();
  if (!root[section].is_object()) {
    top.Fail(section, "must be an object");
    return top.status();
  }
  RejectRulesByLayer(root[section], section, top);
  RETURN_IF_ERROR(top.status());

  Reader in(root[section], absl::StrFormat("%s: %s", source, section));
  const double outside = rope.theta;
  rope.theta = in.PositiveReal("rope_theta", outside);
  if (top.Has("rope_theta") && rope.theta != outside) {
    in.Fail("rope_theta", "differs from the one outside; leave the one that is meant");
    return in.status();
  }
  // "type" is what early files say.
  const char* type_key = in.Has("rope_type") ? "rope_type" : "type";
  const std::string type = in.String(type_key, "default");
  rope.original_max_positions =
      in.Positive("original_max_position_embeddings",
                  top.Positive("original_max_position_embeddings", config.max_positions));
  if (in.Has("original_max_position_embeddings") && top.Has("original_max_position_embeddings") &&
      root[section]["original_max_position_embeddings"] !=
          root["original_max_position_embeddings"]) {
    in.Fail("original_max_position_embeddings",
            "differs from the one outside; leave the one that is meant");
  }
  if (in.PositiveReal("partial_rotary_factor", 1.0) != 1.0) {
    in.Fail("partial_rotary_factor", "other than 1 is not supported");
  }
  if (type == "default") {
    rope.scaling = RopeScaling::kDefault;
  } else if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
  } else if (type == "dynamic") {
    // Grows from the length in max_position_embeddings, whatever original_max_position_embeddings
    // says.
    rope.scaling = RopeScaling::kDynamic;
    rope.original_max_positions = config.max_positions;
  } else if (type == "yarn") {
    rope.scaling = RopeScaling::kYarn;
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
  } else {
    in.Fail(type_key,
            absl::StrFormat("is \"%s\"; supported: default, linear, dynamic, yarn, llama3", type));
  }
  if (rope.scaling != RopeScaling::kDefault) rope.factor = in.PositiveReal("factor");
  if (rope.scaling != RopeScaling::kDefault && rope.factor < 1.0) {
    in.Fail("factor", "must be at least 1");
  }
  if (rope.scaling == RopeScaling::kYarn) {
    rope.beta_fast = in.PositiveReal("beta_fast", 32.0);
    rope.beta_slow = in.PositiveReal("beta_slow", 1.0);
    rope.truncate = in.Bool("truncate", true);
    rope.attention_factor = YarnAttentionFactor(in, rope.factor);
    if (rope.theta <= 1.0) in.Fail("rope_theta", "must be above 1 for yarn");
  }
  if (rope.scaling == RopeScaling::kLlama3) {
    rope.low_frequency_factor = in.PositiveReal("low_freq_factor");
    rope.high_frequency_factor = in.PositiveReal("high_freq_factor");
    if (in.status().ok() && rope.high_frequency_factor <= rope.low_frequency_factor) {
      in.Fail("high_freq_factor", "must be above low_freq_factor");
    }
  }
  RejectUnknownRopeKeys(root[section], section, top);
  in.Take(top.status());
  return in.status();
}

// What would change the model's function and is not implemented must not be dropped silently.
void RejectUnsupported(const Json& root, Reader& in) {
  if (in.String("hidden_act", "silu") != "silu") {
    in.Fail("hidden_act",
            absl::StrFormat("is \"%s\"; supported: silu", in.String("hidden_act", "silu")));
  }
  if (in.Bool("use_sliding_window", false)) {
    in.Fail("use_sliding_window",
            "must be false: the attention pattern is the job's (attention.pattern)");
  }
  if (in.Has("quantization_config")) {
    in.Fail("quantization_config", "is not supported; convert the model to fp32, bf16 or fp16");
  }
  if (in.Has("attention_dropout") && root["attention_dropout"] != 0) {
    in.Fail("attention_dropout", "must be 0");
  }
  if (in.Has("partial_rotary_factor") && root["partial_rotary_factor"] != 1) {
    in.Fail("partial_rotary_factor", "other than 1 is not supported");
  }
}

}  // namespace

int64_t ModelConfig::weights_per_token() const {
  const int64_t attention = hidden_size * head_dim * (2 * heads + 2 * kv_heads);
  return layers * (attention + mlp_weights()) + vocab_size * hidden_size;
}

int64_t ModelConfig::parameters() const {
  const int64_t norms = (2 * layers + 1) * hidden_size;
  const int64_t biases = layers * ((qkv_bias ? (heads + 2 * kv_heads) * head_dim : 0) +
                                   (attention_output_bias ? hidden_size : 0) +
                                   (mlp_bias ? 2 * intermediate_size + hidden_size : 0));
  return weights_per_token() + norms + biases + (tied_embeddings ? 0 : vocab_size * hidden_size);
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, const std::string& source) {
  const Json root = ParseJson(json);
  // Nothing below may throw on a value of the wrong type: Reader looks before it takes.
  if (root.is_discarded() || !root.is_object()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: not a JSON object, or nested more than %d deep", source, kMaxJsonDepth));
  }
  ModelConfig config;
  config.source_json = std::string(json);
  Reader in(root, source);

  const std::string family = in.String("model_type");
  RETURN_IF_ERROR(in.status());
  if (family == "qwen2") {
    config.family = Family::kQwen2;
  } else if (family == "llama") {
    config.family = Family::kLlama;
  } else {
    in.Fail("model_type", absl::StrFormat("is \"%s\"; supported: qwen2, llama", family));
  }
  RejectUnsupported(root, in);

  const bool qwen2 = config.family == Family::kQwen2;
  config.vocab_size = in.Positive("vocab_size");
  config.hidden_size = in.Positive("hidden_size");
  config.intermediate_size = in.Positive("intermediate_size");
  config.layers = in.Positive("num_hidden_layers");
  config.heads = in.Positive("num_attention_heads");
  // Qwen2's default (32) fits no model but one; Llama's is "as many as heads".
  config.kv_heads =
      qwen2 ? in.Positive("num_key_value_heads") : in.Positive("num_key_value_heads", config.heads);
  config.max_positions = in.Positive("max_position_embeddings", qwen2 ? 32768 : 2048);
  config.rms_norm_epsilon = in.PositiveReal("rms_norm_eps", 1e-6);
  config.initializer_range = in.PositiveReal("initializer_range", 0.02);
  config.tied_embeddings = in.Bool("tie_word_embeddings", false);
  // Qwen2 has biases on q, k and v and nowhere else, whatever the file says; Llama asks the file.
  const bool attention_bias = !qwen2 && in.Bool("attention_bias", false);
  config.qkv_bias = qwen2 || attention_bias;
  config.attention_output_bias = attention_bias;
  config.mlp_bias = !qwen2 && in.Bool("mlp_bias", false);
  if (config.layers > kMaxLayers) {
    in.Fail("num_hidden_layers",
            absl::StrFormat("is %d; at most %d are supported", config.layers, kMaxLayers));
  }
  RETURN_IF_ERROR(in.status());

  if (config.heads % config.kv_heads != 0) {
    in.Fail("num_attention_heads",
            absl::StrFormat("(%d) must be a multiple of \"num_key_value_heads\" (%d)", config.heads,
                            config.kv_heads));
  }
  if (!in.Has("head_dim") && config.hidden_size % config.heads != 0) {
    in.Fail("hidden_size",
            absl::StrFormat(
                "(%d) must be a multiple of \"num_attention_heads\" (%d), or \"head_dim\" given",
                config.hidden_size, config.heads));
  }
  config.head_dim =
      in.Positive("head_dim", std::max<int64_t>(config.hidden_size / config.heads, 1));
  if (config.head_dim % 2 != 0) in.Fail("head_dim", "must be even");
  for (const auto& [key, width] :
       {std::pair("vocab_size", config.vocab_size), std::pair("hidden_size", config.hidden_size),
        std::pair("intermediate_size", config.intermediate_size),
        std::pair("head_dim", config.head_dim)}) {
    if (width > kMaxWidth) {
      in.Fail(key, absl::StrFormat("is %d; at most %d are supported", width, kMaxWidth));
    }
  }
  RETURN_IF_ERROR(in.status());
  if (config.heads * config.head_dim > kMaxWidth) {
    in.Fail("num_attention_heads", absl::StrFormat("× \"head_dim\" is %d; at most %d are supported",
                                                   config.heads * config.head_dim, kMaxWidth));
  }
  // Sizes whose products leave 64 bits are nonsense; catch them before anything is allocated.
  const double parameters = 2.0 * config.vocab_size * config.hidden_size +
                            1.0 * config.layers * config.hidden_size *
                                (3.0 * config.intermediate_size +
                                 2.0 * config.head_dim * (config.heads + config.kv_heads));
  if (parameters > 1e13) {
    in.Fail("hidden_size", absl::StrFormat("and its companions make a model of %.3g parameters; "
                                           "at most 1e13 are supported",
                                           parameters));
  }
  RETURN_IF_ERROR(in.status());
  RETURN_IF_ERROR(ParseRope(root, source, config));
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path, kMaxConfigBytes));
  return ParseModelConfig(text, path);
}

std::string ModelConfigJson(const ModelConfig& config) {
  Json root = Json::parse(config.source_json);
  root.erase("dtype");  // what transformers 5 calls torch_dtype
  root["torch_dtype"] = "float32";
  if (!root.contains("architectures")) {
    root["architectures"] = {config.family == Family::kQwen2 ? "Qwen2ForCausalLM"
                                                             : "LlamaForCausalLM"};
  }
  return root.dump(2) + "\n";
}

}  // namespace ringleader::model
