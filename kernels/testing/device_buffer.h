// Device memory for the tests and benches of the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

namespace ringleader::kernels {

inline void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

// False on a machine without a usable GPU: tests then skip, benches say so and leave.
inline bool HaveGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Set under compute-sanitizer, which slows kernels down a hundredfold: tests leave large shapes
// out.
inline bool SmallShapes() {
  return std::getenv("RINGLEADER_SMALL_SHAPES") != nullptr;
}

template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Filled with 0xff: NaN in every floating format, so that an element nobody wrote shows.
  explicit DeviceBuffer(int64_t count) : count_(count) {
    CheckCuda(cudaMalloc(reinterpret_cast<void**>(&data_), Bytes() > 0 ? Bytes() : 1),
              "cudaMalloc");
    CheckCuda(cudaMemset(data_, 0xff, Bytes()), "cudaMemset");
  }
  explicit DeviceBuffer(std::span<const T> host) : DeviceBuffer(static_cast<int64_t>(host.size())) {
    Write(host);
  }
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(std::span<const T>(host)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data_); }

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  size_t Bytes() const { return sizeof(T) * static_cast<size_t>(count_); }

  void Write(std::span<const T> host) {
    CheckCuda(cudaMemcpy(data_, host.data(), host.size_bytes(), cudaMemcpyHostToDevice),
              "copy to device");
  }
  void Zero() { CheckCuda(cudaMemset(data_, 0, Bytes()), "cudaMemset"); }
  // Waits for the device.
  std::vector<T> Read() const {
    std::vector<T> host(static_cast<size_t>(count_));
    CheckCuda(cudaMemcpy(host.data(), data_, Bytes(), cudaMemcpyDeviceToHost), "copy from device");
    return host;
  }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace ringleader::kernels
