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

  // Frees what is held: a layer comes that has none, and takes the room.
  void Clear() { places_.assign(places_.size(), {}); }

 private:
  struct Place {
    int layer = -1;
    int64_t version = 0;
    LayerCasts casts;
  };

  const TokenOps& ops_;
  std::vector<Place> places_;
};

}  // namespace ringleader::model
