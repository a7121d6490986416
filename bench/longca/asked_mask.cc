#include "bench/longca/asked_mask.h"

#include <algorithm>

namespace ringleader::bench {

using kernels::MaskKind;

std::optional<Asked> AskFor(const MaskedSequence& sequence, MaskKind kind) {
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
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace ringleader::bench
