// Token shards: the files that training data is read from. docs/formats.md describes the bytes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::data {

inline constexpr uint32_t kShardVersion = 1;
inline constexpr uint32_t kMarkedShardVersion = 2;  // with a mark for each token after the tokens

// What a mark says of its token. Every other value, m, says that the token is predicted as any
// other, and that it answers task m - 1 of the manifest: evaluation counts how often it is right.
inline constexpr uint8_t kPlainMark = 0;    // predicted, and nothing else
inline constexpr uint8_t kGivenMark = 255;  // not predicted: no loss in training or evaluation

struct ShardHeader {
  char magic[8];         // kShardMagic
  uint32_t version;      // kShardVersion or kMarkedShardVersion
  uint32_t token_bytes;  // 2 or 4
  uint64_t tokens;
  uint64_t documents;
  uint64_t body_checksum;    // of all that follows the header
  uint64_t header_checksum;  // of the header up to here

  uint64_t mark_bytes() const { return version == kMarkedShardVersion ? tokens : 0; }
};
static_assert(sizeof(ShardHeader) == 48);

// Writes `tokens` (all below 2^16 if token_bytes is 2), where each document starts, in tokens, and
// `marks` (one a token, or none at all) to `path`: synced, then renamed into place.
absl::Status WriteShard(const std::string& path, std::span<const uint32_t> tokens,
                        std::span<const uint64_t> document_starts, uint32_t token_bytes,
                        std::span<const uint8_t> marks);

// Reads and checks the header alone, and that the file is as long as it says. Errors as
// TokenShard::Open's.
absl::StatusOr<ShardHeader> ReadShardHeader(const std::string& path);

// A shard mapped into memory. Immutable; safe to read from any thread.
class TokenShard {
 public:
  // Checks everything, the checksum over all bytes included. DATA_LOSS names the file and what is
  // wrong with it.
  static absl::StatusOr<std::unique_ptr<TokenShard>> Open(const std::string& path);
  // DATA_LOSS where the file was written into since: what is mapped is no longer what was checked.
  // One that was removed, or renamed over, stays mapped as it was.
  absl::Status CheckUnchanged() const;
  ~TokenShard();
  TokenShard(const TokenShard&) = delete;
  TokenShard& operator=(const TokenShard&) = delete;

  uint64_t tokens() const { return header_.tokens; }
  // Of its tokens, where documents start, and marks.
  uint64_t checksum() const { return header_.body_checksum; }
  uint32_t token_bytes() const { return header_.token_bytes; }
  std::span<const uint64_t> document_starts() const { return document_starts_; }
  // [tokens], or empty in a shard without marks.
  std::span<const uint8_t> marks() const { return marks_; }
  uint32_t token(uint64_t i) const {
    return header_.token_bytes == 2 ? static_cast<const uint16_t*>(body_tokens_)[i]
                                    : static_cast<const uint32_t*>(body_tokens_)[i];
  }

 private:
  TokenShard() = default;

  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  mutable std::atomic<int64_t> modified_ = 0;  // nanoseconds; of the content that was checked
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  ShardHeader header_{};
  std::span<const uint64_t> document_starts_;
  const void* body_tokens_ = nullptr;
  std::span<const uint8_t> marks_;
};

}  // namespace ringleader::data
