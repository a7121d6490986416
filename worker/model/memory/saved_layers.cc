#include "worker/model/memory/saved_layers.h"

#include <utility>

namespace ringleader::model {
namespace {

using torch::Tensor;

// All that may leave the device, in the order of a layer's place in host memory.
constexpr Tensor SavedLayer::*kTensors[] = {&SavedLayer::input,    &SavedLayer::packed,
                                            &SavedLayer::attended, &SavedLayer::lse,
                                            &SavedLayer::middle,   &SavedLayer::gate_up};

}  // namespace

SavedLayers::SavedLayers(int layers, int slots, HostCopies* copies)
    : schedule_(layers, slots), copies_(copies), slots_(layers) {
  TORCH_CHECK(schedule_.on_host() == 0 || copies_ != nullptr,
              "activations cannot leave the device: there is nothing to copy them with");
}

SavedLayers::~SavedLayers() {
  // An error has ended the pass: the tensors must not go while they are copied.
  if (in_flight_ > 0) copies_->Drain();
}

std::vector<Tensor> SavedLayers::TensorsOf(const Slot& slot) const {
  std::vector<Tensor> tensors;
  tensors.reserve(slot.shapes.size());
  for (const Shape& shape : slot.shapes) tensors.push_back(slot.saved.*shape.member);
  return tensors;
}

void SavedLayers::MakeRoom(int layer) {
  const auto leaver = schedule_.LeftBeforeForward(layer);
  if (!leaver.has_value()) return;
  // Memory that is freed here is used again by what is enqueued from here on, after the copy.
  copies_->Await(*leaver);
  --in_flight_;
  Slot& slot = slots_[*leaver];
  for (const Shape& shape : slot.shapes) (slot.saved.*shape.member).reset();
}

void SavedLayers::Keep(int layer, SavedLayer saved) {
  Slot& slot = slots_[layer];
  slot.saved = std::move(saved);
  if (!schedule_.Leaves(layer)) return;
  slot.shapes.clear();
  for (const auto member : kTensors) {
    Tensor& tensor = slot.saved.*member;
    if (!tensor.defined()) continue;
    tensor = tensor.contiguous();
    slot.shapes.push_back(
        {.member = member, .sizes = tensor.sizes().vec(), .options = tensor.options()});
  }
  ++in_flight_;
  copies_->StartOut(layer, TensorsOf(slot));
}

SavedLayer SavedLayers::Take(int layer) {
  if (schedule_.Leaves(layer)) {
    copies_->Await(layer);
    --in_flight_;
  }
  return std::exchange(slots_[layer].saved, {});
}

void SavedLayers::Return(int layer) {
  const auto next = schedule_.ReturnsAfterBackward(layer);
  if (!next.has_value()) return;
  Slot& slot = slots_[*next];
  for (const Shape& shape : slot.shapes) {
    slot.saved.*shape.member = torch::empty(shape.sizes, shape.options);
  }
  ++in_flight_;
  copies_->StartIn(*next, TensorsOf(slot));
}

}  // namespace ringleader::model
