#include "patterns/index/sequence_documents.h"

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "ringleader/kernels/index.h"
#include "ringleader/kernels/seen_keys.h"

namespace ringleader::patterns {

namespace {

absl::Status CheckFirsts(const kernels::ShardLayout& layout, std::span<const int64_t> firsts) {
  for (size_t i = 0; i < firsts.size(); ++i) {
    if (i == 0 ? firsts[i] == 0 : firsts[i] > firsts[i - 1] && firsts[i] < layout.tokens) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("documents: number %d starts at %d of a sequence of %d tokens; starts "
                        "ascend from 0 and lie within it",
                        i, firsts[i], layout.tokens));
  }
  return absl::OkStatus();
}

// Returns where the documents of `count` tokens start whose positions, position_of(i), ascend.
std::vector<int32_t> StartsOf(std::span<const int64_t> firsts, int64_t count,
                              absl::FunctionRef<int64_t(int64_t)> position_of) {
  std::vector<int32_t> starts;
  starts.reserve(count);
  size_t document = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = position_of(i);
    while (document + 1 < firsts.size() && firsts[document + 1] <= position) ++document;
    starts.push_back(static_cast<int32_t>(firsts[document]));
  }
  return starts;
}

// Returns TileSelection::document_starts of the first `count` local tokens.
std::vector<int32_t> LocalStarts(const kernels::ShardLayout& layout,
                                 std::span<const int64_t> firsts, int64_t count) {
  return StartsOf(firsts, count, [&](int64_t i) { return layout.Position(i); });
}

// Returns MeanKeys::starts of a sequence of `tokens`.
std::vector<int32_t> KeyStarts(std::span<const int64_t> firsts, int64_t tokens) {
  constexpr int64_t kPart = kernels::MeanKeys::kTokens;
  return StartsOf(firsts, (tokens + kPart - 1) / kPart,
                  [&](int64_t i) { return std::min((i + 1) * kPart, tokens) - 1; });
}

// All but what a rank sees.
absl::StatusOr<std::shared_ptr<SequenceDocuments>> MakeHead(const kernels::ShardLayout& layout,
                                                            std::span<const int64_t> firsts,
                                                            int64_t padding) {
  RETURN_IF_ERROR(CheckFirsts(layout, firsts));
  const int64_t content = layout.tokens - padding;
  if (padding != 0 && (firsts.size() < 2 || firsts.back() != content)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("documents: %d of %d tokens are padding, which is to be the last document",
                        padding, layout.tokens));
  }
  auto documents = std::make_shared<SequenceDocuments>();
  documents->tokens = layout.tokens;
  documents->content = content;
  documents->firsts.assign(firsts.begin(), firsts.end());
  return documents;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeDocuments(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts, int64_t padding) {
  ASSIGN_OR_RETURN(auto documents, MakeHead(layout, firsts, padding));
  if (firsts.size() < 2) return nullptr;
  documents->local_starts = LocalStarts(layout, firsts, layout.local_tokens());
  documents->key_starts = KeyStarts(firsts, layout.tokens);
  return documents;
}

absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeMasked(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts, const MaskRule& rule,
    int64_t window) {
  constexpr int64_t kWhole[] = {0};
  if (firsts.empty()) firsts = kWhole;
  ASSIGN_OR_RETURN(auto documents, MakeHead(layout, firsts, rule.padding));
  if (rule.mask == Mask::kPrefixLm) {
    RETURN_IF_ERROR(CheckPrefixes(firsts, layout.tokens, rule.prefix_ends));
  }
  documents->prefix_ends.assign(rule.prefix_ends.begin(), rule.prefix_ends.end());
  documents->visible = VisibleKeys(rule, layout, firsts, /*window=*/0);
  if (window > 0) documents->visible_in_window = VisibleKeys(rule, layout, firsts, window);
  return documents;
}

absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeListed(
    const kernels::ShardLayout& layout, std::span<const kernels::KeyIntervals> queries) {
  if (std::ssize(queries) != layout.tokens) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "what queries see is listed for %d of a sequence of %d tokens; list it for each",
        queries.size(), layout.tokens));
  }
  for (int64_t i = 0; i < layout.tokens; ++i) {
    const kernels::KeyIntervals& row = queries[i];
    const bool is_ordered = 0 <= row.begin && row.begin <= row.end && row.end <= row.second_begin &&
                            row.second_begin <= row.second_end && row.second_end <= layout.tokens;
    const bool sees_itself =
        (row.begin <= i && i < row.end) || (row.second_begin <= i && i < row.second_end);
    if (is_ordered && sees_itself) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "the query at %d is to see [%d, %d) and [%d, %d) of %d tokens; two intervals follow each "
        "other, and one of them holds the query",
        i, row.begin, row.end, row.second_begin, row.second_end, layout.tokens));
  }
  constexpr int64_t kWhole[] = {0};
  ASSIGN_OR_RETURN(auto documents, MakeHead(layout, kWhole, /*padding=*/0));
  documents->listed.assign(queries.begin(), queries.end());
  documents->visible.reserve(layout.local_tokens());
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    documents->visible.push_back(queries[layout.Position(i)]);
  }
  return documents;
}

absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeUneven(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts,
    std::span<const int64_t> shard_tokens) {
  RETURN_IF_ERROR(CheckFirsts(layout, firsts));
  const bool fits =
      layout.kind == kernels::LayoutKind::kStriped && std::ssize(shard_tokens) == layout.ranks &&
      std::ranges::all_of(shard_tokens,
                          [&](int64_t held) { return held >= 1 && held <= layout.local_tokens(); });
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrFormat("documents: %d ranks hold unequal parts of %d tokens in stripes; each "
                        "holds at least 1, and none more than %d",
                        shard_tokens.size(), layout.tokens, layout.local_tokens()));
  }
  auto documents = std::make_shared<SequenceDocuments>();
  documents->tokens = documents->content = layout.tokens;
  documents->firsts.assign(firsts.begin(), firsts.end());
  documents->shard_tokens.assign(shard_tokens.begin(), shard_tokens.end());
  if (firsts.size() > 1) {
    documents->local_starts = LocalStarts(layout, firsts, shard_tokens[layout.rank]);
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

namespace {

// Returns how many of `count` queries each document gets.
std::vector<int64_t> SharesOf(int64_t tokens, int64_t count, const std::vector<int64_t>& firsts) {
  std::vector<int64_t> shares(firsts.size(), 0);
  // The sequence is cut into `count` equal parts; the middle of each says whose query it is.
  size_t document = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t middle = (2 * i + 1) * tokens / (2 * count);
    while (document + 1 < firsts.size() && firsts[document + 1] <= middle) ++document;
    ++shares[document];
  }
  if (static_cast<int64_t>(firsts.size()) > count) return shares;
  for (int64_t& share : shares) {
    if (share > 0) continue;
    --*std::ranges::max_element(shares);
    share = 1;
  }
  return shares;
}

}  // namespace

EstimateQueries ChooseEstimateQueries(int64_t tokens, int64_t count, bool spread,
                                      const SequenceDocuments* documents) {
  std::vector<int64_t> firsts = {0};
  if (documents != nullptr) {
    firsts = documents->firsts;
    if (documents->content < tokens) firsts.pop_back();
    tokens = documents->content;
  }
  const std::vector<int64_t> shares = SharesOf(tokens, std::min(count, tokens), firsts);
  EstimateQueries queries;
  for (size_t document = 0; document < firsts.size(); ++document) {
    const bool is_last = document + 1 == firsts.size();
    const int64_t first = firsts[document], share = shares[document];
    int64_t length = (is_last ? tokens : firsts[document + 1]) - first;
    if (share == 0) queries.longest_without = std::max(queries.longest_without, length);
    if (!is_last && length > share) --length;  // a separator
    for (int64_t i = 0; i < share; ++i) {
      queries.positions.push_back(
          first + (spread ? kernels::SpreadPosition(length, share, i) : length - share + i));
      if (documents != nullptr) queries.starts.push_back(first);
    }
  }
  return queries;
}

}  // namespace ringleader::patterns
