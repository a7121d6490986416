#include "patterns/probe.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace ringleader::patterns {
namespace {

// SplitMix64: evenly spread numbers from consecutive ones.
uint64_t Mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Where the document of `position` starts.
int64_t StartOf(const SequenceDocuments* documents, int64_t position) {
  if (documents == nullptr) return 0;
  return *std::prev(std::upper_bound(documents->firsts.begin(), documents->firsts.end(), position));
}

}  // namespace

bool ProbesAt(const AttentionOptions& options, uint64_t step) {
  const auto every = static_cast<uint64_t>(options.probe_every);
  return step > 0 && every > 0 && (step == 1 || step % every == 0);
}

EstimateQueries ChooseProbeQueries(const AttentionOptions& options, int64_t tokens, uint64_t step,
                                   const SequenceDocuments* documents) {
  std::set<int64_t> choosing;  // queries
  if (options.pattern == Pattern::kVerticalSlash) {
    const std::vector<int64_t> estimate =
        ChooseEstimateQueries(tokens, options.estimate_queries,
                              options.estimate_at == EstimateAt::kSpread, documents)
            .positions;
    choosing.insert(estimate.begin(), estimate.end());
  }
  const int64_t content = documents == nullptr ? tokens : documents->content;
  const int64_t count = std::min(content, kProbeQueries);
  EstimateQueries probe;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * content / count, end = (i + 1) * content / count;
    const uint64_t draw = Mixed(step * kProbeQueries + i);
    int64_t position = begin + static_cast<int64_t>(draw % static_cast<uint64_t>(end - begin));
    while (choosing.contains(position) && std::ssize(choosing) < content) {
      position = (position + content - 1) % content;
    }
    probe.positions.push_back(position);
  }
  std::sort(probe.positions.begin(), probe.positions.end());
  for (const int64_t position : probe.positions) {
    probe.starts.push_back(StartOf(documents, position));
  }
  return probe;
}

}  // namespace ringleader::patterns
