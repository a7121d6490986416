#include "base/checksum.h"

#include <xxhash.h>

#include <algorithm>

#include "base/process/progress.h"

namespace ringleader {

namespace {

// At a time: what a slow disk or network reads within a second or so, where the data is a file's.
constexpr size_t kPieceBytes = size_t{16} << 20;

}  // namespace

struct ChecksumStream::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

uint64_t Checksum(const void* data, size_t bytes) {
  if (bytes <= kPieceBytes) return XXH3_64bits(data, bytes);
  ChecksumStream stream;
  stream.Update(data, bytes);
  return stream.Digest();
}

ChecksumStream::ChecksumStream() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(state_->xxh);
}
ChecksumStream::~ChecksumStream() = default;

void ChecksumStream::Update(const void* data, size_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const size_t piece = std::min(bytes, kPieceBytes);
    XXH3_64bits_update(state_->xxh, next, piece);
    next += piece;
    bytes -= piece;
    Progress::Tick();
  }
}

uint64_t ChecksumStream::Digest() const {
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace ringleader
