#include "patterns/index/visible_keys.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_format.h"

namespace ringleader::patterns {

std::string_view MaskName(Mask mask) {
  switch (mask) {
    case Mask::kCausal:
      return "causal";
    case Mask::kFull:
      return "full";
    case Mask::kPrefixLm:
      return "prefix_lm";
    case Mask::kBlockCausal:
      return "block_causal";
  }
  std::abort();
}

absl::Status CheckPrefixes(std::span<const int64_t> firsts, int64_t tokens,
                           std::span<const int64_t> prefix_ends) {
  if (prefix_ends.size() != firsts.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.mask: prefix_lm: %d prefixes of %d documents",
                        prefix_ends.size(), firsts.size()));
  }
  for (size_t i = 0; i < firsts.size(); ++i) {
    const int64_t end = i + 1 < firsts.size() ? firsts[i + 1] : tokens;
    if (firsts[i] <= prefix_ends[i] && prefix_ends[i] <= end) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.mask: prefix_lm: the prefix of document %d ends at %d, the "
                        "document is [%d, %d)",
                        i, prefix_ends[i], firsts[i], end));
  }
  return absl::OkStatus();
}

namespace {

// Behind the last key that the query at `position` sees, of a document [first, end).
int64_t EndOf(const MaskRule& rule, size_t document, int64_t position, int64_t first, int64_t end) {
  switch (rule.mask) {
    case Mask::kCausal:
      return position + 1;
    case Mask::kFull:
      return end;
    case Mask::kPrefixLm:
      return std::max(rule.prefix_ends[document], position + 1);
    case Mask::kBlockCausal:
      return std::min(end, first + ((position - first) / rule.block + 1) * rule.block);
  }
  std::abort();
}

// VisibleAt, of a query of document number `document`.
std::pair<int64_t, int64_t> VisibleIn(const MaskRule& rule, int64_t tokens,
                                      std::span<const int64_t> firsts, size_t document,
                                      int64_t window, int64_t position) {
  int64_t begin = firsts[document];
  int64_t end = document + 1 < firsts.size() ? firsts[document + 1] : tokens;
  const bool is_padding = position >= tokens - rule.padding;
  end = is_padding ? position + 1 : EndOf(rule, document, position, begin, end);
  if (window > 0) {
    begin = std::max(begin, position - window + 1);
    end = std::min(end, position + window);
  }
  return {begin, end};
}

}  // namespace

std::pair<int64_t, int64_t> VisibleAt(const MaskRule& rule, int64_t tokens,
                                      std::span<const int64_t> firsts, int64_t window,
                                      int64_t position) {
  const auto after = std::ranges::upper_bound(firsts, position);
  return VisibleIn(rule, tokens, firsts, after - firsts.begin() - 1, window, position);
}

std::vector<kernels::KeyIntervals> VisibleKeys(const MaskRule& rule,
                                               const kernels::ShardLayout& layout,
                                               std::span<const int64_t> firsts, int64_t window) {
  std::vector<kernels::KeyIntervals> rows;
  rows.reserve(layout.local_tokens());
  size_t document = 0;
  // Positions grow with the local index.
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    const int64_t position = layout.Position(i);
    while (document + 1 < firsts.size() && firsts[document + 1] <= position) ++document;
    const auto [begin, end] = VisibleIn(rule, layout.tokens, firsts, document, window, position);
    const auto behind = static_cast<int32_t>(end);
    rows.push_back({static_cast<int32_t>(begin), behind, behind, behind});
  }
  return rows;
}

}  // namespace ringleader::patterns
