#include "jobspec/values/model_spec.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/process/time_limit.h"
#include "base/status_macros.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::jobspec {
namespace {

using v1::ResourcesSpec;

// nullopt: the trainer picks.
constexpr std::pair<ResourcesSpec::Recompute, std::optional<model::Recompute>> kRecomputes[] = {
    {ResourcesSpec::RECOMPUTE_UNSPECIFIED, std::nullopt},
    {ResourcesSpec::NONE, model::Recompute::kNone},
    {ResourcesSpec::ATTENTION_ONLY, model::Recompute::kAttentionOnly},
    {ResourcesSpec::FULL, model::Recompute::kFull},
};

constexpr std::pair<ResourcesSpec::Offload, model::Offload> kOffloads[] = {
    {ResourcesSpec::OFFLOAD_UNSPECIFIED, model::Offload::kAuto},
    {ResourcesSpec::OFFLOAD_NONE, model::Offload::kNone},
    {ResourcesSpec::OFFLOAD_HOST, model::Offload::kHost},
};

constexpr std::pair<v1::TrainingSpec::Precision, model::Precision> kPrecisions[] = {
    {v1::TrainingSpec::PRECISION_UNSPECIFIED, model::Precision::kModelType},
    {v1::TrainingSpec::BFLOAT16, model::Precision::kModelType},
    {v1::TrainingSpec::FP8, model::Precision::kFp8},
    {v1::TrainingSpec::FP8_ALL_LAYERS, model::Precision::kFp8AllLayers},
};

}  // namespace

std::string ModelConfigPath(const v1::ModelSpec& model) {
  return model.config().empty() ? model.init() + "/config.json" : model.config();
}

absl::StatusOr<v1::ModelShape> ReadModelShape(const v1::ModelSpec& model, const std::string& client,
                                              absl::Duration limit) {
  const std::string path = ModelConfigPath(model);
  const auto shape = std::make_shared<v1::ModelShape>();
  RETURN_IF_ERROR(
      WithTimeLimit(client, limit, absl::StrCat("reading ", path), [path, shape]() -> absl::Status {
        ASSIGN_OR_RETURN(const model::ModelConfig config, model::LoadModelConfig(path));
        *shape = ShapeOf(config);
        return absl::OkStatus();
      }));
  return *shape;
}

v1::ModelShape ShapeOf(const model::ModelConfig& config) {
  v1::ModelShape shape;
  shape.set_vocab_size(config.vocab_size);
  shape.set_hidden_size(config.hidden_size);
  shape.set_intermediate_size(config.intermediate_size);
  shape.set_layers(config.layers);
  shape.set_heads(config.heads);
  shape.set_kv_heads(config.kv_heads);
  shape.set_head_dim(config.head_dim);
  shape.set_tied_embeddings(config.tied_embeddings);
  shape.set_qkv_bias(config.qkv_bias);
  shape.set_attention_output_bias(config.attention_output_bias);
  shape.set_mlp_bias(config.mlp_bias);
  return shape;
}

absl::StatusOr<model::MemoryWishes> MemoryWishesOf(const ResourcesSpec& resources) {
  model::MemoryWishes wishes;
  ASSIGN_OR_RETURN(wishes.recompute,
                   Convert(kRecomputes, resources.recompute(), "resources.recompute"));
  ASSIGN_OR_RETURN(wishes.offload, Convert(kOffloads, resources.offload(), "resources.offload"));
  return wishes;
}

absl::StatusOr<model::Precision> PrecisionOf(const v1::TrainingSpec& training) {
  return Convert(kPrecisions, training.precision(), "training.precision");
}

absl::Status SetPrecision(const v1::JobSpec& spec, model::TrainingShape* shape) {
  ASSIGN_OR_RETURN(shape->precision, PrecisionOf(spec.training()));
  const v1::TrainingSpec& training = spec.training();
  shape->always_casts =
      training.fp8_first_step() <= 1 &&
      (training.fp8_last_step() == 0 || training.fp8_last_step() >= training.steps());
  return absl::OkStatus();
}

model::ModelConfig ModelOf(const v1::ModelShape& shape) {
  model::ModelConfig config;
  config.vocab_size = shape.vocab_size();
  config.hidden_size = shape.hidden_size();
  config.intermediate_size = shape.intermediate_size();
  config.layers = shape.layers();
  config.heads = shape.heads();
  config.kv_heads = shape.kv_heads();
  config.head_dim = shape.head_dim();
  config.tied_embeddings = shape.tied_embeddings();
  config.qkv_bias = shape.qkv_bias();
  config.attention_output_bias = shape.attention_output_bias();
  config.mlp_bias = shape.mlp_bias();
  return config;
}

}  // namespace ringleader::jobspec
