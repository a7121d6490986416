// What a job asks of the model that it names.
#include <cstdint>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/jobspec.h"
#include "jobspec/mistakes.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/precision.h"
#include "patterns/check_options.h"

namespace ringleader::jobspec {
namespace {

template <typename... Args>
absl::Status Invalid(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return absl::InvalidArgumentError(absl::StrFormat(format, args...));
}

// What the engines' attention takes (kernels/reference, kernels/sm90).
absl::Status CheckHeadDim(v1::ResourcesSpec::Engine engine, int64_t head_dim) {
  if (engine == v1::ResourcesSpec::CUDA) {
    if (head_dim == 64 || head_dim == 128) return absl::OkStatus();
    return Invalid(
        "model: its heads have %d dimensions; with resources.engine: cuda 64 and 128 are supported",
        head_dim);
  }
  if (head_dim >= 1 && head_dim <= 256) return absl::OkStatus();
  return Invalid("model: its heads have %d dimensions; up to 256 are supported", head_dim);
}

absl::Status CheckDenseLayers(const v1::AttentionSpec& attention, int64_t layers) {
  for (const uint32_t layer : attention.dense_layers()) {
    if (layer < layers) continue;
    return Invalid(
        "attention.dense_layers: layer %d does not exist; the model has %d layers, 0 to %d", layer,
        layers, layers - 1);
  }
  return absl::OkStatus();
}

absl::Status CheckOffload(v1::ResourcesSpec::Offload offload, int64_t layers) {
  if (offload != v1::ResourcesSpec::OFFLOAD_HOST || layers > 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "resources.offload: host keeps what layers but the last ones save in host memory, and this "
      "model has one layer; set it to none");
}

absl::Status CheckModelsPrecision(const v1::TrainingSpec& training,
                                  const model::ModelConfig& model) {
  ASSIGN_OR_RETURN(const model::Precision precision, PrecisionOf(training));
  return model::CheckPrecision(model, precision);
}

}  // namespace

absl::Status CheckModelsHeads(const v1::JobSpec& spec, const model::ModelConfig& model) {
  ASSIGN_OR_RETURN(patterns::AttentionOptions attention, AttentionOptionsOf(spec.attention()));
  attention.head_ranks = static_cast<int>(HeadRanks(spec.parallelism()));
  attention.head_groups = static_cast<int>(HeadGroups(spec.parallelism()));
  return patterns::CheckHeads(attention, model.heads, model.kv_heads);
}

void FindModelMistakes(const v1::JobSpec& given, const model::ModelConfig& model,
                       Mistakes* mistakes) {
  if (!model.known()) return;
  v1::JobSpec spec = given;
  ApplyDefaults(&spec);
  const Mistakes alone = *mistakes;
  if (!alone.Touch({"resources"})) {
    mistakes->Add("model", CheckHeadDim(spec.resources().engine(), model.head_dim));
    mistakes->Add("resources.offload", CheckOffload(spec.resources().offload(), model.layers));
  }
  if (!alone.Touch({"attention"})) {
    mistakes->Add("attention.dense_layers", CheckDenseLayers(spec.attention(), model.layers));
  }
  if (!alone.Touch({"attention", "parallelism"})) {
    mistakes->Add(
        HeadGroups(spec.parallelism()) > 1 ? "parallelism.head_groups" : "parallelism.heads",
        CheckModelsHeads(spec, model));
  }
  if (!alone.Touch({"training"})) {
    mistakes->Add("training.precision", CheckModelsPrecision(spec.training(), model));
  }
}

absl::Status CheckModel(const v1::JobSpec& spec, const model::ModelConfig& model) {
  Mistakes mistakes;
  FindModelMistakes(spec, model, &mistakes);
  return mistakes.status();
}

}  // namespace ringleader::jobspec
