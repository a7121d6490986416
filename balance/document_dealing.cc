#include "balance/document_dealing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "ring/document_layout.h"

namespace ringleader::balance {
namespace {

// Predicted times this near to each other are even, and nothing is gained by bringing them nearer.
constexpr double kEven = 1.02, kAlike = 1.002;

class DocumentDealer {
 public:
  DocumentDealer(std::span<const int64_t> tokens, int ranks, const SampleWeights& weights)
      : tokens_(tokens),
        ranks_(ranks),
        share_(std::accumulate(tokens.begin(), tokens.end(), int64_t{0}) / ranks),
        by_length_(tokens.size()) {
    for (const int64_t length : tokens) {
      microseconds_.push_back(weights.Microseconds(static_cast<uint64_t>(length)));
      attention_.push_back(weights.AttentionMicroseconds(static_cast<uint64_t>(length)));
      all_microseconds_ += microseconds_.back();
      firsts_.push_back(firsts_.empty() ? 0 : firsts_.back() + tokens_[firsts_.size() - 1]);
    }
    std::iota(by_length_.begin(), by_length_.end(), 0);
    std::stable_sort(by_length_.begin(), by_length_.end(),
                     [&](size_t a, size_t b) { return tokens_[a] > tokens_[b]; });
  }

  DocumentDealing Deal(int64_t stripe) const {
    // All documents stay whole where they fill the ranks exactly: nothing travels.
    DocumentDealing dealing = SpreadLongest(0, share_, stripe);
    if (dealing.imbalance <= kEven && NoneIsSpread(dealing.holders)) return dealing;
    // Otherwise every rank holds at least one stripe of those that are spread.
    DocumentDealing best = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    const std::vector<double> times = Times(best.holders, stripe);
    if (!times.empty()) best.imbalance = MostOverMean(times);
    for (size_t spread = 0; spread < tokens_.size(); spread += 1 + spread / 8) {
      if (share_ <= stripe) break;
      dealing = SpreadLongest(spread, share_ - stripe, stripe);
      if (NoneIsSpread(dealing.holders)) continue;
      if (dealing.imbalance <= kEven) return dealing;
      if (dealing.imbalance < best.imbalance) best = std::move(dealing);
    }
    return best;
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
  // What a whole document adds to the rank that holds it, and which one it is.
  struct Placed {
    double time = 0;
    size_t document = 0;
  };
  // Which of the documents of a rank that takes longer, and of one that takes less, change places.
  struct Exchange {
    std::optional<size_t> away = {}, back = {};
  };

  static bool NoneIsSpread(const std::vector<std::optional<int>>& holders) {
    return std::ranges::all_of(holders, [](const auto& holder) { return holder.has_value(); });
  }

  // Spreads the `spread` longest, and those that find no room in `room` tokens a rank. Whole ones
  // are placed as if a token of spread ones took as long on every rank; how far ranks are off that
  // then counts when they are placed again.
  DocumentDealing SpreadLongest(size_t spread, int64_t room, int64_t stripe) const {
    constexpr int kRounds = 6;
    DocumentDealing best = {.holders = {}, .imbalance = std::numeric_limits<double>::infinity()};
    std::vector<double> ahead(ranks_, 0);  // how much more a rank takes than placing takes it for
    for (int round = 0; round < kRounds && best.imbalance > kAlike; ++round) {
      std::vector<double> load = ahead;
      DocumentDealing dealing = PlaceWhole(spread, room, load);
      const std::vector<double> times = Times(dealing.holders, stripe);
      if (times.empty()) break;
      dealing.imbalance = MostOverMean(times);
      const double apart = (Sum(times) - Sum(load)) / ranks_;
      for (int rank = 0; rank < ranks_; ++rank) ahead[rank] += times[rank] - load[rank] - apart;
      if (dealing.imbalance >= best.imbalance) break;
      best = std::move(dealing);
    }
    if (best.holders.empty()) best.holders.resize(tokens_.size());
    return best;
  }

  // One such dealing, without its imbalance. `load`: what ranks take already; returns what they
  // take then, less what spread documents take on a rank that holds no whole ones.
  DocumentDealing PlaceWhole(size_t spread, int64_t room, std::vector<double>& load) const {
    DocumentDealing dealing = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    int64_t spread_tokens = 0, spread_time = 0;
    for (size_t i = 0; i < spread; ++i) {
      spread_tokens += tokens_[by_length_[i]];
      spread_time += microseconds_[by_length_[i]];
    }
    // A whole document keeps as many tokens of spread ones off its rank.
    std::vector<Placed> added;
    for (size_t i = spread; i < by_length_.size(); ++i) {
      const size_t document = by_length_[i];
      const double saved = spread == 0 ? 0
                                       : static_cast<double>(tokens_[document]) *
                                             static_cast<double>(spread_time) /
                                             static_cast<double>(spread_tokens);
      added.push_back({static_cast<double>(microseconds_[document]) - saved, document});
    }
    std::ranges::stable_sort(added, std::greater(),
                             [](const Placed& one) { return std::abs(one.time); });
    std::vector<int64_t> held(ranks_, 0);
    std::set<std::pair<double, int>> by_load;                // and rank
    std::multiset<int64_t> helds(held.begin(), held.end());  // of all ranks
    for (int rank = 0; rank < ranks_; ++rank) by_load.emplace(load[rank], rank);
    for (const auto& [time, document] : added) {
      const int64_t length = tokens_[document];
      if (*helds.begin() + length > room) continue;  // no rank has room for it
      const auto has_room = [&](const std::pair<double, int>& place) {
        return held[place.second] + length <= room;
      };
      // Takes the rank that ends first. A document that takes less time than the spread tokens that
      // it keeps away goes to the rank that ends last.
      const auto place = time > 0 ? *std::ranges::find_if(by_load, has_room)
                                  : *std::find_if(by_load.rbegin(), by_load.rend(), has_room);
      const int rank = place.second;
      by_load.erase(place);
      helds.erase(helds.find(held[rank]));
      dealing.holders[document] = rank;
      load[rank] += time;
      held[rank] += length;
      by_load.emplace(load[rank], rank);
      helds.insert(held[rank]);
    }
    Even(added, room, by_load, load, held, dealing);
    return dealing;
  }

  // The exchange, of at most one document each way, that brings two ranks `gap` apart nearest to
  // each other; nullopt where none brings them much nearer. Sorts `last`. Rooms are in tokens.
  std::optional<Exchange> BestExchange(const std::vector<Placed>& first, std::vector<Placed>& last,
                                       double gap, int64_t first_room, int64_t last_room) const {
    std::ranges::sort(last, [](const Placed& a, const Placed& b) {
      return std::pair(a.time, a.document) < std::pair(b.time, b.document);
    });
    std::optional<Exchange> best;
    double nearest = 0.9 * gap;
    const auto consider = [&](std::optional<size_t> away, std::optional<size_t> back) {
      const double moved = (away ? first[*away].time : 0) - (back ? last[*back].time : 0);
      const int64_t tokens =
          (away ? tokens_[first[*away].document] : 0) - (back ? tokens_[last[*back].document] : 0);
      if (tokens > last_room || -tokens > first_room) return;
      if (std::abs(gap - 2 * moved) >= nearest) return;
      nearest = std::abs(gap - 2 * moved);
      best = {.away = away, .back = back};
    };
    for (size_t back = 0; back < last.size(); ++back) consider(std::nullopt, back);
    for (size_t away = 0; away < first.size(); ++away) {
      consider(away, std::nullopt);
      // Of those that could come back the two whose times are around what would make both even.
      const auto above =
          std::ranges::lower_bound(last, first[away].time - gap / 2, {}, &Placed::time) -
          last.begin();
      if (above < std::ssize(last)) consider(away, static_cast<size_t>(above));
      if (above > 0) consider(away, static_cast<size_t>(above) - 1);
    }
    return best;
  }

  // Exchanges whole documents between the rank that takes longest and the one that ends first, as
  // long as that brings them nearer. `load` and `held`: what ranks take, and their tokens in whole
  // ones; `by_load`: the former in order, with ranks.
  void Even(std::span<const Placed> added, int64_t room, std::set<std::pair<double, int>>& by_load,
            std::vector<double>& load, std::vector<int64_t>& held, DocumentDealing& dealing) const {
    std::vector<std::vector<Placed>> placed(ranks_);
    for (const Placed& one : added) {
      const std::optional<int> holder = dealing.holders[one.document];
      if (holder.has_value()) placed[*holder].push_back(one);
    }
    const double alike = (kAlike - 1) * static_cast<double>(all_microseconds_) / ranks_;
    for (int i = 0; i < 8 * ranks_; ++i) {
      const int first = by_load.rbegin()->second, last = by_load.begin()->second;
      if (load[first] - load[last] <= alike) return;
      const std::optional<Exchange> best =
          BestExchange(placed[first], placed[last], load[first] - load[last], room - held[first],
                       room - held[last]);
      if (!best.has_value()) return;
      by_load.erase({load[first], first});
      by_load.erase({load[last], last});
      const auto give = [&](int from, int to, size_t number) {
        const Placed given = placed[from][number];
        placed[from].erase(placed[from].begin() + static_cast<ptrdiff_t>(number));
        placed[to].push_back(given);
        dealing.holders[given.document] = to;
        load[from] -= given.time;
        load[to] += given.time;
        held[from] -= tokens_[given.document];
        held[to] += tokens_[given.document];
      };
      // What comes back stands behind what `first` had, whose numbers stay.
      if (best->back.has_value()) give(last, first, *best->back);
      if (best->away.has_value()) give(first, last, *best->away);
      by_load.emplace(load[first], first);
      by_load.emplace(load[last], last);
    }
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

  static double Sum(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0);
  }

  // What each rank takes, [ranks]; empty if documents cannot lie so. A token of a spread document
  // takes as much of its attention as it has keys, and of the rest as much as any other.
  std::vector<double> Times(const std::vector<std::optional<int>>& holders, int64_t stripe) const {
    std::vector<double> times(ranks_, 0);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (holders[i].has_value()) times[*holders[i]] += static_cast<double>(microseconds_[i]);
    }
    if (NoneIsSpread(holders)) return times;
    const auto layout = ring::DocumentLayout::Create(share_ * ranks_, firsts_, holders, ranks_,
                                                     static_cast<int>(stripe));
    if (!layout.ok()) return {};
    layout->VisitSpread([&](int rank, size_t document, int64_t first, int64_t count) {
      const auto all = static_cast<double>(tokens_[document]), n = static_cast<double>(count);
      const auto before = static_cast<double>(first - firsts_[document]);
      const auto attention = static_cast<double>(attention_[document]);
      times[rank] += (static_cast<double>(microseconds_[document]) - attention) * n / all +
                     attention * n * (2 * before + n) / (all * all);
    });
    return times;
  }

  const std::span<const int64_t> tokens_;
  const int ranks_;
  const int64_t share_;                // tokens of a rank
  std::vector<int64_t> firsts_;        // tokens before each document
  std::vector<int64_t> microseconds_;  // of each document
  std::vector<int64_t> attention_;     // what of them is attention's
  int64_t all_microseconds_ = 0;
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
