#include "coordinator/planner/simulate/sample_pattern.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

namespace ringleader::planner {
namespace {

// <random>'s distributions differ between libraries; plans must not.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  double Unit() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }
  int64_t Below(int64_t n) { return static_cast<int64_t>(Unit() * static_cast<double>(n)); }

 private:
  std::mt19937_64 engine_;
};

ring::HeadPattern Band(int64_t blocks, int64_t width) {
  ring::HeadPattern head;
  head.diagonals.assign(blocks, 0);
  std::fill_n(head.diagonals.begin(), std::min(blocks, width), 1);
  return head;
}

// Attention mass falls off about exponentially over sorted diagonals and columns, so the number
// that covers mass p grows like -ln(1 - p). 1 at p = 0.9.
double Strength(double mass) {
  return std::log(1 - std::min(mass, 0.999)) / std::log(0.1);
}

ring::HeadPattern VerticalSlash(const v1::AttentionSpec& attention, int64_t blocks,
                                const PatternHints& hints, Random* random) {
  const bool top_k = attention.select() == v1::AttentionSpec::TOP_K;
  const auto tile = static_cast<int64_t>(attention.tile());
  const int64_t tokens = blocks * tile;

  // 2 to 10 % of the diagonals, and 64 to 2048 columns at half a million tokens.
  double slashes = (0.02 + 0.08 * random->Unit()) * static_cast<double>(blocks) *
                   Strength(attention.slash_mass());
  double verticals = (64 + 1984 * random->Unit()) * Strength(attention.vertical_mass()) *
                     std::sqrt(static_cast<double>(tokens) / 524288.0);
  if (hints.slashes > 0) slashes = hints.slashes * (0.7 + 0.6 * random->Unit());
  if (hints.verticals > 0) verticals = hints.verticals * (0.7 + 0.6 * random->Unit());
  if (top_k) slashes = attention.max_slashes();
  if (top_k) verticals = attention.max_verticals();
  const int64_t local = 1 + attention.local_blocks();
  const auto wanted =
      std::clamp<int64_t>(std::llround(slashes), std::min(local, blocks),
                          std::min<int64_t>(blocks, local + attention.max_slashes()));

  // A third of them next to the diagonal, the rest in clusters that thin out with distance.
  ring::HeadPattern head = Band(blocks, std::max(local, wanted / 3));
  int64_t set = std::count(head.diagonals.begin(), head.diagonals.end(), 1);
  constexpr int64_t kWidths[] = {1, 1, 1, 2, 4, 8};
  while (set < wanted) {
    const double u = random->Unit();
    auto at = static_cast<int64_t>(static_cast<double>(blocks) * u * u);
    for (int64_t width = kWidths[random->Below(std::size(kWidths))];
         width > 0 && at < blocks && set < wanted; --width, ++at) {
      set += head.diagonals[at] == 0;
      head.diagonals[at] = 1;
    }
  }

  head.columns_in_block.assign(blocks, 0.0);
  for (int64_t i = 0; i < std::min<int64_t>(attention.sink_tokens(), tokens); ++i) {
    head.columns_in_block[i / tile] += 1;
  }
  const auto columns =
      std::min({std::llround(verticals), static_cast<long long>(attention.max_verticals()),
                static_cast<long long>(tokens)});
  for (long long i = 0; i < columns; ++i) head.columns_in_block[random->Below(blocks)] += 1;
  for (double& count : head.columns_in_block) count = std::min(count, static_cast<double>(tile));
  return head;
}

ring::HeadPattern BlockTopK(const v1::AttentionSpec& attention, int64_t blocks, Random* random) {
  const auto span = std::max<int64_t>(1, attention.block_size() / std::max(1u, attention.tile()));
  const int64_t groups = (blocks + span - 1) / span;
  std::vector<int64_t> favourites(std::min(groups, int64_t{4} * attention.topk_blocks()));
  for (int64_t& favourite : favourites) favourite = random->Below(groups);

  ring::HeadPattern head;
  head.row_offsets.reserve(blocks + 1);
  head.row_offsets.push_back(0);
  for (int64_t q = 0; q < blocks; ++q) {
    const int64_t own = q / span;
    std::set<int64_t> chosen;
    if (own <= static_cast<int64_t>(attention.topk_blocks())) {
      for (int64_t g = 0; g < own; ++g) chosen.insert(g);
    }
    while (static_cast<int64_t>(chosen.size()) < std::min<int64_t>(own, attention.topk_blocks())) {
      int64_t g = random->Unit() < 0.5 ? favourites[random->Below(std::size(favourites))]
                                       : random->Below(own);
      if (g >= own) g = random->Below(own);
      chosen.insert(g);
    }
    for (const int64_t g : chosen) {
      for (int64_t k = g * span; k < (g + 1) * span; ++k) {
        head.columns.push_back(static_cast<int32_t>(k));
      }
    }
    for (int64_t k = own * span; k <= q; ++k) head.columns.push_back(static_cast<int32_t>(k));
    head.row_offsets.push_back(static_cast<int64_t>(head.columns.size()));
  }
  return head;
}

}  // namespace

std::vector<ring::HeadPattern> SampleLayer(const v1::AttentionSpec& attention, bool dense,
                                           int64_t blocks, int heads, const PatternHints& hints,
                                           uint64_t seed) {
  if (dense || attention.pattern() == v1::AttentionSpec::DENSE) return {Band(blocks, blocks)};
  if (attention.pattern() == v1::AttentionSpec::SLIDING_WINDOW) {
    // The nearest tokens of two blocks d apart lie (d - 1) tiles and one token apart.
    const int64_t width = (attention.window() + attention.tile() - 2) / attention.tile() + 1;
    return {Band(blocks, width)};
  }
  Random random(seed);
  std::vector<ring::HeadPattern> sample;
  sample.reserve(heads);
  for (int h = 0; h < heads; ++h) {
    sample.push_back(attention.pattern() == v1::AttentionSpec::BLOCK_TOPK
                         ? BlockTopK(attention, blocks, &random)
                         : VerticalSlash(attention, blocks, hints, &random));
  }
  return sample;
}

}  // namespace ringleader::planner
