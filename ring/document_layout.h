// Whose documents are where under parallelism.layout: documents. In a sequence of many documents
// some are spread over all ranks, and each of the others lies whole on one rank. docs/balance.md
// says which (balance/document_dealing.h chooses).
//
// A rank's tokens are, in its local order, those of the spread documents, then its whole ones. The
// spread documents, the longest first, are dealt in stripes; where whole documents leave some ranks
// more room than others, those go on getting stripes when the others are full: of the shortest, of
// which no token sees much. Their stripes are numbered as if all ranks had got as many
// (ShardLayout's kStriped of ring_tokens() tokens): places that nobody holds are passed over, so
// places keep the order of a document's tokens, but not their distances.
//
// Patterns that go by distances want those. Apart, each spread document is dealt in stripes by
// itself, the first to rank 0, as if it were a sequence: places are its positions. Then ranks hold
// unequally many tokens, and those with fewer than others end with filler.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace ringleader::ring {

// How many tokens memory is planned for where spread documents are apart and ranks would hold
// `local_tokens` each if they held equally many: hardly any sequence asks for more.
inline int64_t MostLocalTokensApart(int64_t local_tokens) {
  return local_tokens + (local_tokens + 15) / 16;
}

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

  // The same with spread documents apart; ranks hold what they are given. INVALID_ARGUMENT where
  // documents do not ascend, or a holder is no rank.
  static absl::StatusOr<DocumentLayout> CreateApart(int64_t tokens, std::span<const int64_t> firsts,
                                                    std::span<const std::optional<int>> holders,
                                                    int ranks, int stripe);

  int64_t tokens() const { return tokens_; }  // of the sequence
  int ranks() const { return ranks_; }
  int stripe() const { return stripe_; }  // tokens
  bool is_apart() const { return is_apart_; }
  // Of each rank, filler included: apart the most that one holds, up to whole stripes.
  int64_t local_tokens() const { return local_tokens_; }

  // Positions in the sequence of the rank's tokens, in its local order: [local_tokens()]. Filler's
  // are those behind the sequence, from tokens() on.
  std::vector<int64_t> Positions(int rank) const;

  // How many of each rank's tokens, its first ones, are of spread documents: all zero, or none.
  // (Apart, ranks may hold none of short ones.)
  std::span<const int64_t> spread_tokens() const { return spread_tokens_; }
  bool has_spread() const { return !spread_.empty(); }
  // Not apart: places in stripes that ranks have, held or not: a multiple of ranks × stripe.
  int64_t ring_tokens() const;
  // Not apart: their places at which a spread document starts, ascending from 0.
  std::vector<int64_t> RingFirsts() const;
  // Lengths of the spread documents, in the order in which ranks hold parts of them.
  std::vector<int64_t> SpreadLengths() const;
  // Calls visit(rank, document, first, count) for all tokens of spread documents, as ranks hold
  // them, by runs of a stripe or less: `rank` holds `count` tokens from position `first` of the
  // sequence on, of its document number `document`.
  void VisitSpread(absl::FunctionRef<void(int, size_t, int64_t, int64_t)> visit) const;
  // Which of the rank's tokens after those a document starts with: their numbers, ascending from 0.
  std::vector<int64_t> WholeFirsts(int rank) const;
  // Lengths of the rank's whole documents, in their local order; apart, the longest first.
  std::vector<int64_t> WholeLengths(int rank) const;

  // How many tokens of a document of `length`, dealt in stripes by itself, `rank` holds.
  static int64_t HeldOf(int64_t length, int rank, int ranks, int64_t stripe);

 private:
  struct Document {
    size_t number = 0;  // in the sequence
    int64_t first = 0, tokens = 0;
  };

  // Sets everything but what ranks hold.
  static absl::StatusOr<DocumentLayout> Sort(int64_t tokens, std::span<const int64_t> firsts,
                                             std::span<const std::optional<int>> holders, int ranks,
                                             int stripe);
  // Calls visit(rank, place, count) for each stripe that a rank holds, in the order of the spread
  // documents' tokens.
  template <typename Visit>
  void VisitStripes(Visit visit) const;

  int64_t tokens_ = 0;
  int ranks_ = 1;
  int stripe_ = 1;
  bool is_apart_ = false;
  int64_t local_tokens_ = 0;
  std::vector<Document> spread_;              // in the order in which they are dealt
  std::vector<std::vector<Document>> whole_;  // [rank], in their local order
  std::vector<int64_t> spread_tokens_;        // [rank]
};

}  // namespace ringleader::ring
