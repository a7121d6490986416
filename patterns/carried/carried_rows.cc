#include "patterns/carried/carried_rows.h"

#include <utility>
#include <vector>

#include "patterns/index/visible_keys.h"

namespace ringleader::patterns {
namespace {

// What queries see, for as long as `sequence` is there.
class Sight {
 public:
  Sight(const AttentionOptions& options, const RingSequence& sequence, int64_t window)
      : rule_{.mask = options.mask,
              .block = options.mask_block,
              .prefix_ends = sequence.prefix_ends,
              .padding = sequence.padding},
        tokens_(sequence.tokens),
        window_(window),
        firsts_(sequence.firsts.begin(), sequence.firsts.end()) {
    if (firsts_.empty()) firsts_ = {0};
  }

  std::pair<int64_t, int64_t> operator()(int64_t first, int64_t last) const {
    return {VisibleAt(rule_, tokens_, firsts_, window_, first).first,
            VisibleAt(rule_, tokens_, firsts_, window_, last).second};
  }

 private:
  MaskRule rule_;
  int64_t tokens_, window_;
  std::vector<int64_t> firsts_;
};

}  // namespace

std::optional<int64_t> KnownWindow(const AttentionOptions& options, bool is_dense) {
  if (is_dense || options.pattern == Pattern::kDense) return 0;
  if (options.pattern == Pattern::kSlidingWindow) return options.window;
  return std::nullopt;
}

bool CarriesRows(const ring::RingShape& shape) {
  return shape.ranks() > 1 && shape.ranks() <= kMostRanksOfRows &&
         shape.kind != ring::RingKind::kAllGather;
}

ring::TravellingRows FindCarriedRows(const AttentionOptions& options,
                                     const ring::RingSchedule& schedule,
                                     const RingSequence& sequence, int64_t window) {
  const kernels::ShardLayout layout =
      LayoutOf(options, schedule.ranks, schedule.rank, sequence.tokens / schedule.ranks);
  return ring::FindTravellingRows(schedule, layout, sequence.held, options.tile,
                                  Sight(options, sequence, window));
}

ring::HopCounts CountCarriedRows(const AttentionOptions& options, const ring::RingShape& shape,
                                 bool is_backward, const RingSequence& sequence, int64_t window,
                                 double most_packed) {
  const kernels::ShardLayout layout =
      LayoutOf(options, shape.ranks(), 0, sequence.tokens / shape.ranks());
  return ring::CountTravellingRows(shape, is_backward, layout, sequence.held, options.tile,
                                   most_packed, Sight(options, sequence, window));
}

}  // namespace ringleader::patterns
