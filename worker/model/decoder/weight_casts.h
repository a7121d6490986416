// The e4m3 casts of the layers' weights: by output channel, for a layer's outputs, and the same
// turned, for its inputs' gradients.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "worker/model/decoder/layer_parameters.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

// The weights of a layer that are cast.
enum class Weight { kQkv, kOutput, kGateUp, kDown };
inline constexpr int kWeights = 4;
const torch::Tensor& ValuesOf(const LayerParameters& parameters, Weight weight);

// Casts of one layer, each made when a product first asks for it. Not thread-safe.
class LayerCasts {
 public:
  LayerCasts() = default;
  // Of `parameters`; Done frees nothing where `holds`. ops outlives this.
  LayerCasts(const TokenOps& ops, const LayerParameters& parameters, bool holds);
  // Of a layer that comes from its owners as casts for outputs, in the order of Weight.
  LayerCasts(const TokenOps& ops, std::array<ScaledRows, kWeights> gathered);

  const ScaledRows& ForOutputs(Weight weight);         // [out, in]
  const ScaledRows& ForInputGradients(Weight weight);  // [in, out]
  // What a pass wanted of the weight it has had. Should more be asked for, it is cast again.
  void Done(Weight weight);

 private:
  struct Casts {
    torch::Tensor values;  // undefined where rows were gathered
    ScaledRows rows, turned;
  };
  Casts& Of(Weight weight) { return casts_[static_cast<size_t>(weight)]; }

  const TokenOps* ops_ = nullptr;
  bool holds_ = false;
  std::array<Casts, kWeights> casts_;
};

// Casts of the layer in work, or of all, which are kept with the version of the parameters that
// they were made from, so that no cast outlives its weights. Not thread-safe.
class WeightCasts {
 public:
  // `held`: of how many layers casts are kept; 0, or of all that have some.
  WeightCasts(const TokenOps& ops, int64_t held)
      : ops_(ops), holds_(held > 0), places_(std::max<int64_t>(1, held)) {}

  // The casts of `layer`, whose `parameters` are those of `version`. They are good until another
  // layer takes their place.
  LayerCasts& Of(int layer, int64_t version, const LayerParameters& parameters);
  // The same of a layer that was gathered as casts.
  LayerCasts& Of(int layer, LayerCasts gathered);

  // Frees what is held.
  void Clear() { places_.assign(places_.size(), {}); }

 private:
  struct Place {
    int layer = -1;
    int64_t version = 0;
    LayerCasts casts;
  };
  Place& PlaceOf(int layer) { return places_[static_cast<size_t>(layer) % places_.size()]; }

  const TokenOps& ops_;
  const bool holds_;
  std::vector<Place> places_;
};

}  // namespace ringleader::model
