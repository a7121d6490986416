#include "kernels/masks/masks.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::kernels {
namespace {

struct Document {
  int32_t first, end;
};

// Two intervals, of which the second does not begin before the first: where they meet they are one.
KeyIntervals Two(int32_t begin, int32_t end, int32_t second_begin, int32_t second_end) {
  if (second_begin <= end) return {begin, std::max(end, second_end), second_end, second_end};
  return {begin, end, second_begin, second_end};
}
KeyIntervals One(int32_t begin, int32_t end) {
  return {begin, end, end, end};
}

// `question`: the first document; `last`: whether `own` is the last one.
KeyIntervals RowOf(const Mask& mask, int32_t tokens, int32_t i, const Document& question,
                   const Document& own, bool last) {
  const int32_t window_begin = std::max(i - mask.window + 1, 0),
                window_end = std::min(int64_t{i} + mask.window, int64_t{tokens});
  switch (mask.kind) {
    case MaskKind::kFull:
      return One(0, tokens);
    case MaskKind::kCausal:
      return One(0, i + 1);
    case MaskKind::kFullWindow:
      return One(window_begin, window_end);
    case MaskKind::kCausalWindow:
      return One(window_begin, i + 1);
    case MaskKind::kFullDocuments:
      return One(own.first, own.end);
    case MaskKind::kCausalDocuments:
      return One(own.first, i + 1);
    case MaskKind::kSharedQuestion:
      return Two(0, std::min(question.end, i + 1), own.first, i + 1);
    case MaskKind::kCausalBlockwise:
      return One(last ? 0 : own.first, i + 1);
    case MaskKind::kGlobalSliding:
      if (i < mask.window) return One(0, tokens);
      return Two(0, std::min(mask.window, tokens), window_begin, window_end);
    case MaskKind::kPrefixCausal:
      return One(0, std::max(std::min(mask.prefix, tokens), i + 1));
    case MaskKind::kPrefixDocuments: {
      const int32_t prefix_end = std::min(mask.prefix, own.end - own.first) + own.first;
      return One(own.first, std::max(prefix_end, i + 1));
    }
    case MaskKind::kBlockCausalDocuments: {
      const int64_t blocks = (i - own.first) / mask.block + 1;
      return One(own.first,
                 static_cast<int32_t>(std::min<int64_t>(own.first + blocks * mask.block, own.end)));
    }
  }
  return {};  // IntervalsOf() has refused any other
}

absl::Status Check(const Mask& mask, int32_t tokens, std::span<const int32_t> documents) {
  if (MaskName(mask.kind).empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("mask.kind is %d; see MaskKind", static_cast<int>(mask.kind)));
  }
  if (tokens < 1) return absl::InvalidArgumentError("a mask of no tokens");
  if (mask.window < 1 || mask.block < 1 || mask.prefix < 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "mask.window is %d, block %d, prefix %d; the first two are positive, the last not negative",
        mask.window, mask.block, mask.prefix));
  }
  for (size_t i = 0; i < documents.size(); ++i) {
    if (i == 0 ? documents[i] != 0 : documents[i] <= documents[i - 1] || documents[i] >= tokens) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "documents[%d] is %d; firsts ascend from 0 and lie below the sequence's %d tokens", i,
          documents[i], tokens));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view MaskName(MaskKind kind) {
  switch (kind) {
    case MaskKind::kFull:
      return "full";
    case MaskKind::kCausal:
      return "causal";
    case MaskKind::kFullWindow:
      return "full_window";
    case MaskKind::kCausalWindow:
      return "causal_window";
    case MaskKind::kFullDocuments:
      return "full_documents";
    case MaskKind::kCausalDocuments:
      return "causal_documents";
    case MaskKind::kSharedQuestion:
      return "shared_question";
    case MaskKind::kCausalBlockwise:
      return "causal_blockwise";
    case MaskKind::kGlobalSliding:
      return "global_sliding";
    case MaskKind::kPrefixCausal:
      return "prefix_causal";
    case MaskKind::kPrefixDocuments:
      return "prefix_documents";
    case MaskKind::kBlockCausalDocuments:
      return "block_causal_documents";
  }
  return "";
}

absl::StatusOr<std::vector<KeyIntervals>> IntervalsOf(const Mask& mask, int32_t tokens,
                                                      std::span<const int32_t> documents) {
  RETURN_IF_ERROR(Check(mask, tokens, documents));
  constexpr int32_t kWhole[] = {0};
  if (documents.empty()) documents = kWhole;
  const auto document = [&](size_t index) -> Document {
    return {documents[index], index + 1 < documents.size() ? documents[index + 1] : tokens};
  };
  std::vector<KeyIntervals> rows;
  rows.reserve(tokens);
  for (size_t index = 0; index < documents.size(); ++index) {
    const Document own = document(index);
    for (int32_t i = own.first; i < own.end; ++i) {
      rows.push_back(RowOf(mask, tokens, i, document(0), own, index + 1 == documents.size()));
    }
  }
  return rows;
}

int64_t VisiblePairs(std::span<const KeyIntervals> rows) {
  int64_t pairs = 0;
  for (const KeyIntervals& row : rows) {
    pairs += int64_t{row.end} - row.begin + row.second_end - row.second_begin;
  }
  return pairs;
}

}  // namespace ringleader::kernels
