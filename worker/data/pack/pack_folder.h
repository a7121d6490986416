// Packs text into folders of token shards: what `ringctl data pack` runs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/data/token_folder.h"

namespace ringleader::data {

// Byte-level vocabulary: a token per byte, and one that ends a document.
inline constexpr uint32_t kByteSeparator = 256;
inline constexpr uint32_t kByteVocabulary = 257;

struct PackOptions {
  enum class Input {
    kText,    // files of text: a token per byte
    kUint16,  // files of little-endian token ids, made by any tokenizer
    kUint32,
  };
  Input input = Input::kText;
  // Files, and folders that are walked, without following links to folders in them. Each file is
  // one document, however many paths and links lead to it: the first path that does names it.
  std::vector<std::string> paths;
  std::vector<std::string> suffixes;  // of files in folders, e.g. ".h"; empty: all
  std::string output;                 // gets train/ and eval/; must not hold them already
  double eval_share = 0.02;  // of documents, in [0, 1); picked by their path, so stable over calls
  // Longer files in folders are left out, and are an error where they are named.
  uint64_t max_document_bytes = uint64_t{64} << 20;
  uint64_t shard_tokens = uint64_t{64} << 20;
  // Token-id inputs only.
  uint32_t vocabulary = 0;
  std::optional<uint32_t> separator;  // below `vocabulary`
  std::string tokenizer;
  // Token-id inputs only: with tasks, every file FILE has FILE.marks beside it, a byte a token
  // (token_shard.h). Separators that packing adds are given.
  std::vector<std::string> tasks;
  // The token with which each document's prefix ends: up to the first of it, itself included,
  // tokens are marked as given. Of text: a byte. Without tasks.
  std::optional<uint32_t> prefix_end;
};

struct PackResult {
  Manifest train;
  Manifest eval;
  uint64_t skipped_files = 0;   // empty, too long, text with a NUL byte, or links as below
  uint64_t empty_files = 0;     // of them
  uint64_t too_long_files = 0;  // of them
  std::string first_too_long;
  uint64_t skipped_links = 0;  // of skipped_files: in folders, and to folders or to nothing
  std::string first_skipped_link;
  uint64_t repeated_paths = 0;  // to files that other paths or links have led to
  std::string first_repeated;
};

// Documents are read in the order of their paths, so equal inputs give equal bytes.
// INVALID_ARGUMENT names the option or file that is wrong, also where a share was to be held out
// and no document is, or all are; a file or folder that cannot be read is an error, too.
// UNAVAILABLE where another process packs into `output`. Either both folders are complete
// afterwards, or `output` has neither, and is not there if it was not before.
absl::StatusOr<PackResult> Pack(const PackOptions& options);

}  // namespace ringleader::data
