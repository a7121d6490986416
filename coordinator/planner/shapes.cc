#include "coordinator/planner/shapes.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ringleader::planner {
namespace {

constexpr int64_t kLargest = int64_t{1} << 32;

absl::StatusOr<int64_t> Positive(const nlohmann::json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end() || !found->is_number_integer()) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json: ", key, " is missing or no whole number"));
  }
  const auto value = found->get<int64_t>();
  if (value < 1 || value > kLargest) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json: ", key, " = ", value, " is out of range"));
  }
  return value;
}

absl::StatusOr<int64_t> PositiveOr(const nlohmann::json& config, const char* key,
                                   int64_t fallback) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) return fallback;
  return Positive(config, key);
}

}  // namespace

int64_t ModelShape::weights_per_token() const {
  const int64_t attention = hidden * head_dim * (2 * heads + 2 * kv_heads);
  return layers * (attention + mlp_weights()) + vocabulary * hidden;
}

int64_t ModelShape::parameters() const {
  const int64_t norms = (2 * layers + 1) * hidden;
  return weights_per_token() + norms + (tied_embeddings ? 0 : vocabulary * hidden);
}

absl::StatusOr<ModelShape> ParseModelShape(std::string_view config_json) {
  const nlohmann::json config =
      nlohmann::json::parse(config_json.begin(), config_json.end(), nullptr, false);
  if (!config.is_object()) {
    return absl::InvalidArgumentError("config.json: no JSON object");
  }
  ModelShape shape;
  ASSIGN_OR_RETURN(shape.layers, Positive(config, "num_hidden_layers"));
  ASSIGN_OR_RETURN(shape.hidden, Positive(config, "hidden_size"));
  ASSIGN_OR_RETURN(shape.intermediate, Positive(config, "intermediate_size"));
  ASSIGN_OR_RETURN(shape.heads, Positive(config, "num_attention_heads"));
  ASSIGN_OR_RETURN(shape.vocabulary, Positive(config, "vocab_size"));
  ASSIGN_OR_RETURN(shape.kv_heads, PositiveOr(config, "num_key_value_heads", shape.heads));
  ASSIGN_OR_RETURN(shape.head_dim, PositiveOr(config, "head_dim", shape.hidden / shape.heads));
  const auto tied = config.find("tie_word_embeddings");
  shape.tied_embeddings = tied != config.end() && tied->is_boolean() && tied->get<bool>();
  if (shape.heads % shape.kv_heads != 0 || shape.head_dim < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json: num_attention_heads (", shape.heads,
                     ") must be a multiple of num_key_value_heads (", shape.kv_heads, ")"));
  }
  return shape;
}

ClusterShape TypicalCluster(v1::ResourcesSpec::Engine engine, int nodes, int trainers_per_node) {
  ClusterShape cluster;
  cluster.nodes = nodes;
  cluster.trainers_per_node = trainers_per_node;
  cluster.engine = engine;
  if (engine == v1::ResourcesSpec::CUDA) {
    cluster.intra_node = {.bytes_per_second = 120e9, .latency_seconds = 50e-6};
    cluster.inter_node = {.bytes_per_second = 45e9, .latency_seconds = 15e-6};
  } else {
    cluster.intra_node = {.bytes_per_second = 1.5e9, .latency_seconds = 100e-6};
    cluster.inter_node = {.bytes_per_second = 1.1e9, .latency_seconds = 200e-6};
  }
  return cluster;
}

GroupShape GroupOf(const ClusterShape& cluster, int context) {
  const int per_node = cluster.trainers_per_node;
  if (cluster.nodes == 1 || (per_node > 0 && per_node % context == 0)) {
    return {.inner = context, .outer = 1, .regular = true};
  }
  if (per_node > 0 && context % per_node == 0) {
    return {.inner = per_node, .outer = context / per_node, .regular = true};
  }
  return {.inner = 1, .outer = context, .regular = false};
}

}  // namespace ringleader::planner
