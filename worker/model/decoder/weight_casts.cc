#include "worker/model/decoder/weight_casts.h"

#include <utility>

namespace ringleader::model {

using torch::Tensor;

const Tensor& ValuesOf(const LayerParameters& parameters, Weight weight) {
  switch (weight) {
    case Weight::kQkv:
      return parameters.qkv_weight;
    case Weight::kOutput:
      return parameters.output_weight;
    case Weight::kGateUp:
      return parameters.gate_up_weight;
    case Weight::kDown:
      break;
  }
  return parameters.down_weight;
}

LayerCasts::LayerCasts(const TokenOps& ops, const LayerParameters& parameters, bool holds)
    : ops_(&ops), holds_(holds) {
  for (int i = 0; i < kWeights; ++i) {
    casts_[i].values = ValuesOf(parameters, static_cast<Weight>(i));
  }
}

LayerCasts::LayerCasts(const TokenOps& ops, std::array<ScaledRows, kWeights> gathered)
    : ops_(&ops) {
  for (int i = 0; i < kWeights; ++i) casts_[i].rows = std::move(gathered[i]);
}

const ScaledRows& LayerCasts::ForOutputs(Weight weight) {
  Casts& casts = Of(weight);
  if (!casts.rows.defined()) casts.rows = ops_->CastRows(casts.values);
  return casts.rows;
}

const ScaledRows& LayerCasts::ForInputGradients(Weight weight) {
  Casts& casts = Of(weight);
  if (!casts.turned.defined()) {
    casts.turned = ops_->TurnRows(casts.rows.defined() ? casts.rows : ops_->CastRows(casts.values));
  }
  return casts.turned;
}

void LayerCasts::Done(Weight weight) {
  if (holds_) return;
  Casts& casts = Of(weight);
  casts.turned = {};
  if (casts.values.defined()) casts.rows = {};
}

LayerCasts& WeightCasts::Of(int layer, int64_t version, const LayerParameters& parameters) {
  Place& place = PlaceOf(layer);
  if (!holds_ || place.layer != layer || place.version != version) {
    place = {.layer = layer, .version = version, .casts = LayerCasts(ops_, parameters, holds_)};
  }
  return place.casts;
}

LayerCasts& WeightCasts::Of(int layer, LayerCasts gathered) {
  Place& place = PlaceOf(layer);
  place = {.casts = std::move(gathered)};
  return place.casts;
}

}  // namespace ringleader::model
