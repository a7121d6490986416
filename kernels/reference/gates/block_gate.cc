#include "kernels/reference/gates/block_gate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/reference/gates/antidiagonal_gate.h"
#include "kernels/reference/gates/key_group_gate.h"
#include "kernels/reference/gates/mass_gate.h"
#include "kernels/reference/gates/moved_keep.h"
#include "kernels/reference/gates/score_dims.h"
#include "kernels/reference/tiles/tile_lists.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {

void TileKeySums(Engine& engine, const TokenMajor<const float>& k, const TileKeySumsStep& step) {
  const int64_t row = int64_t{k.heads} * k.head_dim, tiles = TileCount(k.tokens, step.tile);
  std::fill_n(step.sums, tiles * row, 0.0f);
  engine.pool().For(tiles, [&](int64_t b, int) {
    float* const sum = step.sums + b * row;
    const int64_t begin = b * step.tile, end = std::min(k.tokens, begin + step.tile),
                  position = step.layout.Position(begin);
    const int64_t first = begin + step.counted.First(position, position + end - begin) - position,
                  last = begin + step.counted.End(position, position + end - begin) - position;
    for (int64_t i = first; i < last; ++i) {
      for (int head = 0; head < k.heads; ++head) {
        const float* key = k.data + i * k.token_stride + head * k.head_stride;
        for (int x = 0; x < k.head_dim; ++x) sum[head * k.head_dim + x] += key[x];
      }
    }
  });
}

namespace {

struct BlockKeys {
  const float* sums = nullptr;  // [tiles of the sequence, kv_heads, d]
  MeanKeys counted = {};
  int64_t tokens = 0;
  int tile = 0, block_size = 0;
};

// [kv_heads, blocks, d]. Blocks of the sequence are summed from its tiles in order, however many
// ranks hold them.
std::vector<float> BlockMeans(const BlockKeys& keys, int kv_heads, int d) {
  const int64_t blocks = TileCount(keys.tokens, keys.block_size);
  std::vector<float> means(kv_heads * blocks * d, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * keys.block_size,
                  end = std::min(keys.tokens, begin + keys.block_size),
                  first = keys.counted.First(begin, end), last = keys.counted.End(begin, end);
    for (int head = 0; head < kv_heads; ++head) {
      float* const mean = means.data() + (head * blocks + block) * d;
      for (int64_t b = first / keys.tile; b * keys.tile < last; ++b) {
        const float* sum = keys.sums + (b * kv_heads + head) * d;
        for (int x = 0; x < d; ++x) mean[x] += sum[x];
      }
      for (int x = 0; x < d; ++x) mean[x] /= static_cast<float>(last - first);
    }
  }
  return means;
}

using Scores = std::vector<std::pair<float, int64_t>>;  // (-score, sign * block): the best first

// Scores the blocks that are seen, but its own. `means`: of the head, [blocks, d].
Scores ScoreBlocks(const float* query, const float* means, int d, const SeenBlocks& seen,
                   bool ties_go_late) {
  const int64_t sign = ties_go_late ? -1 : 1;
  Scores scores;
  for (int64_t block = seen.first; block <= seen.last; ++block) {
    if (block == seen.own) continue;
    float score = 0.0f;
    for (int x = 0; x < d; ++x) score += query[x] * means[block * d + x];
    scores.emplace_back(-score, sign * block);
  }
  return scores;
}

// The `keep` best; among equals lower ones, or higher ones where ties go late.
std::vector<int64_t> Best(Scores scores, int64_t keep, bool ties_go_late) {
  const int64_t sign = ties_go_late ? -1 : 1;
  keep = std::clamp<int64_t>(keep, 0, std::ssize(scores));
  std::partial_sort(scores.begin(), scores.begin() + keep, scores.end());
  std::vector<int64_t> best;
  for (int64_t i = 0; i < keep; ++i) best.push_back(sign * scores[i].second);
  return best;
}

// How many a row keeps that would keep `keep`, besides its own block, by the softmax of `scale`
// times the scores.
int64_t KeepOfScores(const Scores& scores, int64_t keep, double scale, const ChoiceMove& move,
                     uint32_t place) {
  keep = std::clamp<int64_t>(keep, 0, std::ssize(scores));
  const int64_t moved = MovedKeep(keep, std::ssize(scores), move, place);
  if (moved >= keep) return moved;
  const double most = -double{std::min_element(scores.begin(), scores.end())->first};
  std::vector<double> weights;
  for (const auto& [negative, unused] : scores) {
    weights.push_back(std::exp((-double{negative} - most) * scale));
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> masses;
  for (const double weight : weights) {
    const double share = weight / sum;
    // What is not a number has no mass: the step's loss will say so.
    masses.push_back(std::isfinite(share) ? std::llrint(std::ldexp(share, kMassBits)) : 0);
  }
  return HeldKeep(std::move(masses), keep, moved, /*own_mass=*/0, move.tolerance);
}

}  // namespace

std::vector<char> SelectBlocks(Engine& engine, const BlockTopKArgs& args) {
  const int d = args.q.head_dim, heads = args.q.heads, group = heads / args.kv_heads;
  const int64_t tokens = args.query_layout.tokens, blocks = TileCount(tokens, args.block_size);
  const int64_t query_tiles = TileCount(args.q.tokens, args.tile);
  const std::vector<float> means = BlockMeans({.sums = args.key_sums,
                                               .counted = args.counted,
                                               .tokens = tokens,
                                               .tile = args.tile,
                                               .block_size = args.block_size},
                                              args.kv_heads, d);

  std::vector<char> selected(heads * query_tiles * blocks, 0);
  engine.pool().For(heads * query_tiles, [&](int64_t task, int) {
    const int head = static_cast<int>(task / query_tiles);
    const int64_t a = task % query_tiles;
    const int64_t end = args.first_query_gates
                            ? a * args.tile + 1
                            : std::min({args.q.tokens, args.choosing, (a + 1) * args.tile});
    std::vector<float> query(d, 0.0f);
    for (int64_t i = a * args.tile; i < end; ++i) {
      const float* row = args.q.data + i * args.q.token_stride + head * args.q.head_stride;
      for (int x = 0; x < d; ++x) query[x] += row[x];
    }
    const SeenBlocks seen =
        SeenBlocksOf(args.seen, args.query_layout, a, args.tile, args.block_size);
    char* const row = selected.data() + task * blocks;
    row[seen.own] = 1;
    const bool late = TiesGoLate(head);
    Scores scores =
        ScoreBlocks(query.data(), means.data() + head / group * blocks * d, d, seen, late);
    int64_t keep = OfHalves(args.topk_blocks, HalvesOf(args.head_halves, head));
    if (args.move.factor != nullptr) {
      const auto queries = static_cast<double>(std::max<int64_t>(end - a * args.tile, 1));
      keep = KeepOfScores(scores, keep, double{args.scale} / queries, args.move,
                          MovePlace(args.query_layout.Position(a * args.tile) / args.tile, head));
    }
    for (const int64_t block : Best(std::move(scores), keep, late)) row[block] = 1;
  });
  return selected;
}

void ChooseByQuery(Engine& engine, const TokenMajor<const float>& q, int kv_heads,
                   const QueryGateStep& step) {
  const int d = q.head_dim, group = q.heads / kv_heads;
  const int64_t tokens = step.query_layout.tokens, blocks = TileCount(tokens, step.block_size);
  const int64_t words = QueryWords(q.tokens), tiles = TileCount(q.tokens, step.tile);
  const std::vector<float> means = BlockMeans({.sums = step.key_sums,
                                               .counted = step.counted,
                                               .tokens = tokens,
                                               .tile = step.tile,
                                               .block_size = step.block_size},
                                              kv_heads, d);
  std::fill_n(step.queries, q.heads * blocks * words, 0u);
  // A task is a word of queries.
  engine.pool().For(q.heads * words, [&](int64_t task, int) {
    const int64_t head = task / words, word = task % words;
    const bool late = TiesGoLate(static_cast<int32_t>(head));
    const int32_t halves = HalvesOf(step.head_halves, static_cast<int32_t>(head));
    for (int64_t i = word * 32; i < std::min(q.tokens, (word + 1) * 32); ++i) {
      const auto own = static_cast<int32_t>(step.query_layout.Position(i) / step.block_size);
      const int32_t first =
          (step.document_starts == nullptr ? 0 : step.document_starts[i]) / step.block_size;
      int64_t keep = KeptBefore(step.topk_blocks, step.density, halves, own - first);
      Scores scores = ScoreBlocks(q.data + i * q.token_stride + head * q.head_stride,
                                  means.data() + head / group * blocks * d, d,
                                  {.first = first, .own = own, .last = own}, late);
      if (step.move.factor != nullptr) {
        keep = KeepOfScores(scores, keep, double{step.scale}, step.move,
                            MovePlace(step.query_layout.Position(i), static_cast<int>(head)));
      }
      std::vector<int64_t> kept = Best(std::move(scores), keep, late);
      kept.push_back(own);
      for (const int64_t block : kept) {
        step.queries[(head * blocks + block) * words + word] |= 1u << i % 32;
      }
    }
  });
  const int64_t block_words = BlockWords(static_cast<int32_t>(blocks));
  std::fill_n(step.chosen, q.heads * tiles * block_words, 0u);
  engine.pool().For(q.heads * tiles, [&](int64_t task, int) {
    const int64_t head = task / tiles, begin = task % tiles * step.tile / 32;
    for (int64_t block = 0; block < blocks; ++block) {
      const uint32_t* const of_block = step.queries + (head * blocks + block) * words;
      const uint32_t* const end = of_block + std::min<int64_t>(words, begin + step.tile / 32);
      if (std::any_of(of_block + begin, end, [](uint32_t word) { return word != 0; })) {
        step.chosen[task * block_words + block / 32] |= 1u << block % 32;
      }
    }
  });
}

namespace {

struct Step {
  Engine& engine;
  const TokenMajor<const float>&q, &k;

  void operator()(const FixedBlocksStep& step) const {
    const int64_t tiles = TileCount(step.query_layout.local_tokens(), step.tile);
    const int32_t words =
        BlockWords(static_cast<int32_t>(TileCount(step.query_layout.tokens, step.tile)));
    engine.pool().For(tiles, [&](int64_t tile, int) {
      uint32_t* const first = step.chosen + tile * words;
      for (int32_t word = 0; word < words; ++word) first[word] = step.Word(tile, word);
      for (int64_t head = 1; head < step.heads; ++head) {
        std::copy_n(first, words, first + head * tiles * words);
      }
    });
  }
  void operator()(const TileKeySumsStep& step) const { TileKeySums(engine, k, step); }
  void operator()(const OrderTilesStep& step) const {
    ShardLayout owner = step.layout;
    const int64_t local_tiles = TileCount(owner.local_tokens(), step.tile);
    for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
      for (int64_t b = 0; b < local_tiles; ++b) {
        std::copy_n(step.gathered + (owner.rank * local_tiles + b) * step.row, step.row,
                    step.ordered + owner.Position(b * step.tile) / step.tile * step.row);
      }
    }
  }
  void operator()(const MeanGateStep& step) const {
    const std::vector<char> selected =
        SelectBlocks(engine, {.q = q,
                              .query_layout = step.query_layout,
                              .seen = step.seen,
                              .key_sums = step.key_sums,
                              .counted = step.counted,
                              .kv_heads = k.heads,
                              .tile = step.tile,
                              .block_size = step.block_size,
                              .topk_blocks = step.topk_blocks,
                              .head_halves = step.head_halves,
                              .choosing = step.choosing,
                              .first_query_gates = step.first_query_gates,
                              .scale = step.scale,
                              .move = step.move});
    const int64_t blocks = TileCount(step.query_layout.tokens, step.block_size);
    const int64_t rows = static_cast<int64_t>(selected.size()) / blocks,
                  words = BlockWords(static_cast<int32_t>(blocks));
    std::fill_n(step.chosen, rows * words, 0u);
    for (int64_t i = 0; i < rows * blocks; ++i) {
      const int64_t block = i % blocks;
      if (selected[i] != 0) step.chosen[i / blocks * words + block / 32] |= 1u << block % 32;
    }
  }
  void operator()(const QueryGateStep& step) const { ChooseByQuery(engine, q, k.heads, step); }
  void operator()(const PackKeysStep& step) const {
    auto* to = static_cast<float*>(step.packed);
    for (int64_t i = 0; i < k.tokens; ++i) {
      for (int head = 0; head < k.heads; ++head, to += k.head_dim) {
        std::copy_n(k.data + i * k.token_stride + head * k.head_stride, k.head_dim, to);
      }
    }
  }
  void operator()(const AntidiagonalGateStep& step) const {
    ChooseByAntidiagonals(engine, q, SequenceKeys(step.keys, step.query_layout), step);
  }
  void operator()(const DimEnergyStep& step) const { SumDimEnergy(engine, q, k, step); }
  void operator()(const PickDimsStep& step) const { PickDims(k.heads, k.head_dim, step); }
  void operator()(const NarrowRowsStep& step) const { NarrowRows(engine, q, k, step); }
  void operator()(const KeyGroupGateStep& step) const {
    ChooseKeyGroups(engine, q.heads, k.heads, step);
  }
  void operator()(const BlockMassStep& step) const {
    BlockMass(engine, q, SequenceKeys(step.keys, step.query_layout), step);
  }
  void operator()(const MassGateStep& step) const { SelectBlocksByMass(engine, step); }
  void operator()(const AdaptDensityStep& step) const { AdaptDensity(step); }

  void operator()(const CountWorkStep& step) const {
    const int64_t query_tiles = TileCount(step.query_layout.local_tokens(), step.tile);
    const int32_t words =
        BlockWords(static_cast<int32_t>(TileCount(step.query_layout.tokens, step.block_size)));
    *step.work = 0;
    for (int64_t row = 0; row < step.heads * query_tiles; ++row) {
      *step.work += TilesOfRow(step, row, query_tiles, words);
    }
  }
  void operator()(const FindMoveStep& step) const { FindMove(step); }
  void operator()(const SumChoicesStep& step) const {
    *step.work = 0;
    for (int32_t head = 0; head < step.heads; ++head) {
      *step.work += step.choices[head].Work(step.blocks, step.tile);
    }
  }
  void operator()(const MoveBudgetsStep& step) const {
    for (int32_t head = 0; head < step.heads; ++head) MoveBudgets(step, head);
  }
  void operator()(const HoldMassStep& step) const {
    for (int32_t head = 0; head < step.heads; ++head) HoldMass(step, head);
  }

 private:
  // The keys of the whole sequence: as a step has gathered them, or, on one rank, the call's.
  TokenMajor<const float> SequenceKeys(const void* keys, const ShardLayout& layout) const {
    if (keys == nullptr) return k;
    return {static_cast<const float*>(keys), layout.tokens, k.heads, k.head_dim,
            int64_t{k.heads} * k.head_dim,   k.head_dim};
  }
};

}  // namespace

void RunBlockStep(Engine& engine, const TokenMajor<const float>& q,
                  const TokenMajor<const float>& k, const BlockStep& step) {
  std::visit(Step{engine, q, k}, step);
}

TileCsr CsrOfBlocks(const std::vector<char>& selected, int heads, int tile, int block_size,
                    const ShardLayout& query, const ShardLayout& owner, const SeenKeys& seen) {
  const int64_t blocks = TileCount(query.tokens, block_size);
  const int64_t query_tiles = TileCount(query.local_tokens(), tile);
  const int64_t key_tiles = TileCount(owner.local_tokens(), tile);
  TileCsr csr;
  for (int64_t row = 0; row < heads * query_tiles; ++row) {
    csr.row_offsets.push_back(static_cast<int32_t>(csr.columns.size()));
    const int64_t a = row % query_tiles;
    for (int64_t b = 0; b < key_tiles; ++b) {
      const int64_t first = owner.Position(b * tile);
      if (SeesTile(seen, query, a, tile, first) && selected[row * blocks + first / block_size]) {
        csr.columns.push_back(static_cast<int32_t>(b));
      }
    }
    if (a + 1 == query_tiles) csr.row_offsets.push_back(static_cast<int32_t>(csr.columns.size()));
  }
  return csr;
}

}  // namespace ringleader::kernels::reference
