// What the index pipelines ask of a device. The pipelines (vertical_slash.cc, block_topk.cc) own
// the numbers, the order of the steps and what ranks exchange; a device owns the arithmetic.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "worker/attention/index/device_array.h"
#include "worker/attention/index/layer_index.h"

namespace ringleader::attention {

struct VerticalSlash;
struct BlockTopK;

// Of the types that ranks sum.
enum class SumType { kQueries, kInt64 };  // kQueries: the type of q

// For one layer's call, whose q and k it knows. On GPUs a verb enqueues its work and returns, and
// allocation may throw LibTorch's c10::Error.
class IndexDevice {
 public:
  virtual ~IndexDevice() = default;

  // The host may read and write it on the CPU engine, where it starts as zeros.
  virtual DeviceMemory Allocate(int64_t bytes) = 0;
  virtual int64_t element_bytes() const = 0;  // of q and k

  // Between the ranks, on the control channel, in rank order. Not called with one rank.
  virtual absl::Status Sum(SumType type, void* values, int64_t count) = 0;
  virtual absl::Status Max(float* values, int64_t count) = 0;
  // values: [ranks, bytes]; this rank's part is set.
  virtual absl::Status Gather(void* values, int64_t bytes) = 0;

  // Vertical-slash, in this order; vertical_slash.h says what each reads and writes.
  virtual absl::Status PrepareEstimate(const VerticalSlash& work) = 0;
  virtual absl::Status RowMax(const VerticalSlash& work) = 0;
  virtual absl::Status RowSum(const VerticalSlash& work) = 0;
  virtual absl::Status Mass(const VerticalSlash& work) = 0;
  virtual absl::Status Candidates(const VerticalSlash& work) = 0;
  virtual absl::Status MergeParts(const VerticalSlash& work) = 0;
  virtual absl::Status Select(const VerticalSlash& work, const LayerIndex& index) = 0;
  // Adds verticals, slashes and recall to the layer's statistics.
  virtual absl::Status CountSelection(const VerticalSlash& work, const LayerIndex& index) = 0;

  // Block top-k, in this order; block_topk.h says what each reads and writes.
  virtual absl::Status TileSums(const BlockTopK& work) = 0;
  virtual absl::Status OrderTileSums(const BlockTopK& work) = 0;
  virtual absl::Status Gate(const BlockTopK& work, const LayerIndex& index) = 0;
};

template <typename T>
DeviceArray<T> AllocateArray(IndexDevice& device, int64_t size) {
  return {.memory = device.Allocate(size * static_cast<int64_t>(sizeof(T))), .size = size};
}

}  // namespace ringleader::attention
