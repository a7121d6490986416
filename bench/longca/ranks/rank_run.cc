#include "bench/longca/ranks/rank_run.h"

#include <algorithm>
#include <string>

#include "bench/longca/asked_mask.h"
#include "bench/longca/ranks/helper_ranks.h"
#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "ring/band_tiles.h"

namespace ringleader::bench {

bool IsPossible(const Setting& setting, const MaskedSequence& sequence, int tile) {
  const auto& [mask, choice, scheme] = setting;
  const Asked asked = AskFor(sequence, mask);
  if (!choice.GoesWith(asked)) return false;
  if (scheme.has_helpers && !(choice.is_all() && HelpersCan(sequence, mask, scheme.ranks()))) {
    return false;
  }
  const patterns::AttentionOptions options = scheme.Options(asked, choice, sequence.tokens, tile);
  const auto check_length = patterns::DefinitionOf(options.pattern).check_length;
  if (check_length != nullptr && !check_length(options, sequence.tokens).ok()) return false;
  return patterns::CheckHeads(options, kHeads, kKvHeads).ok();
}

std::vector<Cell> EmptyCells(const Setting& setting, int64_t tokens) {
  std::vector<Cell> cells;
  for (const char* direction : {"forward", "backward"}) {
    cells.push_back({.mask = std::string(MaskName(setting.mask)),
                     .choice = setting.choice.name(),
                     .scheme = setting.scheme.name(),
                     .direction = direction,
                     .tokens = tokens,
                     .ranks = setting.scheme.ranks()});
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
    if (!run.plan_ms.empty()) plan_ms = std::max(plan_ms, SpreadOf(run.plan_ms).median);
  }
  SetTimes(times, cell);
  cell->plan_ms = is_forward ? plan_ms : 0;  // backward uses forward's
  cell->mib_moved = static_cast<double>(sent) / 1048576;
  cell->mib_whole = static_cast<double>(whole) / 1048576;
  cell->imbalance = most_tiles * static_cast<double>(runs.size()) / tiles;
}

double ShareOf(std::span<const RankRun> runs, const Setting& setting,
               std::span<const kernels::KeyIntervals> rows, int heads, int tile) {
  const auto tokens = static_cast<int64_t>(rows.size());
  const double shown =
      static_cast<double>(kernels::VisiblePairs(rows)) / static_cast<double>(tokens * tokens);
  if (setting.choice.is_all()) return shown;
  double tiles = 0;
  for (const RankRun& run : runs) tiles += run.tiles;
  const kernels::ShardLayout whole = {.tokens = tokens};
  return shown * tiles /
         static_cast<double>(heads * ring::VisibleTiles(whole, whole, tile, rows.data()));
}

}  // namespace ringleader::bench
