// What forward keeps of every layer until backward takes it: on the device, or meanwhile in host
// memory, as OffloadSchedule says.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "worker/model/decoder/layer_passes.h"
#include "worker/model/memory/offload_schedule.h"

namespace ringleader::model {

// Copies of layers' tensors to host memory and back, beside the work on LibTorch's current stream:
// HostActivations on a GPU (host_activations.h). One copy of a layer at a time, all in the order of
// their start. c10::Error as LibTorch's.
class HostCopies {
 public:
  virtual ~HostCopies() = default;

  // Starts a copy of `tensors` to `layer`'s place in host memory, after what is enqueued on the
  // current stream. The tensors are dense, and must be left alone, and alive, until Await(layer).
  virtual void StartOut(int layer, std::span<const torch::Tensor> tensors) = 0;
  // Starts the copy back, into uninitialised tensors of the same sizes in the same order.
  virtual void StartIn(int layer, std::span<const torch::Tensor> tensors) = 0;
  // What is enqueued on the current stream from here on comes after the layer's last copy.
  virtual void Await(int layer) = 0;
  // Returns when no copy touches a tensor any more.
  virtual void Drain() = 0;
};

// One pass forward and backward; calls in the order MakeRoom, Keep of each layer from 0 up, Take,
// Return of each from the last down. A pass that ends early waits for its copies. Not thread-safe.
class SavedLayers {
 public:
  // Keeps at most `slots` layers on the device at a time. copies: may be null where layers <=
  // slots; must outlive this.
  SavedLayers(int layers, int slots, HostCopies* copies);
  ~SavedLayers();
  SavedLayers(const SavedLayers&) = delete;
  SavedLayers& operator=(const SavedLayers&) = delete;

  // Called before `layer`'s forward: frees the memory that it will need.
  void MakeRoom(int layer);
  void Keep(int layer, SavedLayer saved);
  // What `layer`'s backward needs. The caller drops what it took before it calls Return.
  SavedLayer Take(int layer);
  // Called when `layer`'s backward is enqueued: another layer comes back into its memory.
  void Return(int layer);

 private:
  struct Shape {
    torch::Tensor SavedLayer::*member;
    std::vector<int64_t> sizes;
    torch::TensorOptions options;
  };
  struct Slot {
    SavedLayer saved;
    std::vector<Shape> shapes;  // of what leaves for the host
  };
  std::vector<torch::Tensor> TensorsOf(const Slot& slot) const;

  const OffloadSchedule schedule_;
  HostCopies* const copies_;
  std::vector<Slot> slots_;  // by layer
  int in_flight_ = 0;        // copies that no Await has followed yet
};

}  // namespace ringleader::model
