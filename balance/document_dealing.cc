#include "balance/document_dealing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "ring/document_layout.h"

namespace ringleader::balance {
namespace {

// Predicted times this near to each other are even.
constexpr double kEven = 1.02;

class DocumentDealer {
 public:
  DocumentDealer(std::span<const int64_t> tokens, int ranks, const SampleWeights& weights)
      : tokens_(tokens),
        ranks_(ranks),
        share_(std::accumulate(tokens.begin(), tokens.end(), int64_t{0}) / ranks),
        by_length_(tokens.size()) {
    for (const int64_t length : tokens) {
      microseconds_.push_back(weights.Microseconds(static_cast<uint64_t>(length)));
    }
    std::iota(by_length_.begin(), by_length_.end(), 0);
    std::stable_sort(by_length_.begin(), by_length_.end(),
                     [&](size_t a, size_t b) { return tokens_[a] > tokens_[b]; });
  }

  DocumentDealing Deal(int64_t stripe) const {
    // All documents stay whole where they fill the ranks exactly: nothing travels.
    DocumentDealing dealing = SpreadLongest(0, share_);
    if (dealing.imbalance <= kEven && NoneIsSpread(dealing)) return dealing;
    // Otherwise every rank holds at least one stripe of those that are spread.
    for (size_t spread = 0; spread < tokens_.size(); spread += 1 + spread / 8) {
      if (share_ <= stripe) break;
      dealing = SpreadLongest(spread, share_ - stripe);
      if (dealing.imbalance <= kEven && !NoneIsSpread(dealing)) return dealing;
    }
    return {.holders = std::vector<std::optional<int>>(tokens_.size())};
  }

  DocumentDealing DealApart(int64_t stripe) const {
    DocumentDealing best = SpreadApart(0, stripe);
    for (size_t spread = 1; best.imbalance > kEven && spread <= tokens_.size();
         spread += 1 + spread / 8) {
      DocumentDealing dealing = SpreadApart(spread, stripe);
      if (dealing.imbalance < best.imbalance) best = std::move(dealing);
    }
    return best;
  }

 private:
  static bool NoneIsSpread(const DocumentDealing& dealing) {
    return std::ranges::all_of(dealing.holders, [](const auto& h) { return h.has_value(); });
  }

  // Spreads the `spread` longest, and those that find no room in `room` tokens a rank.
  DocumentDealing SpreadLongest(size_t spread, int64_t room) const {
    DocumentDealing dealing = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    int64_t spread_tokens = 0, spread_time = 0;
    for (size_t i = 0; i < spread; ++i) {
      spread_tokens += tokens_[by_length_[i]];
      spread_time += microseconds_[by_length_[i]];
    }
    // A whole document keeps as many tokens of spread ones off its rank.
    std::vector<std::pair<int64_t, size_t>> added;  // time that a rank gets with it, document
    for (size_t i = spread; i < by_length_.size(); ++i) {
      const size_t document = by_length_[i];
      const double saved = spread == 0 ? 0
                                       : static_cast<double>(tokens_[document]) *
                                             static_cast<double>(spread_time) /
                                             static_cast<double>(spread_tokens);
      added.emplace_back(microseconds_[document] - std::llround(saved), document);
    }
    std::stable_sort(added.begin(), added.end(), [](const auto& a, const auto& b) {
      return std::abs(a.first) > std::abs(b.first);
    });
    std::vector<int64_t> load(ranks_, 0), held(ranks_, 0);
    for (const auto& [time, document] : added) {
      // Takes the rank that ends first. A document that takes less time than the spread tokens that
      // it keeps away goes to the rank that ends last.
      const auto order = [&, sign = time > 0 ? 1 : -1](int rank) {
        return std::pair(sign * load[rank], held[rank]);
      };
      int best = -1;
      for (int rank = 0; rank < ranks_; ++rank) {
        if (held[rank] + tokens_[document] > room) continue;
        if (best < 0 || order(rank) < order(best)) best = rank;
      }
      if (best < 0) continue;
      dealing.holders[document] = best;
      load[best] += time;
      held[best] += tokens_[document];
    }
    dealing.imbalance = Imbalance(dealing.holders);
    return dealing;
  }

  // Spreads the `spread` longest. The others go to the rank that ends first of those with room, or
  // else to that with most room.
  DocumentDealing SpreadApart(size_t spread, int64_t stripe) const {
    DocumentDealing dealing = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    std::vector<double> load(ranks_, 0);
    std::vector<int64_t> held(ranks_, 0);
    const auto add = [&](int rank, size_t document, int64_t count) {
      held[rank] += count;
      load[rank] += static_cast<double>(microseconds_[document]) * static_cast<double>(count) /
                    static_cast<double>(tokens_[document]);
    };
    const auto room = static_cast<int64_t>(kEven * static_cast<double>(share_));
    for (size_t i = 0; i < by_length_.size(); ++i) {
      const size_t document = by_length_[i];
      const int64_t length = tokens_[document];
      if (i < spread) {
        for (int rank = 0; rank < ranks_; ++rank) {
          add(rank, document, ring::DocumentLayout::HeldOf(length, rank, ranks_, stripe));
        }
        continue;
      }
      int best = -1;
      for (int rank = 0; rank < ranks_; ++rank) {
        if (held[rank] + length <= room && (best < 0 || load[rank] < load[best])) best = rank;
      }
      if (best < 0) best = static_cast<int>(std::ranges::min_element(held) - held.begin());
      dealing.holders[document] = best;
      add(best, document, length);
    }
    dealing.imbalance = std::max(MostOverMean(load), MostOverMean(held));
    return dealing;
  }

  template <typename T>
  static double MostOverMean(const std::vector<T>& values) {
    const auto sum = static_cast<double>(std::accumulate(values.begin(), values.end(), T{0}));
    const auto most = static_cast<double>(*std::ranges::max_element(values));
    return sum == 0 ? 1.0 : most * static_cast<double>(values.size()) / sum;
  }

  double Imbalance(const std::vector<std::optional<int>>& holders) const {
    std::vector<double> load(ranks_, 0);
    std::vector<int64_t> room(ranks_, share_);
    int64_t spread_tokens = 0, spread_time = 0;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (holders[i].has_value()) {
        load[*holders[i]] += static_cast<double>(microseconds_[i]);
        room[*holders[i]] -= tokens_[i];
      } else {
        spread_tokens += tokens_[i];
        spread_time += microseconds_[i];
      }
    }
    for (int rank = 0; rank < ranks_ && spread_tokens > 0; ++rank) {
      load[rank] += static_cast<double>(spread_time) * static_cast<double>(room[rank]) /
                    static_cast<double>(spread_tokens);
    }
    return MostOverMean(load);
  }

  const std::span<const int64_t> tokens_;
  const int ranks_;
  const int64_t share_;  // tokens of a rank
  std::vector<int64_t> microseconds_;
  std::vector<size_t> by_length_;  // documents, the longest first
};

}  // namespace

DocumentDealing DealDocuments(std::span<const int64_t> tokens, int ranks, int64_t stripe,
                              const SampleWeights& weights) {
  return DocumentDealer(tokens, ranks, weights).Deal(stripe);
}

DocumentDealing DealDocumentsApart(std::span<const int64_t> tokens, int ranks, int64_t stripe,
                                   const SampleWeights& weights) {
  return DocumentDealer(tokens, ranks, weights).DealApart(stripe);
}

}  // namespace ringleader::balance
