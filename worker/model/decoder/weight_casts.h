// The e4m3 casts of the layers' weights: by output channel, for a layer's outputs, and the same
// turned, for its inputs' gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/model/decoder/layer_parameters.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

struct WeightCast {
  ScaledRows forward;   // [out, in]
  ScaledRows backward;  // [in, out]
};

struct LayerCasts {
  WeightCast qkv, output, gate_up, down;
};

// Casts of one layer, or of all, each made when it is first asked for and kept with the version of
// the parameters that it was made from, so that no cast outlives its weights. Not thread-safe.
class WeightCasts {
 public:
  // `held`: of how many layers at a time; 1, or the model's.
  WeightCasts(const TokenOps& ops, int64_t held) : ops_(ops), places_(held) {}

  // Returns the casts of `layer`, whose `parameters` are those of `version`. They are good until
  // another layer takes their place.
  const LayerCasts& Of(int layer, int64_t version, const LayerParameters& parameters);

  // The same where `layer` comes from its owners as casts for outputs, `gathered`, which stay good
  // for as long as the store has them.
  const LayerCasts& OfGathered(int layer, int64_t version, const LayerCasts& gathered);

  // Frees what is held: a layer comes that has none, and takes the room.
  void Clear() { places_.assign(places_.size(), {}); }

 private:
  struct Place {
    int layer = -1;
    int64_t version = 0;
    LayerCasts casts;
    bool Has(int of_layer, int64_t of_version) const {
      return layer == of_layer && version == of_version;
    }
  };

  Place& PlaceOf(int layer) { return places_[static_cast<size_t>(layer) % places_.size()]; }
  // Takes the casts for outputs from forward(weight), a member of LayerCasts, and turns them.
  template <typename Forward>
  const LayerCasts& Fill(Place& place, int layer, int64_t version, Forward forward);

  const TokenOps& ops_;
  std::vector<Place> places_;
};

}  // namespace ringleader::model
