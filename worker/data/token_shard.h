// Token shards: the files that training data is read from. docs/formats.md describes the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::data {

inline constexpr uint32_t kShardVersion = 1;

struct ShardHeader {
  char magic[8];         // kShardMagic
  uint32_t version;      // kShardVersion
  uint32_t token_bytes;  // 2 or 4
  uint64_t tokens;
  uint64_t documents;
  uint64_t body_checksum;    // of all that follows the header
  uint64_t header_checksum;  // of the header up to here
};
static_assert(sizeof(ShardHeader) == 48);

// Writes `tokens` (all below 2^16 if token_bytes is 2) and where each document starts, in tokens,
// to `path`: synced, then renamed into place.
absl::Status WriteShard(const std::string& path, std::span<const uint32_t> tokens,
                        std::span<const uint64_t> document_starts, uint32_t token_bytes);

// A shard mapped into memory. Immutable; safe to read from any thread.
class TokenShard {
 public:
  // Checks everything, the checksum over all bytes included. DATA_LOSS names the file and what is
  // wrong with it.
  static absl::StatusOr<std::unique_ptr<TokenShard>> Open(const std::string& path);
  ~TokenShard();
  TokenShard(const TokenShard&) = delete;
  TokenShard& operator=(const TokenShard&) = delete;

  uint64_t tokens() const { return header_.tokens; }
  uint32_t token_bytes() const { return header_.token_bytes; }
  std::span<const uint64_t> document_starts() const { return document_starts_; }
  uint32_t token(uint64_t i) const {
    return header_.token_bytes == 2 ? static_cast<const uint16_t*>(body_tokens_)[i]
                                    : static_cast<const uint32_t*>(body_tokens_)[i];
  }

 private:
  TokenShard() = default;

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  ShardHeader header_{};
  std::span<const uint64_t> document_starts_;
  const void* body_tokens_ = nullptr;
};

}  // namespace ringleader::data
