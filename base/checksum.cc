#include "base/checksum.h"

#include <xxhash.h>

namespace ringleader {

struct ChecksumStream::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

uint64_t Checksum(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

ChecksumStream::ChecksumStream() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(state_->xxh);
}
ChecksumStream::~ChecksumStream() = default;

void ChecksumStream::Update(const void* data, size_t bytes) {
  XXH3_64bits_update(state_->xxh, data, bytes);
}

uint64_t ChecksumStream::Digest() const {
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace ringleader
