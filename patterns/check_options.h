// Whether attention options fit each other, the ring and the sequence. INVALID_ARGUMENT names the
// option and what to change.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "patterns/attention_options.h"
#include "ring/division.h"

namespace ringleader::patterns {

// Whether the pattern chooses by the queries that attention.selection allows. The pattern is known.
absl::Status CheckSelection(const AttentionOptions& options);
// `options.stripe` is resolved.
absl::Status CheckOptions(const AttentionOptions& options, int ranks);
// Whether documents may lie as `by_documents` has it, if it is set.
absl::Status CheckByDocuments(const AttentionOptions& options);
// What a sequence must divide into. The options have passed CheckOptions.
ring::Division DivisionOf(const AttentionOptions& options, int ranks);
absl::Status CheckLength(const AttentionOptions& options, int ranks, int64_t local_tokens);

}  // namespace ringleader::patterns
