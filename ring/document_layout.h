// Whose documents are where under parallelism.layout: documents. In a sequence of many documents
// some are spread over all ranks, and each of the others lies whole on one rank. docs/balance.md
// says which (balance/document_dealing.h chooses).
//
// A rank's tokens are, in its local order, those of the spread documents, then its whole ones. The
// spread documents, one after the other, are dealt in stripes; where whole documents leave some
// ranks more room than others, those go on getting stripes when the others are full. Their stripes
// are numbered as if all ranks had got as many (ShardLayout's kStriped of ring_tokens() tokens):
// places that nobody holds are passed over, so places keep the order of tokens, but not their
// distances.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::ring {

// Immutable.
class DocumentLayout {
 public:
  // `firsts`: positions in the sequence of `tokens` tokens with which a document starts, ascending
  // from 0. holders[i]: the rank that holds document i; nullopt: it is spread. INVALID_ARGUMENT
  // unless `tokens` divide by ranks × stripe, and no rank is given more than its share, nor all of
  // it in whole documents while others are spread.
  static absl::StatusOr<DocumentLayout> Create(int64_t tokens, std::span<const int64_t> firsts,
                                               std::span<const std::optional<int>> holders,
                                               int ranks, int stripe);

  int64_t tokens() const { return tokens_; }  // of the sequence
  int ranks() const { return ranks_; }
  int stripe() const { return stripe_; }  // tokens
  int64_t local_tokens() const { return tokens_ / ranks_; }

  // Positions in the sequence of the rank's tokens, in its local order: [local_tokens()].
  std::vector<int64_t> Positions(int rank) const;

  // How many of each rank's tokens, its first ones, are of spread documents: all zero, or none.
  std::span<const int64_t> spread_tokens() const { return spread_tokens_; }
  bool has_spread() const { return spread_tokens_[0] > 0; }
  // Places in stripes that ranks have, held or not: a multiple of ranks × stripe.
  int64_t ring_tokens() const;
  // Their places at which a spread document starts, ascending from 0.
  std::vector<int64_t> RingFirsts() const;
  // Which of the rank's tokens after those a document starts with: their numbers, ascending from 0.
  std::vector<int64_t> WholeFirsts(int rank) const;

 private:
  struct Document {
    int64_t first = 0, tokens = 0;
  };

  // Calls visit(rank, place, count) for each stripe that a rank holds, in the order of the spread
  // documents' tokens.
  template <typename Visit>
  void VisitStripes(Visit visit) const;

  int64_t tokens_ = 0;
  int ranks_ = 1;
  int stripe_ = 1;
  std::vector<Document> spread_;              // in the order of the sequence
  std::vector<std::vector<Document>> whole_;  // [rank], likewise
  std::vector<int64_t> spread_tokens_;        // [rank]
};

}  // namespace ringleader::ring
