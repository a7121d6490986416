#include "worker/model/decoder/weight_casts.h"

namespace ringleader::model {

const LayerCasts& WeightCasts::Of(int layer, int64_t version, const LayerParameters& parameters) {
  Place& place = places_[static_cast<size_t>(layer) % places_.size()];
  if (place.layer == layer && place.version == version) return place.casts;
  const auto cast = [&](const torch::Tensor& weight, WeightCast& result) {
    result = {};  // frees the one before, which the next takes the place of
    result.forward = ops_.CastRows(weight);
    result.backward = ops_.TurnRows(result.forward);
  };
  place.layer = -1;  // an error leaves nothing that could be taken for a cast
  cast(parameters.qkv_weight, place.casts.qkv);
  cast(parameters.output_weight, place.casts.output);
  cast(parameters.gate_up_weight, place.casts.gate_up);
  cast(parameters.down_weight, place.casts.down);
  place.layer = layer;
  place.version = version;
  return place.casts;
}

}  // namespace ringleader::model
