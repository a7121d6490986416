// Copies an optimizer shard from the device to the host while training goes on: in pieces through
// two pinned buffers, on a stream of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ringleader::optim {

// One copy at a time. Begin and Wait belong to the thread that trains, Copy and End to any one.
class ShardCopier {
 public:
  // Copies from the calling thread's device.
  ShardCopier() = default;
  ShardCopier(const ShardCopier&) = delete;
  ~ShardCopier();

  // Waits for the copy before. What is on `after` so far is done before anything is copied.
  absl::Status Begin(cudaStream_t after);
  struct Section {
    const float* from = nullptr;  // [elements], on the device
    std::vector<float>* to = nullptr;
  };
  // Replaces what the vectors hold; returns when all is there.
  absl::Status Copy(std::span<const Section> sections, int64_t elements);
  void End();

  // Waits until no copy is between Begin and End, before which its source must not change. Returns
  // the seconds that it waited.
  double Wait();

 private:
  static constexpr int64_t kPieceElements = int64_t{8} << 20;  // 32 MiB
  struct Piece {
    float* memory = nullptr;  // pinned
    cudaEvent_t arrived = nullptr;
  };

  absl::Status Prepare();
  absl::Status CopySection(const Section& section, int64_t elements);

  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;
  Piece pieces_[2];  // one is read while the other is filled

  absl::Mutex mutex_;
  bool copying_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringleader::optim
