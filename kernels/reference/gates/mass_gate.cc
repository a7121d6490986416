#include "kernels/reference/gates/mass_gate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/reference/gates/moved_keep.h"
#include "kernels/reference/math/panels.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {

namespace {

constexpr float kLog2E = std::numbers::log2e_v<float>;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int kMaxTile = 128;

// The exact logits of tiles of queries, in units of log 2, block of keys by block.
class ExactLogits {
 public:
  using RowSums = std::array<float, kMaxTile>;

  ExactLogits(Engine& engine, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
              const BlockMassStep& of)
      : engine_(engine),
        q_(q),
        k_(k),
        of_(of),
        stride_(RoundUp(of.tile, engine.math().panel)),
        tiles_(TileCount(q.tokens, of.tile)) {}

  // Calls take(head, tile, block, logits) for each block that holds a key which the tile of queries
  // sees, by ascending block; hidden pairs are -infinity. Tiles come in any order, on any thread.
  // logits: [rows(tile), stride()], of which the first columns() are set.
  void ForEach(absl::FunctionRef<void(int head, int64_t tile, int64_t block, float* logits)> take) {
    const TileMath& math = engine_.math();
    const int group = q_.heads / k_.heads;
    for (int kv_head = 0; kv_head < k_.heads; ++kv_head) {
      std::vector<float> packed(TileCount(k_.tokens, of_.tile) * stride_ * k_.head_dim);
      for (int64_t key = 0; key < k_.tokens; key += of_.tile) {
        PackTransposed(k_.data + key * k_.token_stride + kv_head * k_.head_stride, k_.token_stride,
                       static_cast<int>(std::min<int64_t>(of_.tile, k_.tokens - key)), k_.head_dim,
                       math.panel, packed.data() + key / of_.tile * stride_ * k_.head_dim);
      }
      engine_.pool().For(group * tiles_, [&](int64_t task, int worker) {
        const int head = kv_head * group + static_cast<int>(task / tiles_);
        const int64_t tile = task % tiles_, begin = tile * of_.tile;
        float* const logits = engine_.worker_scratch(worker).Reserve(of_.tile * stride_);
        const SeenBlocks seen = SeenBlocksOf(of_.seen, of_.query_layout, tile, of_.tile, of_.tile);
        for (int64_t block = seen.first; block <= seen.last; ++block) {
          math.gemm(rows(tile), static_cast<int>(stride_), q_.head_dim,
                    q_.data + begin * q_.token_stride + head * q_.head_stride, q_.token_stride, 1,
                    packed.data() + block * stride_ * k_.head_dim,
                    int64_t{k_.head_dim} * math.panel, logits, stride_, false);
          Mask(tile, block, logits);
          take(head, tile, block, logits);
        }
      });
    }
  }

  int rows(int64_t tile) const {
    return static_cast<int>(std::min<int64_t>(of_.tile, q_.tokens - tile * of_.tile));
  }
  int64_t tiles() const { return tiles_; }
  // Logits from one row to the next: whole panels.
  int64_t stride() const { return stride_; }

 private:
  void Mask(int64_t tile, int64_t block, float* logits) const {
    const int64_t key = block * of_.tile;
    for (int row = 0; row < rows(tile); ++row) {
      const int64_t query = tile * of_.tile + row;
      const int64_t start = of_.seen.Begin(query), last = of_.seen.Last(of_.query_layout, query);
      float* const of_row = logits + row * stride_;
      for (int64_t column = 0; column < stride_; ++column) {
        const bool is_seen = column < of_.tile && key + column >= start && key + column <= last;
        of_row[column] = is_seen ? of_row[column] * of_.scale * kLog2E : kNegativeInfinity;
      }
    }
  }

  Engine& engine_;
  const TokenMajor<const float>&q_, &k_;
  const BlockMassStep& of_;
  const int64_t stride_, tiles_;
};

// The log-sum-exp of each query, in base 2: [heads, n].
std::vector<float> RowLse(ExactLogits& logits, const TileMath& math,
                          const TokenMajor<const float>& q, int32_t tile) {
  std::vector<float> lse(q.heads * q.tokens, kNegativeInfinity);  // maxima, until the end
  std::vector<float> sums(lse.size(), 0.0f);                      // of exp2(logit - maximum)
  logits.ForEach([&](int head, int64_t a, int64_t /*block*/, float* of_block) {
    const int rows = logits.rows(a), columns = static_cast<int>(logits.stride());
    const int64_t first = head * q.tokens + a * tile;
    float* const maxima = lse.data() + first;
    std::array<float, kMaxTile> before, shift, parts;
    std::copy_n(maxima, rows, before.data());
    math.row_maximum(rows, columns, of_block, logits.stride(), maxima);
    for (int row = 0; row < rows; ++row) {
      shift[row] = maxima[row] == kNegativeInfinity ? 0.0f : maxima[row];
    }
    math.exp2_row_sums(rows, columns, of_block, logits.stride(), shift.data(), parts.data());
    for (int row = 0; row < rows; ++row) {
      float& sum = sums[first + row];
      sum = sum * std::exp2(before[row] - shift[row]) + parts[row];
    }
  });
  for (size_t row = 0; row < sums.size(); ++row) lse[row] += std::log2(sums[row]);
  return lse;
}

}  // namespace

void BlockMass(Engine& engine, const TokenMajor<const float>& q, const TokenMajor<const float>& k,
               const BlockMassStep& step) {
  const TileMath& math = engine.math();
  const int64_t blocks = TileCount(step.query_layout.tokens, step.tile);
  ExactLogits logits(engine, q, k, step);
  const std::vector<float> lse = RowLse(logits, math, q, step.tile);
  std::fill_n(step.mass, q.heads * logits.tiles() * blocks, 0);
  logits.ForEach([&](int head, int64_t tile, int64_t block, float* of_block) {
    const int rows = logits.rows(tile);
    std::array<float, kMaxTile> shares;
    math.exp2_row_sums(rows, static_cast<int>(logits.stride()), of_block, logits.stride(),
                       lse.data() + head * q.tokens + tile * step.tile, shares.data());
    double mass = 0.0;
    for (int row = 0; row < rows; ++row) {
      if (std::isfinite(shares[row])) mass += shares[row];
    }
    step.mass[(head * logits.tiles() + tile) * blocks + block] =
        static_cast<int32_t>(std::llrint(std::ldexp(mass, kMassBits)));
  });
}

void SelectBlocksByMass(Engine& engine, const MassGateStep& step) {
  const ShardLayout& layout = step.query_layout;
  const int64_t tiles = TileCount(layout.local_tokens(), step.tile),
                blocks = TileCount(layout.tokens, step.tile);
  const int32_t words = BlockWords(static_cast<int32_t>(blocks));
  std::fill_n(step.chosen, step.heads * tiles * words, 0u);
  engine.pool().For(step.heads, [&](int64_t head, int) {
    step.kept[head] = step.total[head] = 0;
    std::vector<int64_t> order;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = head * tiles + tile, token = tile * step.tile;
      const int32_t* const mass = step.mass + row * blocks;
      const bool counts = layout.Position(token) < step.content;
      const SeenBlocks seen = SeenBlocksOf(step.seen, layout, tile, step.tile, step.tile);
      order.clear();
      for (int64_t block = seen.first; block <= seen.last; ++block) {
        if (block != seen.own) order.push_back(block);
      }
      if (TiesGoLate(static_cast<int32_t>(head))) std::ranges::reverse(order);
      std::ranges::stable_sort(order, std::greater<>(), [&](int64_t block) { return mass[block]; });
      int64_t keep = BlocksOfShare(step.density[head], seen.count() - 1);
      if (step.move.factor != nullptr) {
        const int64_t moved =
            MovedKeep(keep, std::ssize(order), step.move,
                      MovePlace(layout.Position(token) / step.tile, static_cast<int32_t>(head)));
        std::vector<int64_t> masses;
        masses.reserve(order.size());
        for (const int64_t block : order) masses.push_back(mass[block]);
        keep = HeldKeep(std::move(masses), keep, moved, mass[seen.own], step.move.tolerance);
      }
      order.resize(keep);
      order.push_back(seen.own);
      for (const int64_t block : order) {
        step.chosen[row * words + block / 32] |= 1u << block % 32;
        if (counts) step.kept[head] += mass[block];
      }
      if (counts) step.total[head] += std::accumulate(mass, mass + seen.last + 1, int64_t{0});
    }
  });
}

void AdaptDensity(const AdaptDensityStep& step) {
  std::vector<double> recall(step.heads);
  int good = 0;
  for (int head = 0; head < step.heads; ++head) {
    recall[head] = RecallOf(step.kept[head], step.total[head]);
    good += recall[head] > static_cast<double>(step.threshold) ? 1 : 0;
  }
  for (int head = 0; head < step.heads; ++head) {
    int better = 0;
    for (int other = 0; other < step.heads; ++other) {
      better += recall[other] > recall[head] || (recall[other] == recall[head] && other < head);
    }
    step.head_density[head] = AdaptedDensity(step.density, better, good, step.heads);
  }
}

}  // namespace ringleader::kernels::reference
