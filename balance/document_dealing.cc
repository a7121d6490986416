#include "balance/document_dealing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

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
    double most = 0, sum = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (spread_tokens > 0) {
        load[rank] += static_cast<double>(spread_time) * static_cast<double>(room[rank]) /
                      static_cast<double>(spread_tokens);
      }
      most = std::max(most, load[rank]);
      sum += load[rank];
    }
    return most * ranks_ / sum;
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

}  // namespace ringleader::balance
