// Where the parts of a layer lie in a CastBlock, for those who make it and those who read it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "model_shape/parameter_layout.h"
#include "worker/model/decoder/layer_parameters.h"
#include "worker/model/decoder/parameter_store.h"
#include "worker/model/decoder/weight_casts.h"

namespace ringleader::model {

// Where the slots of a layer lie in a CastBlock. All layers' are laid out alike.
struct CastBlockPlaces {
  struct Place {
    int64_t offset = 0, elements = 0;  // in the block
    int64_t rows = 0;                  // 0: a norm or bias
    int64_t first = 0;                 // of its rows among scales, or of its elements among vectors
    int64_t width() const { return elements / rows; }
  };
  std::vector<Place> places;
  int64_t rows = 0, vectors = 0;  // of all

  // The place that begins at `offset` of the block.
  const Place& At(int64_t offset) const;
};
CastBlockPlaces PlacesOfLayer(const ParameterLayout& layout);

// What a layer's steps read of a block, as views.
struct CastLayer {
  // Norms and biases; weights have their shapes and types, but only NaN in them: no step reads
  // them.
  LayerParameters parameters;
  std::array<ScaledRows, kWeights> weights;  // for outputs, in the order of Weight
};
CastLayer ViewCastBlock(const ParameterLayout& layout, const CastBlock& block);

}  // namespace ringleader::model
