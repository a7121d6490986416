#include "bench/longca/asked_mask.h"

#include <algorithm>
#include <cstdlib>

namespace ringleader::bench {

using kernels::MaskKind;

Asked AskFor(const MaskedSequence& sequence, MaskKind kind) {
  const kernels::Mask mask = sequence.MaskOf(kind);
  const std::vector<int64_t> documents(sequence.documents.begin(), sequence.documents.end());
  switch (kind) {
    case MaskKind::kFull:
      return Asked{.mask = patterns::Mask::kFull};
    case MaskKind::kCausal:
      return Asked{};
    case MaskKind::kFullWindow:
      return Asked{.mask = patterns::Mask::kFull, .window = mask.window};
    case MaskKind::kCausalWindow:
      return Asked{.window = mask.window};
    case MaskKind::kFullDocuments:
      return Asked{.mask = patterns::Mask::kFull, .firsts = documents};
    case MaskKind::kCausalDocuments:
      return Asked{.firsts = documents};
    case MaskKind::kPrefixCausal:
      return Asked{.mask = patterns::Mask::kPrefixLm, .prefix_ends = {mask.prefix}};
    case MaskKind::kPrefixDocuments: {
      Asked asked{.mask = patterns::Mask::kPrefixLm, .firsts = documents};
      for (size_t i = 0; i < documents.size(); ++i) {
        const int64_t end = i + 1 < documents.size() ? documents[i + 1] : sequence.tokens;
        asked.prefix_ends.push_back(std::min(documents[i] + mask.prefix, end));
      }
      return asked;
    }
    case MaskKind::kBlockCausalDocuments:
      return Asked{.mask = patterns::Mask::kBlockCausal, .block = mask.block, .firsts = documents};
    case MaskKind::kSharedQuestion:
    case MaskKind::kCausalBlockwise:
    case MaskKind::kGlobalSliding:
      return Asked{
          .mask = patterns::Mask::kFull,
          .visible =
              IntervalsOf(mask, static_cast<int32_t>(sequence.tokens), sequence.documents).value()};
  }
  std::abort();
}

absl::Status SetMask(const Asked& asked, int64_t tokens, attention::ContextAttention* attention) {
  if (!asked.visible.empty()) return attention->SetVisible(asked.visible);
  return attention->SetDocuments(tokens, asked.firsts, /*padding=*/0, asked.prefix_ends);
}

}  // namespace ringleader::bench
