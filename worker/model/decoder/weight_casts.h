// The e4m3 casts of a layer's weights: by output channel, for its outputs, as they come from the
// store, and the same turned, for its inputs' gradients.
#pragma once

#include <array>
#include <cstddef>

#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

// The weights of a layer that are cast.
enum class Weight { kQkv, kOutput, kGateUp, kDown };
inline constexpr int kWeights = 4;

// Not thread-safe.
class LayerCasts {
 public:
  LayerCasts() = default;
  // `rows`: for outputs, in the order of Weight. ops outlives this.
  LayerCasts(const TokenOps& ops, std::array<ScaledRows, kWeights> rows);

  const ScaledRows& ForOutputs(Weight weight) const { return rows_[At(weight)]; }  // [out, in]
  // [in, out], turned when a product first asks for it.
  const ScaledRows& ForInputGradients(Weight weight);
  // What a pass wanted of the weight it has had. Should more be asked for, it is turned again.
  void Done(Weight weight) { turned_[At(weight)] = {}; }

 private:
  static size_t At(Weight weight) { return static_cast<size_t>(weight); }

  const TokenOps* ops_ = nullptr;
  std::array<ScaledRows, kWeights> rows_, turned_;
};

}  // namespace ringleader::model
