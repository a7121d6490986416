#include "patterns/index/sequence_documents.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_format.h"

namespace ringleader::patterns {

absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeDocuments(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts) {
  for (size_t i = 0; i < firsts.size(); ++i) {
    if (i == 0 ? firsts[i] == 0 : firsts[i] > firsts[i - 1] && firsts[i] < layout.tokens) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("documents: number %d starts at %d of a sequence of %d tokens; starts "
                        "ascend from 0 and lie within it",
                        i, firsts[i], layout.tokens));
  }
  if (firsts.size() < 2) return nullptr;
  auto documents = std::make_shared<SequenceDocuments>();
  documents->tokens = layout.tokens;
  documents->firsts.assign(firsts.begin(), firsts.end());
  documents->local_starts.reserve(layout.local_tokens());
  // Positions grow with the local index.
  size_t document = 0;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    const int64_t position = layout.Position(i);
    while (document + 1 < firsts.size() && firsts[document + 1] <= position) ++document;
    documents->local_starts.push_back(static_cast<int32_t>(firsts[document]));
  }
  return documents;
}

absl::Status CheckDocuments(const SequenceDocuments* documents, int64_t tokens) {
  if (documents == nullptr || documents->tokens == tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("documents are those of a sequence of %d tokens, q is of one of %d; call "
                      "SetDocuments for each sequence",
                      documents->tokens, tokens));
}

EstimateQueries ChooseEstimateQueries(int64_t tokens, int64_t count,
                                      const SequenceDocuments* documents) {
  EstimateQueries queries;
  count = std::min(count, tokens);
  if (documents == nullptr) {
    queries.positions.resize(count);
    std::iota(queries.positions.begin(), queries.positions.end(), tokens - count);
    return queries;
  }
  const std::vector<int64_t>& firsts = documents->firsts;
  int64_t dealt = 0;
  for (size_t document = 0; document < firsts.size(); ++document) {
    const bool is_last = document + 1 == firsts.size();
    const int64_t first = firsts[document], end = is_last ? tokens : firsts[document + 1];
    // The sequence is cut into `count` equal parts; the middle of each says whose query it is.
    int64_t share = 0;
    while (dealt < count && (2 * dealt + 1) * tokens / (2 * count) < end) {
      ++dealt;
      ++share;
    }
    const int64_t stop = !is_last && end - first > share ? end - 1 : end;
    for (int64_t position = stop - share; position < stop; ++position) {
      queries.positions.push_back(position);
      queries.starts.push_back(first);
    }
  }
  return queries;
}

}  // namespace ringleader::patterns
