#include "worker/model/decoder/weight_casts.h"

#include <utility>

namespace ringleader::model {

LayerCasts::LayerCasts(const TokenOps& ops, std::array<ScaledRows, kWeights> rows)
    : ops_(&ops), rows_(std::move(rows)) {}

const ScaledRows& LayerCasts::ForInputGradients(Weight weight) {
  ScaledRows& turned = turned_[At(weight)];
  if (!turned.defined()) turned = ops_->TurnRows(rows_[At(weight)]);
  return turned;
}

}  // namespace ringleader::model
