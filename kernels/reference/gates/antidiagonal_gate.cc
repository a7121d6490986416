#include "kernels/reference/gates/antidiagonal_gate.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/reference/math/panels.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {

namespace {

// The keys of one KV head as right-hand matrices: columns are groups, and the i-th matrix holds
// from each the key that the i-th query of a group meets, [stride][panels of groups][d][panel].
std::vector<float> PackGroups(const TileMath& math, const TokenMajor<const float>& k, int head,
                              int stride) {
  const int groups = static_cast<int>(k.tokens / stride);
  const int64_t matrix = RoundUp(groups, math.panel) * k.head_dim;
  std::vector<float> packed(stride * matrix);
  for (int i = 0; i < stride; ++i) {
    PackTransposed(k.data + (stride - 1 - i) * k.token_stride + head * k.head_stride,
                   stride * k.token_stride, groups, k.head_dim, math.panel,
                   packed.data() + i * matrix);
  }
  return packed;
}

// The masses of one tile's groups of queries.
class TileMasses {
 public:
  TileMasses(const TileMath& math, const TokenMajor<const float>& q,
             const AntidiagonalGateStep& step)
      : math_(math), q_(q), step_(step), width_(step.tile / step.stride) {}

  // Adds to mass[block] what query tile `a` of `head` sees of the blocks, `packed` by
  // PackGroups. logits: memory for a tile's.
  void Add(int head, int64_t a, const std::vector<float>& packed, float* logits,
           std::vector<int64_t>& mass) const {
    const int64_t groups = step_.query_layout.tokens / step_.stride, first_row = a * width_;
    const int64_t choosing = std::min(step_.choosing, q_.tokens);
    const auto rows =
        static_cast<int>(std::min<int64_t>(width_, choosing / step_.stride - first_row));
    if (rows <= 0) return;
    const int64_t last = LastGroup(first_row + rows - 1);
    const int64_t columns = RoundUp(last + 1, math_.panel);
    const int64_t matrix = RoundUp(groups, math_.panel) * q_.head_dim;
    for (int i = 0; i < step_.stride; ++i) {
      math_.gemm(rows, static_cast<int>(columns), q_.head_dim,
                 q_.data + (first_row * step_.stride + i) * q_.token_stride + head * q_.head_stride,
                 step_.stride * q_.token_stride, 1, packed.data() + i * matrix,
                 int64_t{q_.head_dim} * math_.panel, logits, columns, i > 0);
    }
    for (int row = 0; row < rows; ++row) {
      const int64_t start = step_.seen.Begin((first_row + row) * step_.stride) / step_.stride;
      AddRow(logits + row * columns, start, LastGroup(first_row + row), mass);
    }
  }

 private:
  int64_t LastGroup(int64_t row) const {
    return LastGroupOf(step_.seen, step_.query_layout,
                       std::countr_zero(static_cast<uint32_t>(step_.stride)), row);
  }

  // The softmax of groups [start, last], by block.
  void AddRow(const float* logits, int64_t start, int64_t last, std::vector<int64_t>& mass) const {
    const float scale = step_.scale / static_cast<float>(step_.stride);
    float maximum = -std::numeric_limits<float>::infinity();
    for (int64_t b = start; b <= last; ++b) maximum = std::max(maximum, logits[b] * scale);
    std::vector<double> of_block(last / width_ + 1, 0.0);
    for (int64_t b = start; b <= last; ++b) {
      of_block[b / width_] += std::exp(logits[b] * scale - maximum);
    }
    const double sum = std::accumulate(of_block.begin(), of_block.end(), 0.0);
    for (size_t block = 0; block < of_block.size(); ++block) {
      const double share = of_block[block] / sum;
      // What is not a number has no mass: the step's loss will say so.
      if (std::isfinite(share)) mass[block] += std::llrint(std::ldexp(share, kMassBits));
    }
  }

  const TileMath& math_;
  const TokenMajor<const float>& q_;
  const AntidiagonalGateStep& step_;
  const int width_;  // groups of a tile
};

// Sets bits of what a tile of `head` keeps of the blocks that it sees. Returns how many it would
// keep if it were not moved.
int64_t Keep(const std::vector<int64_t>& mass, const SeenBlocks& seen,
             const AntidiagonalGateStep& step, int32_t head, uint32_t* chosen) {
  const int64_t first = seen.first, own = seen.own;
  std::vector<int64_t> others;
  for (int64_t block = first + 1; block <= seen.last; ++block) {
    if (block != own && mass[block] > 0) others.push_back(block);
  }
  if (TiesGoLate(head)) std::ranges::reverse(others);
  std::ranges::stable_sort(others, std::greater<>(), [&](int64_t block) { return mass[block]; });
  const auto take = [&](int64_t block) { chosen[block / 32] |= 1u << block % 32; };
  take(first);
  take(own);
  const int64_t total =
      std::accumulate(mass.begin() + first, mass.begin() + seen.last + 1, int64_t{0});
  const int64_t forced = first == own ? 1 : 2;
  const int64_t of_forced = first == own ? mass[own] : mass[first] + mass[own];
  // Takes others from the heaviest on until they are `most` or hold `target` with the forced ones.
  int64_t held = of_forced;
  const auto count_up_to = [&](int64_t most, int64_t target) {
    int64_t count = 0;
    for (held = of_forced; count < std::min(most, std::ssize(others)) && held < target; ++count) {
      held += mass[others[count]];
    }
    return count;
  };
  const int32_t most = MostUnforced(step.density, HalvesOf(step.head_halves, head), seen.count(),
                                    static_cast<int32_t>(forced));
  int64_t count = count_up_to(most, MassTarget(total, step.threshold));
  const int64_t before = count;
  if (step.move.factor != nullptr) {
    const int64_t least = HeldMass(held, total, step.move.tolerance);
    const uint32_t place = MovePlace(own, head);
    count = count_up_to(MovedCount(forced + before, *step.move.factor, place) - forced,
                        std::numeric_limits<int64_t>::max());
    if (count < before && held < least) count = count_up_to(before, least);
  }
  for (int64_t i = 0; i < count; ++i) take(others[i]);
  return forced + before;
}

}  // namespace

void ChooseByAntidiagonals(Engine& engine, const TokenMajor<const float>& q,
                           const TokenMajor<const float>& k, const AntidiagonalGateStep& step) {
  const TileMath& math = engine.math();
  const int64_t query_tiles = TileCount(q.tokens, step.tile);
  const int64_t blocks = TileCount(step.query_layout.tokens, step.tile);
  const int32_t words = BlockWords(static_cast<int32_t>(blocks));
  const int64_t logits = step.tile / step.stride * RoundUp(k.tokens / step.stride + 1, math.panel);
  std::fill_n(step.chosen, q.heads * query_tiles * words, 0u);
  const TileMasses masses(math, q, step);
  std::atomic<int64_t> work_before = 0;
  for (int kv_head = 0; kv_head < k.heads; ++kv_head) {
    const std::vector<float> packed = PackGroups(math, k, kv_head, step.stride);
    const int group = q.heads / k.heads;
    engine.pool().For(group * query_tiles, [&](int64_t task, int worker) {
      const int head = kv_head * group + static_cast<int>(task / query_tiles);
      const int64_t a = task % query_tiles;
      std::vector<int64_t> mass(blocks, 0);
      masses.Add(head, a, packed, engine.worker_scratch(worker).Reserve(logits), mass);
      const SeenBlocks seen = SeenBlocksOf(step.seen, step.query_layout, a, step.tile, step.tile);
      work_before += Keep(mass, seen, step, head, step.chosen + (head * query_tiles + a) * words);
    });
  }
  if (step.move.work_before != nullptr) *step.move.work_before = work_before;
}

}  // namespace ringleader::kernels::reference
