#include "worker/model/decoder/cast_block.h"

#include <algorithm>
#include <limits>

namespace ringleader::model {

using torch::Tensor;

const CastBlockPlaces::Place& CastBlockPlaces::At(int64_t offset) const {
  const auto place = std::ranges::find(places, offset, &Place::offset);
  TORCH_CHECK(place != places.end(), "no parameter begins at element ", offset, " of a layer");
  return *place;
}

CastBlockPlaces PlacesOfLayer(const ParameterLayout& layout) {
  const ParameterBlock& block = layout.blocks[1];
  CastBlockPlaces found;
  for (const ParameterSlot& slot : layout.slots) {
    if (slot.offset < block.begin || slot.offset >= block.begin + block.elements) continue;
    CastBlockPlaces::Place place{.offset = slot.offset - block.begin, .elements = slot.elements};
    if (slot.is_matrix()) {
      place.rows = slot.shape[0];
      place.first = found.rows;
      found.rows += place.rows;
    } else {
      place.first = found.vectors;
      found.vectors += slot.elements;
    }
    found.places.push_back(place);
  }
  return found;
}

CastLayer ViewCastBlock(const ParameterLayout& layout, const CastBlock& block) {
  const int64_t begin = layout.blocks[1].begin;
  const CastBlockPlaces places = PlacesOfLayer(layout);
  const Tensor unread =
      torch::full({1}, std::numeric_limits<float>::quiet_NaN(), block.vectors.options());
  const auto rows_of = [&](const SlotGroup& group) -> ScaledRows {
    return {.codes = ViewGroup(group, block.codes, begin),
            .scales = block.scales.narrow(0, places.At(group.offset - begin).first, group.shape[0])
                          .unsqueeze(1)};
  };
  CastLayer layer;
  int weights = 0;
  layer.parameters = MakeLayerParameters(layout, 0, [&](const SlotGroup& group) -> Tensor {
    if (group.shape.empty()) return {};
    if (group.shape.size() == 1) {
      return block.vectors.narrow(0, places.At(group.offset - begin).first, group.elements);
    }
    layer.weights.at(weights++) = rows_of(group);  // in the order of LayerParameters
    return unread.expand(group.shape);
  });
  return layer;
}

}  // namespace ringleader::model
