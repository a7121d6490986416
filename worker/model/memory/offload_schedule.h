// Which layers' kept tensors are on the device at a time, and which wait in host memory.
#pragma once

#include <algorithm>
#include <optional>

namespace ringleader::model {

// Layers take turns in the device's `slots`. Forward fills them from layer 0 on; a layer that finds
// none free has the oldest leave for the host. The last `slots` layers stay: backward begins with
// them, and each one that it is through with leaves its slot to the nearest layer on the host,
// which has the backward of slots - 1 layers to come back in. So whatever a layer keeps leaves once
// and comes back once, and the device never holds more than `slots` layers. One slot works, but
// nothing hides its copies.
class OffloadSchedule {
 public:
  // 1 <= slots; layers <= slots: nothing leaves.
  OffloadSchedule(int layers, int slots) : slots_(slots), on_host_(std::max(0, layers - slots)) {}

  // Layers [0, on_host()) leave the device.
  int on_host() const { return on_host_; }
  bool Leaves(int layer) const { return layer < on_host_; }

  // The layer whose slot forward of `layer` takes: its copy must be done by then.
  std::optional<int> LeftBeforeForward(int layer) const {
    return layer >= slots_ ? std::optional<int>(layer - slots_) : std::nullopt;
  }
  // The layer that comes back into the slot of `layer`, whose backward is enqueued.
  std::optional<int> ReturnsAfterBackward(int layer) const {
    return layer >= slots_ ? std::optional<int>(layer - slots_) : std::nullopt;
  }

 private:
  int slots_, on_host_;
};

}  // namespace ringleader::model
