#include "patterns/probe.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include "base/numbers/split_mix.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {
namespace {

// Where the document of `position` starts.
int64_t StartOf(const SequenceDocuments* documents, int64_t position) {
  if (documents == nullptr) return 0;
  return *std::prev(std::upper_bound(documents->firsts.begin(), documents->firsts.end(), position));
}

// Queries that a probe may take, by their order: those before the padding, but of short documents
// (attention.dense_below), which attend to all of their tokens, only where there are no others.
class Probed {
 public:
  Probed(const AttentionOptions& options, int64_t tokens, const SequenceDocuments* documents) {
    if (documents == nullptr) {
      Add(0, tokens);
      return;
    }
    const std::vector<int64_t>& firsts = documents->firsts;
    for (size_t i = 0; i < firsts.size(); ++i) {
      const int64_t end = i + 1 < firsts.size() ? firsts[i + 1] : documents->tokens;
      if (end - firsts[i] >= options.dense_below) Add(firsts[i], std::min(end, documents->content));
    }
    if (count_ == 0) Add(0, documents->content);
  }
  int64_t count() const { return count_; }
  int64_t Position(int64_t i) const {
    const auto part = std::prev(std::ranges::upper_bound(parts_, i, {}, &Part::before));
    return part->first + i - part->before;
  }

 private:
  struct Part {
    int64_t first, before;  // its first query, and how many come before that
  };
  void Add(int64_t first, int64_t end) {
    if (first >= end) return;
    parts_.push_back({first, count_});
    count_ += end - first;
  }
  std::vector<Part> parts_;
  int64_t count_ = 0;
};

// The queries that choose for others.
class Choosing {
 public:
  Choosing(const AttentionOptions& options, int64_t tokens, const SequenceDocuments* documents) {
    if (options.pattern == Pattern::kVerticalSlash) {
      const std::vector<int64_t> estimate =
          ChooseEstimateQueries(tokens, options.estimate_queries,
                                options.estimate_at == EstimateAt::kSpread, documents)
              .positions;
      estimate_.insert(estimate.begin(), estimate.end());
    }
    const bool firsts_choose = options.selection == Selection::kCausal &&
                               DefinitionOf(options.pattern).causal_choice == CausalChoice::kOnAsk;
    if (firsts_choose) tile_ = options.tile;
  }
  bool Contains(int64_t position) const {
    return estimate_.contains(position) || (tile_ > 0 && position % tile_ == 0);
  }

 private:
  std::set<int64_t> estimate_;
  int64_t tile_ = 0;  // of which the first query chooses for all; 0: none
};

// Of so many queries one at most is probed where the others choose without it.
constexpr int64_t kOneIn = 4;

// The numbers, among `probed`, of the queries that `step` probes.
std::set<int64_t> ChooseNumbers(const AttentionOptions& options, const Probed& probed,
                                int64_t tokens, uint64_t step, const SequenceDocuments* documents) {
  const Choosing choosing(options, tokens, documents);
  const int64_t of = probed.count();
  const bool others_choose = SilenceOf(options).has_value();
  const int64_t allowed = others_choose ? (of + kOneIn - 1) / kOneIn : of;
  const int64_t count = std::min(allowed, kProbeQueries);
  std::set<int64_t> numbers;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * of / count, end = (i + 1) * of / count;
    const uint64_t draw = SplitMix64(step * kProbeQueries + i);
    int64_t number = begin + static_cast<int64_t>(draw % static_cast<uint64_t>(end - begin));
    const auto is_taken = [&] {
      return numbers.contains(number) || choosing.Contains(probed.Position(number));
    };
    for (int64_t tried = 1; tried < of && is_taken(); ++tried) number = (number + of - 1) % of;
    numbers.insert(number);
  }
  return numbers;
}

EstimateQueries QueriesAt(const std::set<int64_t>& numbers, const Probed& probed,
                          const SequenceDocuments* documents) {
  EstimateQueries queries;
  for (const int64_t number : numbers) {
    queries.positions.push_back(probed.Position(number));
    queries.starts.push_back(StartOf(documents, queries.positions.back()));
  }
  return queries;
}

}  // namespace

bool ProbesAt(const AttentionOptions& options, uint64_t step) {
  const auto every = static_cast<uint64_t>(options.probe_every);
  return step > 0 && every > 0 && (step == 1 || step % every == 0);
}

EstimateQueries ChooseProbeQueries(const AttentionOptions& options, int64_t tokens, uint64_t step,
                                   const SequenceDocuments* documents) {
  const Probed probed(options, tokens, documents);
  return QueriesAt(ChooseNumbers(options, probed, tokens, step, documents), probed, documents);
}

EstimateQueries ChooseHeardQueries(const AttentionOptions& options, int64_t tokens, uint64_t step,
                                   const SequenceDocuments* documents) {
  if (!SilenceOf(options).has_value() || DefinitionOf(options.pattern).counts_recall) return {};
  const Probed probed(options, tokens, documents);
  const std::set<int64_t> silent = ChooseNumbers(options, probed, tokens, step, documents);
  if (std::ssize(silent) == probed.count()) return {};  // a single query
  std::set<int64_t> heard;
  for (int64_t number : silent) {
    while (silent.contains(number)) number = (number + probed.count() - 1) % probed.count();
    heard.insert(number);
  }
  return QueriesAt(heard, probed, documents);
}

std::optional<float> SilenceOf(const AttentionOptions& options) {
  if (options.selection == Selection::kCausal) return std::nullopt;
  return DefinitionOf(options.pattern).silence;
}

}  // namespace ringleader::patterns
