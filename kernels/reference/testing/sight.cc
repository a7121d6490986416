#include "kernels/reference/testing/sight.h"

#include <algorithm>
#include <cstdlib>

#include "kernels/reference/testing/packed_documents.h"

namespace ringleader::kernels::reference::testing {

namespace {

// Behind the last key that the query at `position` sees, of a document [first, end).
int64_t EndOf(Sight::Mask mask, int64_t position, int64_t first, int64_t end) {
  constexpr int64_t kBlock = 100;
  switch (mask) {
    case Sight::Mask::kCausal:
      return position + 1;
    case Sight::Mask::kFull:
      return end;
    case Sight::Mask::kPrefix: {
      const int64_t prefix = first + (end - first) / 3;
      return position < prefix ? prefix : position + 1;
    }
    case Sight::Mask::kBlocks: {
      int64_t block_end = first;
      while (block_end <= position) block_end += kBlock;
      return std::min(end, block_end);
    }
  }
  std::abort();
}

}  // namespace

Sight::Sight(Mask mask, int64_t tokens, std::vector<int64_t> firsts)
    : mask_(mask),
      is_packed_(!firsts.empty()),
      content_(firsts.size() > 1 ? firsts.back() : tokens) {
  if (firsts.empty()) firsts = {0};
  firsts.push_back(tokens);
  for (size_t document = 0; document + 1 < firsts.size(); ++document) {
    const int64_t first = firsts[document], end = firsts[document + 1];
    for (int64_t position = first; position < end; ++position) {
      const auto behind = static_cast<int32_t>(EndOf(mask, position, first, end));
      rows_.push_back({static_cast<int32_t>(first), behind, behind, behind});
    }
  }
}

bool Sight::Meets(int64_t first, int64_t last, int64_t block, int64_t size) const {
  for (int64_t query = first; query <= last; ++query) {
    if (Begin(query) < (block + 1) * size && End(query) > block * size) return true;
  }
  return false;
}

RankSight Sight::Of(const ShardLayout& layout) const {
  RankSight rank;
  rank.content = content_;
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    const KeyIntervals& row = rows_[layout.Position(i)];
    if (mask_ != Mask::kCausal) rank.intervals.push_back(row);
    if (mask_ == Mask::kCausal && is_packed_) rank.document_starts.push_back(row.begin);
  }
  if (rank.document_starts.empty()) return rank;
  std::vector<int32_t> starts;  // by position
  for (const KeyIntervals& row : rows_) starts.push_back(row.begin);
  rank.key_starts = KeyStarts(starts);
  return rank;
}

}  // namespace ringleader::kernels::reference::testing
