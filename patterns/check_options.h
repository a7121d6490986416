// Checks that attention options fit each other, the ring and the sequence. INVALID_ARGUMENT names
// the option and what to change.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "patterns/attention_options.h"
#include "ring/division.h"

namespace ringleader::patterns {

// Checks what does not depend on the ring.
absl::Status CheckPattern(const AttentionOptions& options);
// Checks everything but the length; `options.stripe` is resolved.
absl::Status CheckOptions(const AttentionOptions& options, int ranks);
// Whether documents that lie as `by_documents` says are apart (ring/document_layout.h): places in
// one ring keep no distances, by which patterns other than dense go.
bool AreApart(const AttentionOptions& options);
// Checks that documents may lie as `by_documents` says, if it is set.
absl::Status CheckByDocuments(const AttentionOptions& options);
// Checks that heads may be shared out by `head_ranks`, whatever the model.
absl::Status CheckHeadRanks(const AttentionOptions& options);
// Checks that those of a model can be: evenly, and so that each choice is made by one rank, as it
// would be without. The options have passed CheckOptions.
absl::Status CheckHeads(const AttentionOptions& options, int64_t heads, int64_t kv_heads);
// Returns what a sequence must divide into. The options have passed CheckOptions.
ring::Division DivisionOf(const AttentionOptions& options, int ranks);
absl::Status CheckLength(const AttentionOptions& options, int ranks, int64_t local_tokens);

}  // namespace ringleader::patterns
