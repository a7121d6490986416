#include "worker/data/samples.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace ringleader::data {

absl::StatusOr<SampleIndex> IndexSamples(const TokenFolder& folder, const std::string& name,
                                         uint64_t most_tokens, Overlong overlong) {
  SampleIndex index;
  SampleCounts& counts = index.counts;
  std::vector<uint64_t> ends = folder.DocumentStarts(0, folder.tokens());
  ends.push_back(folder.tokens());
  uint64_t start = 0, longest = 0;
  for (const uint64_t end : ends) {
    const uint64_t tokens = end > start ? end - start - 1 : 0;
    const uint64_t first = start;
    start = end;
    if (tokens == 0) continue;
    ++counts.documents;
    longest = std::max(longest, tokens);
    if (tokens > most_tokens) {
      ++counts.overlong;
      counts.overlong_tokens += tokens;
      if (overlong != Overlong::kSplit) continue;
    }
    for (uint64_t at = 0; at < tokens; at += most_tokens) {
      index.samples.push_back({.start = first + at, .tokens = std::min(most_tokens, tokens - at)});
    }
  }
  if (counts.overlong > 0 && overlong == Overlong::kRefuse) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: %d of %d documents have more than data.sequence_length = %d tokens, the longest %d; "
        "raise that, or set data.overlong: split or drop",
        name, counts.overlong, counts.documents, most_tokens, longest));
  }
  if (index.samples.empty()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: none of %d documents is a sample (%d are longer than data.sequence_length = %d); pack "
        "more text, or raise that",
        name, counts.documents, counts.overlong, most_tokens));
  }
  return index;
}

}  // namespace ringleader::data
