#include "worker/model/decoder/layer_parameters.h"

namespace ringleader::model {

SlotGroup FindGroup(const ParameterLayout& layout, const std::string& prefix,
                    const std::vector<const char*>& names) {
  SlotGroup group;
  for (const char* name : names) {
    const ParameterSlot* slot = layout.Find(prefix + name);
    if (slot == nullptr) return {};
    if (group.shape.empty()) {
      group.offset = slot->offset;
      group.shape = slot->shape;
      group.shape[0] = 0;
    }
    TORCH_CHECK(slot->offset == group.offset + group.elements, slot->name, " is not adjacent");
    group.shape[0] += slot->shape[0];
    group.elements += slot->elements;
  }
  return group;
}

torch::Tensor ViewGroup(const SlotGroup& group, const torch::Tensor& block, int64_t begin) {
  if (group.shape.empty()) return {};
  return block.narrow(0, group.offset - begin, group.elements).view(group.shape);
}

}  // namespace ringleader::model
