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

// Which documents are spread whether or not a rank has room for them: [documents].
using Chosen = std::vector<bool>;

class DocumentDealer {
 public:
  DocumentDealer(std::span<const int64_t> tokens, int ranks, const SampleWeights& weights)
      : tokens_(tokens),
        ranks_(ranks),
        share_(std::accumulate(tokens.begin(), tokens.end(), int64_t{0}) / ranks),
        by_length_(tokens.size()) {
    for (const int64_t length : tokens) {
      travel_.push_back(weights.TravelMicroseconds(static_cast<uint64_t>(length)));
      all_travel_ += travel_.back();
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
    DocumentDealing whole = SpreadAtLeast(Chosen(tokens_.size()), share_, stripe);
    const bool none_is_spread = NoneIsSpread(whole.holders);
    if (none_is_spread && IsGood(whole)) return whole;
    DocumentDealing best = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    Time(stripe, &best);
    if (none_is_spread && Cost(whole) < Cost(best)) best = std::move(whole);
    if (share_ <= stripe) return best;
    // Otherwise every rank holds at least one stripe of those that are spread.
    return Search(std::move(best), [&](const Chosen& chosen) {
      DocumentDealing dealing = SpreadAtLeast(chosen, share_ - stripe, stripe);
      if (NoneIsSpread(dealing.holders)) {
        dealing.imbalance = std::numeric_limits<double>::infinity();
      }
      return dealing;
    });
  }

  DocumentDealing DealApart(int64_t stripe) const {
    return Search(SpreadApart(Chosen(tokens_.size()), stripe),
                  [&](const Chosen& chosen) { return SpreadApart(chosen, stripe); });
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

  // What the ranks that share the sequence take, in microseconds: the one that takes longest, and
  // what travels, of which nothing is counted as hidden. Tokens for which memory is not planned
  // count a thousandfold.
  double Cost(const DocumentDealing& dealing) const {
    const double crowding = all_travel_ > 0 ? std::max(0.0, dealing.token_imbalance - kEven) : 0;
    return (dealing.imbalance + 1e3 * crowding) * Mean() + dealing.travel_microseconds;
  }
  double Mean() const { return static_cast<double>(all_microseconds_) / ranks_; }

  // Whether no other dealing is worth a look.
  bool IsGood(const DocumentDealing& dealing) const {
    return all_travel_ > 0 ? Cost(dealing) <= kAlike * Mean() : dealing.imbalance <= kEven;
  }

  // The best of `best` and what `deal` makes of documents to be spread: of the longest, ever more
  // of them; and where it is known what travelling takes, of what is found from the best of those
  // and from none.
  template <typename Deal>
  DocumentDealing Search(DocumentDealing best, const Deal& deal) const {
    Chosen chosen(tokens_.size()), best_chosen = chosen;
    double travel = 0;
    for (size_t spread = 0, next = 0; next <= tokens_.size(); next += 1 + next / 8) {
      for (; spread < next; ++spread) {
        chosen[by_length_[spread]] = true;
        travel += travel_[by_length_[spread]];
      }
      if (travel > 0 && Mean() + travel >= Cost(best)) break;
      DocumentDealing dealing = deal(chosen);
      // Where nothing is known of travelling, fewer are as good as more that are no more than even.
      const bool is_enough = IsGood(dealing);
      if (Cost(dealing) < Cost(best) || (is_enough && all_travel_ == 0)) {
        best = std::move(dealing);
        best_chosen = chosen;
      }
      if (is_enough) return best;
    }
    if (all_travel_ == 0) return best;
    for (const Chosen& start : {best_chosen, Chosen(tokens_.size())}) {
      DocumentDealing dealing = Improve(start, deal);
      if (Cost(dealing) < Cost(best)) best = std::move(dealing);
      if (IsGood(best)) break;
    }
    return best;
  }

  // Spreads one document more or one less, the one with which most is gained, as long as anything
  // is and there is time.
  template <typename Deal>
  DocumentDealing Improve(Chosen chosen, const Deal& deal) const {
    constexpr size_t kMostTries = 96, kFewestTries = 8, kMostWork = 65536;
    DocumentDealing best = deal(chosen);
    const size_t work = tokens_.size() + 64 * static_cast<size_t>(ranks_);
    size_t tries = std::clamp(kMostWork / work, kFewestTries, kMostTries);
    for (;;) {
      std::optional<size_t> changed;
      for (size_t i = 0; i < by_length_.size() && tries > 0; ++i, --tries) {
        chosen[by_length_[i]].flip();
        DocumentDealing dealing = deal(chosen);
        chosen[by_length_[i]].flip();
        if (Cost(dealing) >= Cost(best)) continue;
        best = std::move(dealing);
        changed = by_length_[i];
      }
      if (!changed.has_value() || IsGood(best)) return best;
      chosen[*changed].flip();
    }
  }

  static bool NoneIsSpread(const std::vector<std::optional<int>>& holders) {
    return std::ranges::all_of(holders, [](const auto& holder) { return holder.has_value(); });
  }

  // Spreads the chosen ones, and those that find no room in `room` tokens a rank. Whole ones are
  // placed as if a token of spread ones took as long on every rank; how far ranks are off that
  // then counts when they are placed again.
  DocumentDealing SpreadAtLeast(const Chosen& chosen, int64_t room, int64_t stripe) const {
    constexpr int kRounds = 6;
    DocumentDealing best = {.holders = {}, .imbalance = std::numeric_limits<double>::infinity()};
    std::vector<double> ahead(ranks_, 0);  // how much more a rank takes than placing takes it for
    for (int round = 0; round < kRounds && best.imbalance > kAlike; ++round) {
      std::vector<double> load = ahead;
      DocumentDealing dealing = PlaceWhole(chosen, room, load);
      const std::vector<double> times = Time(stripe, &dealing);
      if (times.empty()) break;
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
  DocumentDealing PlaceWhole(const Chosen& chosen, int64_t room, std::vector<double>& load) const {
    DocumentDealing dealing = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    int64_t spread_tokens = 0, spread_time = 0;
    for (size_t i = 0; i < chosen.size(); ++i) {
      if (!chosen[i]) continue;
      spread_tokens += tokens_[i];
      spread_time += microseconds_[i];
    }
    // A whole document keeps as many tokens of spread ones off its rank.
    std::vector<Placed> added;
    for (const size_t document : by_length_) {
      if (chosen[document]) continue;
      const double saved = spread_tokens == 0 ? 0
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

  // Spreads the chosen ones. The others go to the rank that ends first of those with room, or
  // else to that with most room.
  DocumentDealing SpreadApart(const Chosen& chosen, int64_t stripe) const {
    DocumentDealing dealing = {.holders = std::vector<std::optional<int>>(tokens_.size())};
    std::vector<double> load(ranks_, 0);
    std::vector<int64_t> held(ranks_, 0);
    const auto add = [&](int rank, size_t document, int64_t count) {
      held[rank] += count;
      load[rank] += static_cast<double>(microseconds_[document]) * static_cast<double>(count) /
                    static_cast<double>(tokens_[document]);
    };
    const auto room = static_cast<int64_t>(kEven * static_cast<double>(share_));
    for (const size_t document : by_length_) {
      const int64_t length = tokens_[document];
      if (chosen[document]) {
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
    dealing.token_imbalance = MostOverMean(held);
    dealing.imbalance = std::max(MostOverMean(load), dealing.token_imbalance);
    dealing.travel_microseconds = TravelOf(dealing.holders);
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

  // What each rank takes, [ranks], which the dealing then has, too, with what travels; empty, and
  // nothing is set, if documents cannot lie so. A token of a spread document takes as much of its
  // attention as it has keys, and of the rest as much as any other.
  std::vector<double> Time(int64_t stripe, DocumentDealing* dealing) const {
    const std::vector<std::optional<int>>& holders = dealing->holders;
    std::vector<double> times(ranks_, 0);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (holders[i].has_value()) times[*holders[i]] += static_cast<double>(microseconds_[i]);
    }
    if (!NoneIsSpread(holders)) {
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
      std::vector<int64_t> spread(ranks_);
      for (int rank = 0; rank < ranks_; ++rank) spread[rank] = layout->spread_tokens()[rank];
      dealing->travel_microseconds = TravelOf(holders) * MostOverMean(spread);
    }
    dealing->imbalance = MostOverMean(times);
    return times;
  }

  // Of spread documents, if ranks hold as much of them.
  double TravelOf(const std::vector<std::optional<int>>& holders) const {
    double travel = 0;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (!holders[i].has_value()) travel += travel_[i];
    }
    return travel;
  }

  const std::span<const int64_t> tokens_;
  const int ranks_;
  const int64_t share_;                // tokens of a rank
  std::vector<int64_t> firsts_;        // tokens before each document
  std::vector<int64_t> microseconds_;  // of each document
  std::vector<int64_t> attention_;     // what of them is attention's
  std::vector<double> travel_;         // what each takes to travel where it is spread
  int64_t all_microseconds_ = 0;
  double all_travel_ = 0;
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
