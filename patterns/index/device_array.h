// Memory of the device that attention runs on: the host's for the CPU engine, the GPU's on GPUs.
#pragma once

#include <cstdint>
#include <memory>

namespace ringleader::patterns {

// The last owner frees it.
using DeviceMemory = std::shared_ptr<void>;

// `size` elements in such memory. Copies share it.
template <typename T>
struct DeviceArray {
  DeviceMemory memory = nullptr;
  int64_t size = 0;

  T* data() const { return static_cast<T*>(memory.get()); }
};

}  // namespace ringleader::patterns
