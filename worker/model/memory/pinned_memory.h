// Host memory that a GPU copies from and to by itself, in large pieces.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace ringleader::model {

// Uninitialised to its user; freed with this object, when no copy uses it any more.
class PinnedMemory {
 public:
  // bytes > 0. Takes about as long as the system takes to give out the pages, on several threads.
  // RESOURCE_EXHAUSTED, with the numbers, where it has not enough of them.
  static absl::StatusOr<PinnedMemory> Allocate(int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        registered_(std::exchange(other.registered_, false)) {}
  PinnedMemory& operator=(PinnedMemory&&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  PinnedMemory() = default;

  char* data_ = nullptr;
  int64_t bytes_ = 0;
  bool registered_ = false;
};

}  // namespace ringleader::model
