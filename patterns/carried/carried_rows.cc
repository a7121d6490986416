#include "patterns/carried/carried_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "patterns/index/visible_keys.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {
namespace {

// What queries see, for as long as `sequence` is there.
class Sight {
 public:
  Sight(const AttentionOptions& options, const RingSequence& sequence, const KnownKeys& known)
      : rule_{.mask = options.mask,
              .block = options.mask_block,
              .prefix_ends = sequence.prefix_ends,
              .padding = sequence.padding},
        tokens_(sequence.tokens),
        known_(known),
        blocks_(FixedBlocksOf(options)),
        tile_(options.tile),
        firsts_(sequence.firsts.begin(), sequence.firsts.end()) {
    if (firsts_.empty()) firsts_ = {0};
  }

  // What the queries at [first, last] see within the window.
  std::pair<int64_t, int64_t> Shown(int64_t first, int64_t last) const {
    return {VisibleAt(rule_, tokens_, firsts_, known_.window, first).first,
            VisibleAt(rule_, tokens_, firsts_, known_.window, last).second};
  }
  // Of these the blocks around a tile's own.
  std::pair<int64_t, int64_t> Near(int64_t first, int64_t last) const {
    const auto [begin, end] = Shown(first, last);
    const int64_t own = first / tile_;
    return {std::max(begin, (own - blocks_.local) * tile_),
            std::min(end, (own + blocks_.local + 1) * tile_)};
  }
  // Whether the block at `position` is one that is kept wherever it is seen.
  bool IsLandmark(int64_t position) const {
    const int64_t block = position / tile_;
    if (blocks_.IsLandmark(block)) return true;
    const auto next = std::ranges::upper_bound(firsts_, (block + 1) * tile_ - 1);
    return block - *(next - 1) / tile_ < blocks_.sinks;
  }

  // Calls find with what is seen, and with the landmarks or null.
  template <typename Find>
  auto Ask(const Find& find) const {
    const auto shown = [&](int64_t first, int64_t last) { return Shown(first, last); };
    if (!known_.by_blocks) return find(shown, nullptr);
    const auto holds = [&](int64_t position) { return IsLandmark(position); };
    const ring::Landmarks landmarks = {.seen = shown, .holds = holds};
    return find([&](int64_t first, int64_t last) { return Near(first, last); }, &landmarks);
  }

 private:
  MaskRule rule_;
  int64_t tokens_;
  KnownKeys known_;
  kernels::FixedBlocks blocks_;
  int64_t tile_;
  std::vector<int64_t> firsts_;
};

}  // namespace

std::optional<KnownKeys> KnownKeysOf(const AttentionOptions& options, bool is_dense) {
  const PatternDefinition& definition = DefinitionOf(is_dense ? Pattern::kDense : options.pattern);
  if (definition.known == nullptr) return std::nullopt;
  return definition.known(options);
}

bool CarriesRows(const ring::RingShape& shape) {
  return shape.ranks() > 1 && shape.ranks() <= kMostRanksOfRows &&
         shape.kind != ring::RingKind::kAllGather;
}

ring::TravellingRows FindCarriedRows(const AttentionOptions& options,
                                     const ring::RingSchedule& schedule,
                                     const RingSequence& sequence, const KnownKeys& known) {
  const kernels::ShardLayout layout =
      LayoutOf(options, schedule.ranks, schedule.rank, sequence.tokens / schedule.ranks);
  if (!sequence.listed.empty()) {
    return ring::FindTravellingRows(schedule, layout, options.tile, sequence.listed);
  }
  const Sight sight(options, sequence, known);
  return sight.Ask([&](ring::SeenPositions seen, const ring::Landmarks* landmarks) {
    return ring::FindTravellingRows(schedule, layout, sequence.held, options.tile, seen, landmarks);
  });
}

ring::HopCounts CountCarriedRows(const AttentionOptions& options, const ring::RingShape& shape,
                                 bool is_backward, const RingSequence& sequence,
                                 const KnownKeys& known, double most_packed) {
  const kernels::ShardLayout layout =
      LayoutOf(options, shape.ranks(), 0, sequence.tokens / shape.ranks());
  const Sight sight(options, sequence, known);
  return sight.Ask([&](ring::SeenPositions seen, const ring::Landmarks* landmarks) {
    return ring::CountTravellingRows(shape, is_backward, layout, sequence.held, options.tile,
                                     most_packed, seen, landmarks);
  });
}

}  // namespace ringleader::patterns
