// The static masks that benchmarks of long contexts share (LongCA-bench, arXiv 2510.17896, table 2;
// MagiAttention has the same), each as intervals of keys for each query
// (TileSelection::intervals). They are defined here by what a query sees.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels {

// What query i sees, whose document is [first, end). Documents are packed without gaps.
enum class MaskKind : int32_t {
  kFull,                  // every key
  kCausal,                // keys up to i
  kFullWindow,            // keys j with |i - j| < window
  kCausalWindow,          // keys j <= i with i - j < window
  kFullDocuments,         // every key of its document
  kCausalDocuments,       // keys of its document up to i
  kSharedQuestion,        // the first document (the question), and of its own one keys up to i; the
                          // second document (the first answer) too
  kCausalBlockwise,       // keys of its document up to i; in the last document keys of all
  kGlobalSliding,         // keys j with |i - j| < window or j < window; all keys where i < window
  kPrefixCausal,          // keys below `prefix`, and keys up to i
  kPrefixDocuments,       // the first `prefix` keys of its document, and its keys up to i
  kBlockCausalDocuments,  // keys of its document up to the end of the block of i; blocks of `block`
                          // tokens count from the document's first
};
inline constexpr int kMaskKinds = 12;

// The name in benchmarks, such as "shared_question".
absl::string_view MaskName(MaskKind kind);

struct Mask {
  MaskKind kind = MaskKind::kCausal;
  int32_t window = 1024;  // tokens
  int32_t prefix = 0;     // tokens
  int32_t block = 1024;   // tokens
};

// The intervals of each of `tokens` queries. `documents`: the position of each document's first
// token, ascending from 0; only masks of documents look at it. INVALID_ARGUMENT names what does not
// fit.
absl::StatusOr<std::vector<KeyIntervals>> IntervalsOf(const Mask& mask, int32_t tokens,
                                                      std::span<const int32_t> documents);

// Pairs of a query and a key that it sees.
int64_t VisiblePairs(std::span<const KeyIntervals> rows);

}  // namespace ringleader::kernels
