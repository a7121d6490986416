#include "worker/optim/decay_ranges.h"

#include <algorithm>

#include "base/numbers/ceil_div.h"

namespace ringleader::optim {

std::vector<DecayRange> CutByDecay(const model::ParameterLayout& layout, int64_t begin,
                                   int64_t end) {
  constexpr int64_t kAlign = model::ParameterLayout::kAlignment;
  std::vector<DecayRange> matrices;
  for (const model::ParameterSlot& slot : layout.slots) {
    if (!slot.is_matrix()) continue;
    const int64_t slot_end = RoundUp(slot.offset + slot.elements, kAlign);
    if (!matrices.empty() && slot.offset <= matrices.back().end) {
      matrices.back().end = std::max(matrices.back().end, slot_end);
    } else {
      matrices.push_back({slot.offset, slot_end, true});
    }
  }
  std::vector<DecayRange> ranges;
  const auto add = [&](int64_t from, int64_t to, bool decayed) {
    from = std::max(from, begin);
    to = std::min(to, end);
    if (from < to) ranges.push_back({from, to, decayed});
  };
  int64_t at = 0;
  for (const DecayRange& matrix : matrices) {
    add(at, matrix.begin, false);
    add(matrix.begin, matrix.end, true);
    at = matrix.end;
  }
  add(at, end, false);
  return ranges;
}

}  // namespace ringleader::optim
