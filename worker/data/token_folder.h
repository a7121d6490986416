// A folder of token shards with its manifest: one long stream of tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/data/token_shard.h"

namespace ringleader::data {

inline constexpr char kManifestName[] = "manifest.json";

// What manifest.json says. `separator` ends every document; below `vocabulary`.
struct Manifest {
  uint32_t vocabulary = 0;
  uint32_t separator = 0;
  std::string tokenizer = {};  // "bytes", or what the user called an imported one
  uint64_t tokens = 0;
  uint64_t documents = 0;
  std::vector<std::string> shards = {};  // file names, in order
  std::vector<std::string> tasks = {};   // what marks name
  // Marks name no task, and say where documents' prefixes end: what a document begins with is
  // given.
  bool prefixes = false;

  bool has_marks() const { return prefixes || !tasks.empty(); }
};

// At most this many tasks, of at most so many bytes each: every evaluation names them.
inline constexpr size_t kMaxTasks = 32;
inline constexpr size_t kMaxTaskBytes = 32;

// INVALID_ARGUMENT where tasks are too many, or a name is empty, too long or there twice.
absl::Status CheckTasks(const std::vector<std::string>& tasks);
// INVALID_ARGUMENT names the first mark that stands for none of `tasks` tasks.
absl::Status CheckMarks(std::span<const uint8_t> marks, size_t tasks);

// DATA_LOSS or NOT_FOUND names the file and what to do.
absl::StatusOr<Manifest> ReadManifest(const std::string& folder);
absl::Status WriteManifest(const std::string& folder, const Manifest& manifest);
// Reads the headers alone of the shards that the manifest names: that each is as long as it says,
// and that they add up to the manifest. Errors as TokenFolder::Open's, which reads all of them.
absl::Status CheckShards(const std::string& folder, const Manifest& manifest);

// Immutable; safe to read from any thread.
class TokenFolder {
 public:
  // Opens and checks every shard that the manifest names, and that they add up to what it says.
  static absl::StatusOr<TokenFolder> Open(const std::string& folder);

  const Manifest& manifest() const { return manifest_; }
  uint64_t tokens() const { return manifest_.tokens; }
  // Of all shards in their order, and of what their marks mean.
  uint64_t checksum() const;

  // TokenShard's, of all shards.
  absl::Status CheckUnchanged() const;

  // Token `i` of the stream over all shards, i < tokens().
  uint32_t token(uint64_t i) const;
  // Its mark; kPlainMark where nothing is marked.
  uint8_t mark(uint64_t i) const;

  // Tokens of [begin, end) with which a document starts, ascending: those that the shards name, and
  // those after a separator, with which imported token ids may end documents within a file.
  std::vector<uint64_t> DocumentStarts(uint64_t begin, uint64_t end) const;
  // Where in [begin, end), which lies within a document, its prefix ends: the tokens marked as
  // given that the document begins with. `begin` where it has none, or none from there on.
  uint64_t PrefixEnd(uint64_t begin, uint64_t end) const;

 private:
  // The shard that holds token `i`, and which of its tokens that is.
  std::pair<const TokenShard*, uint64_t> Find(uint64_t i) const;

  Manifest manifest_;
  std::vector<std::unique_ptr<TokenShard>> shards_;
  std::vector<uint64_t> ends_;  // [shards]: tokens up to the end of each
};

}  // namespace ringleader::data
