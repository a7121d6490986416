#include "worker/model/decoder/weight_casts.h"

namespace ringleader::model {
namespace {

using torch::Tensor;

struct Weight {
  WeightCast LayerCasts::*cast;
  Tensor LayerParameters::*values;
};
constexpr Weight kWeights[] = {{&LayerCasts::qkv, &LayerParameters::qkv_weight},
                               {&LayerCasts::output, &LayerParameters::output_weight},
                               {&LayerCasts::gate_up, &LayerParameters::gate_up_weight},
                               {&LayerCasts::down, &LayerParameters::down_weight}};

}  // namespace

template <typename Forward>
const LayerCasts& WeightCasts::Fill(Place& place, int layer, int64_t version, Forward forward) {
  place.layer = -1;  // an error leaves nothing that could be taken for a cast
  for (const Weight& weight : kWeights) {
    WeightCast& result = place.casts.*weight.cast;
    result = {};  // frees the one before, which the next takes the place of
    result.forward = forward(weight);
    result.backward = ops_.TurnRows(result.forward);
  }
  place.layer = layer;
  place.version = version;
  return place.casts;
}

const LayerCasts& WeightCasts::Of(int layer, int64_t version, const LayerParameters& parameters) {
  Place& place = PlaceOf(layer);
  if (place.Has(layer, version)) return place.casts;
  return Fill(place, layer, version,
              [&](const Weight& weight) { return ops_.CastRows(parameters.*weight.values); });
}

const LayerCasts& WeightCasts::OfGathered(int layer, int64_t version, const LayerCasts& gathered) {
  Place& place = PlaceOf(layer);
  const auto forward = [&](const Weight& weight) { return (gathered.*weight.cast).forward; };
  if (!place.Has(layer, version)) return Fill(place, layer, version, forward);
  // What was turned is still true; the codes that it was turned from may have gone from the store.
  for (const Weight& weight : kWeights) (place.casts.*weight.cast).forward = forward(weight);
  return place.casts;
}

}  // namespace ringleader::model
