// Which documents of a sequence are spread over the ranks that share it, and on which rank each of
// the others lies whole (parallelism.layout: documents). docs/balance.md describes it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "balance/sample_weights.h"

namespace ringleader::balance {

struct DocumentDealing {
  std::vector<std::optional<int>> holders;  // [documents]; nullopt: spread
  // Max over ranks / mean of the predicted times: of spread documents' attention by the visible
  // pairs of the tokens held, of the rest by their number; apart, all by their number, and of
  // tokens where that is more.
  double imbalance = 1;
  // Of tokens alone, of which ranks have unequally many only where documents are apart.
  double token_imbalance = 1;
  // What travels takes, as if nothing of it were hidden: all ranks' slots are as large as the one
  // that holds most of spread documents needs. 0 where weights do not say.
  double travel_microseconds = 0;
};

// `tokens[i]`: length of document i; their sum divides by ranks × stripe, or else what comes out is
// a layout that ring::DocumentLayout refuses by name. Every rank gets as many tokens: what whole
// documents leave of a rank's share is filled with stripes of spread ones, so that a sequence whose
// whole documents do not fit exactly has at least one stripe of them on every rank. Where weights
// say what spread documents take to travel, those are spread with which the slowest rank's
// predicted time and what travels are least together, as far as a search finds them: of the longest
// ever more, then one more or less at a time. Elsewhere as few, the longest first, as keep the
// predicted times within 2 % of their mean, or else come nearest to that. Whole ones then change
// places until ranks are alike. A pure function: every rank deals alike. Takes some 0.1 s for 1,024
// ranks of 8,192 tokens.
DocumentDealing DealDocuments(std::span<const int64_t> tokens, int ranks, int64_t stripe,
                              const SampleWeights& weights);

// The same where spread documents are apart (ring::DocumentLayout::CreateApart): any lengths, and
// ranks may hold unequally many tokens, within 2 % of their mean where that can be. As few are
// spread, the longest first, as keep predicted times within 2 % of theirs, too, or else come
// nearest to that; or those with which it takes least, as above.
DocumentDealing DealDocumentsApart(std::span<const int64_t> tokens, int ranks, int64_t stripe,
                                   const SampleWeights& weights);

}  // namespace ringleader::balance
