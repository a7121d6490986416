// The checksum of every durable format: XXH3, 64 bits. Guards against damage, not against malice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ringleader {

uint64_t Checksum(const void* data, size_t bytes);

// The same over data that comes in pieces.
class ChecksumStream {
 public:
  ChecksumStream();
  ~ChecksumStream();
  void Update(const void* data, size_t bytes);
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ringleader
