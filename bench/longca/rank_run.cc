#include "bench/longca/rank_run.h"

#include <algorithm>
#include <string>

namespace ringleader::bench {

std::vector<Cell> EmptyCells(kernels::MaskKind mask, const PatternChoice& choice,
                             const Scheme& scheme, int64_t tokens) {
  std::vector<Cell> cells;
  for (const char* direction : {"forward", "backward"}) {
    cells.push_back({.mask = std::string(MaskName(mask)),
                     .choice = choice.name(),
                     .scheme = scheme.name(),
                     .direction = direction,
                     .tokens = tokens,
                     .ranks = scheme.ranks()});
  }
  return cells;
}

void FillFrom(std::span<const RankRun> runs, Cell* cell) {
  const bool is_forward = cell->direction == "forward";
  std::vector<std::vector<double>> times;
  double most_tiles = 0, tiles = 0, plan_ms = 0;
  uint64_t sent = 0, whole = 0;
  for (const RankRun& run : runs) {
    times.push_back(is_forward ? run.forward_ms : run.backward_ms);
    const attention::RingBytes& bytes = is_forward ? run.forward_bytes : run.backward_bytes;
    sent = std::max(sent, bytes.sent);
    whole = std::max(whole, bytes.whole);
    most_tiles = std::max(most_tiles, run.tiles);
    tiles += run.tiles;
    plan_ms = std::max(plan_ms, run.plan_ms);
  }
  SetTimes(times, cell);
  cell->plan_ms = is_forward ? plan_ms : 0;  // backward uses forward's
  cell->mib_moved = static_cast<double>(sent) / 1048576;
  cell->mib_whole = static_cast<double>(whole) / 1048576;
  cell->imbalance = most_tiles * static_cast<double>(runs.size()) / tiles;
}

}  // namespace ringleader::bench
