#include "ring/document_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "absl/strings/str_format.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"

namespace ringleader::ring {
namespace {

int64_t Sum(const std::vector<int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

template <typename Documents>
std::vector<int64_t> Lengths(const Documents& documents) {
  std::vector<int64_t> lengths;
  lengths.reserve(documents.size());
  for (const auto& document : documents) lengths.push_back(document.tokens);
  return lengths;
}

}  // namespace

absl::StatusOr<DocumentLayout> DocumentLayout::Sort(int64_t tokens, std::span<const int64_t> firsts,
                                                    std::span<const std::optional<int>> holders,
                                                    int ranks, int stripe) {
  if (firsts.empty() || firsts[0] != 0 || firsts.size() != holders.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("documents: %d starts and %d holders; starts ascend from 0, and each "
                        "document has a holder or is spread",
                        firsts.size(), holders.size()));
  }
  DocumentLayout layout;
  layout.tokens_ = tokens;
  layout.ranks_ = ranks;
  layout.stripe_ = stripe;
  layout.whole_.resize(ranks);
  for (size_t i = 0; i < firsts.size(); ++i) {
    const int64_t end = i + 1 < firsts.size() ? firsts[i + 1] : tokens;
    if (end <= firsts[i] || (holders[i].has_value() && (*holders[i] < 0 || *holders[i] >= ranks))) {
      return absl::InvalidArgumentError(
          absl::StrFormat("documents: number %d starts at %d and ends at %d, held by rank %d of %d",
                          i, firsts[i], end, holders[i].value_or(-1), ranks));
    }
    (holders[i].has_value() ? layout.whole_[*holders[i]] : layout.spread_)
        .push_back({.number = i, .first = firsts[i], .tokens = end - firsts[i]});
  }
  return layout;
}

absl::StatusOr<DocumentLayout> DocumentLayout::Create(int64_t tokens,
                                                      std::span<const int64_t> firsts,
                                                      std::span<const std::optional<int>> holders,
                                                      int ranks, int stripe) {
  if (ranks < 1 || stripe < 1 || tokens < 1 || tokens % (int64_t{ranks} * stripe) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "documents: %d tokens do not divide by ranks × stripe = %d × %d", tokens, ranks, stripe));
  }
  ASSIGN_OR_RETURN(DocumentLayout layout, Sort(tokens, firsts, holders, ranks, stripe));
  if (layout.spread_.size() < firsts.size()) {
    std::ranges::stable_sort(layout.spread_, std::greater(), &Document::tokens);
  }
  layout.local_tokens_ = tokens / ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    layout.spread_tokens_.push_back(layout.local_tokens() - Sum(layout.WholeLengths(rank)));
  }
  const int64_t least = *std::ranges::min_element(layout.spread_tokens_);
  if (least < 0 || (least == 0 && !layout.spread_.empty())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("documents: a rank of %d holds whole documents of %d tokens of %d%s", ranks,
                        layout.local_tokens() - least, layout.local_tokens(),
                        least < 0 ? "" : ", and none of those that are spread"));
  }
  return layout;
}

absl::StatusOr<DocumentLayout> DocumentLayout::CreateApart(
    int64_t tokens, std::span<const int64_t> firsts, std::span<const std::optional<int>> holders,
    int ranks, int stripe) {
  if (ranks < 1 || stripe < 1 || tokens < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "documents: %d tokens in stripes of %d over %d ranks", tokens, stripe, ranks));
  }
  ASSIGN_OR_RETURN(DocumentLayout layout, Sort(tokens, firsts, holders, ranks, stripe));
  layout.is_apart_ = true;
  for (int rank = 0; rank < ranks; ++rank) {
    std::ranges::stable_sort(layout.whole_[rank], std::greater(), &Document::tokens);
    int64_t held = 0;
    for (const Document& document : layout.spread_) {
      held += HeldOf(document.tokens, rank, ranks, stripe);
    }
    layout.spread_tokens_.push_back(held);
    layout.local_tokens_ = std::max(layout.local_tokens_, held + Sum(layout.WholeLengths(rank)));
  }
  layout.local_tokens_ = RoundUp(layout.local_tokens_, stripe);
  return layout;
}

int64_t DocumentLayout::HeldOf(int64_t length, int rank, int ranks, int64_t stripe) {
  const int64_t round = ranks * stripe;
  return length / round * stripe + std::clamp<int64_t>(length % round - rank * stripe, 0, stripe);
}

template <typename Visit>
void DocumentLayout::VisitStripes(Visit visit) const {
  if (is_apart_) {
    for (const Document& document : spread_) {
      for (int64_t place = 0; place < document.tokens; place += stripe_) {
        visit(static_cast<int>(place / stripe_ % ranks_), place,
              std::min<int64_t>(stripe_, document.tokens - place));
      }
    }
    return;
  }
  const int64_t largest = *std::ranges::max_element(spread_tokens_);
  for (int64_t held = 0; held < largest; held += stripe_) {
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t count = std::min<int64_t>(stripe_, spread_tokens_[rank] - held);
      if (count > 0) visit(rank, held * ranks_ + int64_t{rank} * stripe_, count);
    }
  }
}

void DocumentLayout::VisitSpread(
    absl::FunctionRef<void(int, size_t, int64_t, int64_t)> visit) const {
  auto document = spread_.begin();
  int64_t read = 0;  // of the document
  VisitStripes([&](int rank, int64_t /*place*/, int64_t count) {
    while (count > 0) {
      const int64_t run = std::min(count, document->tokens - read);
      visit(rank, document->number, document->first + read, run);
      count -= run;
      read += run;
      if (read < document->tokens) continue;
      ++document;
      read = 0;
    }
  });
}

int64_t DocumentLayout::ring_tokens() const {
  const int64_t largest = *std::ranges::max_element(spread_tokens_);
  return RoundUp(largest, stripe_) * ranks_;
}

std::vector<int64_t> DocumentLayout::Positions(int rank) const {
  std::vector<int64_t> positions;
  positions.reserve(local_tokens());
  VisitSpread([&](int holder, size_t /*document*/, int64_t first, int64_t count) {
    if (holder != rank) return;
    for (int64_t i = 0; i < count; ++i) positions.push_back(first + i);
  });
  for (const Document& whole : whole_[rank]) {
    for (int64_t i = 0; i < whole.tokens; ++i) positions.push_back(whole.first + i);
  }
  for (int64_t next = tokens_; std::ssize(positions) < local_tokens(); ++next) {
    positions.push_back(next);
  }
  return positions;
}

std::vector<int64_t> DocumentLayout::RingFirsts() const {
  std::vector<int64_t> firsts;
  size_t document = 0;
  int64_t next = 0, read = 0;  // the document's first token, and those visited, among the spread
  VisitStripes([&](int /*holder*/, int64_t place, int64_t count) {
    for (; document < spread_.size() && next < read + count; ++document) {
      firsts.push_back(place + next - read);
      next += spread_[document].tokens;
    }
    read += count;
  });
  return firsts;
}

std::vector<int64_t> DocumentLayout::SpreadLengths() const {
  return Lengths(spread_);
}

std::vector<int64_t> DocumentLayout::WholeFirsts(int rank) const {
  std::vector<int64_t> firsts;
  int64_t next = 0;
  for (const Document& document : whole_[rank]) {
    firsts.push_back(next);
    next += document.tokens;
  }
  return firsts;
}

std::vector<int64_t> DocumentLayout::WholeLengths(int rank) const {
  return Lengths(whole_[rank]);
}

}  // namespace ringleader::ring
