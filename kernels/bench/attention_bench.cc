// attention_bench [--csv FILE] [--commit NAME] [--quick] [--deterministic] [--kernel NAME]:
// block-sparse attention against cuDNN's dense causal attention (through LibTorch) at the same
// length, heads and head dimension, measured in the same run. TFLOP/s count visible pairs: 4 d
// FLOPs each forward, 10 d backward; a diagonal tile counts half. The rows of a shape end with
// `cudnn`: cuDNN once more, whose ratio tells how far the clock has moved meanwhile.
//
// Lists: `causal` is dense; `toeplitz` a local band with a quarter of the work and random clusters
// of 1 to 4 block diagonals of 128 for the rest, other ones for each head; `csr` random tiles.
// `columns` includes gather and scatter. `ring4` is one rank's layer at 4 x the tokens: four ring
// steps over striped owners, vertical-slash diagonals of 128. `groups` is tiles of 64 queries and
// the groups of 8 keys that they picked up, half of them ones that the whole head favours, and
// `groups_of_pairs`, with --kernel groups, the same with one list for two heads.
// --deterministic adds rows for backward in its deterministic mode; with --kernel there are the
// rows of one of these names alone.
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/bench/attention_runs.h"
#include "kernels/sm90/columns.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::bench {
namespace {

constexpr int kRepeats = 5;
constexpr int64_t kTokens = 131072;

struct Measured {
  std::string kernel;
  int tile;
  double pairs;  // visible, over all heads
  double dense_pairs;
  Milliseconds ms;
};

double CausalPairs(const Shape& s) {
  return 0.5 * s.heads * kTokens * (kTokens + 1.0);
}

const ShardLayout kWhole = {.tokens = kTokens};

// Block diagonals of 128 for `tokens`, [heads][blocks].
std::vector<std::vector<bool>> RandomDiagonals(int heads, int64_t tokens, double density) {
  const int64_t blocks = tokens / 128;
  std::mt19937 random(20251121);
  std::vector<std::vector<bool>> diagonals;
  for (int h = 0; h < heads; ++h) {
    std::vector<bool> set(blocks, false);
    double work = 0;
    const double target = density * 0.5 * blocks * blocks;
    const auto add = [&](int64_t delta) {
      if (delta >= blocks || set[delta] || work >= target) return;
      set[delta] = true;
      work += delta == 0 ? 0.5 * blocks : blocks - delta;
    };
    set[0] = true;
    for (int64_t delta = 0; work < target / 4; ++delta) add(delta);
    while (work < target) {
      const int64_t start = std::uniform_int_distribution<int64_t>(0, blocks - 1)(random);
      const int64_t length = std::uniform_int_distribution<int64_t>(1, 4)(random);
      for (int64_t i = 0; i < length; ++i) add(start + i);
    }
    diagonals.push_back(std::move(set));
  }
  return diagonals;
}

// The bitmap of `diagonals` in blocks of `tile`.
at::Tensor PackDiagonals(const std::vector<std::vector<bool>>& diagonals, int tile,
                         int32_t* words) {
  const int64_t scale = 128 / tile, blocks = static_cast<int64_t>(diagonals[0].size()) * scale;
  *words = static_cast<int32_t>((blocks + 63) / 64);
  std::vector<int64_t> bits(diagonals.size() * *words, 0);
  for (size_t h = 0; h < diagonals.size(); ++h) {
    for (int64_t delta = 0; delta < blocks; ++delta) {
      if (diagonals[h][delta / scale]) {
        bits[h * *words + delta / 64] |= static_cast<int64_t>(uint64_t{1} << (delta % 64));
      }
    }
  }
  return at::tensor(bits, at::kLong).to(at::kCUDA);
}

double DiagonalPairs(const std::vector<std::vector<bool>>& diagonals) {
  double tiles = 0;
  for (const auto& set : diagonals) {
    const auto blocks = static_cast<int64_t>(set.size());
    for (int64_t delta = 0; delta < blocks; ++delta) {
      if (set[delta]) tiles += delta == 0 ? 0.5 * blocks : blocks - delta;
    }
  }
  return tiles * 128 * 128;
}

Measured BenchCausal(const Tensors& t, const Shape& s, int tile) {
  const TileSelection tiles = {.tile = tile};
  return {"causal", tile, CausalPairs(s), CausalPairs(s),
          MeasureTiles(t, s, tiles, {{kWhole, kWhole}}, kRepeats)};
}

Measured BenchToeplitz(const Tensors& t, const Shape& s, int tile, double density) {
  const auto diagonals = RandomDiagonals(s.heads, kTokens, density);
  TileSelection tiles = {.pattern = TilePattern::kToeplitz, .tile = tile};
  const at::Tensor bits = PackDiagonals(diagonals, tile, &tiles.diagonal_words);
  tiles.diagonals = reinterpret_cast<const uint64_t*>(bits.data_ptr<int64_t>());
  return {"toeplitz", tile, DiagonalPairs(diagonals), CausalPairs(s),
          MeasureTiles(t, s, tiles, {{kWhole, kWhole}}, kRepeats)};
}

// One rank of four, all its ring steps.
Measured BenchRing(const Tensors& t, const Shape& s, double density) {
  constexpr int kRanks = 4;
  const auto diagonals = RandomDiagonals(s.heads, kRanks * kTokens, density);
  TileSelection tiles = {.pattern = TilePattern::kToeplitz};
  const at::Tensor bits = PackDiagonals(diagonals, 128, &tiles.diagonal_words);
  tiles.diagonals = reinterpret_cast<const uint64_t*>(bits.data_ptr<int64_t>());
  const auto layout = [](int rank) {
    return ShardLayout{.kind = LayoutKind::kStriped,
                       .ranks = kRanks,
                       .rank = rank,
                       .stripe = 128,
                       .tokens = kRanks * kTokens};
  };
  Steps steps;
  steps.reserve(kRanks);
  for (int step = 0; step < kRanks; ++step) {
    steps.emplace_back(layout(1), layout((1 - step + kRanks) % kRanks));
  }
  return {"ring4", 128, DiagonalPairs(diagonals) / kRanks, kRanks * CausalPairs(s),
          MeasureTiles(t, s, tiles, steps, kRepeats)};
}

Measured BenchCsr(const Tensors& t, const Shape& s, int tile, double density) {
  const int64_t blocks = kTokens / tile;
  std::mt19937 random(20251121);
  std::bernoulli_distribution active(density);
  std::vector<int32_t> row_offsets, columns, column_offsets, rows;
  double pairs = 0;
  for (int h = 0; h < s.heads; ++h) {
    std::vector<std::vector<int32_t>> by_column(blocks);
    row_offsets.push_back(static_cast<int32_t>(columns.size()));
    for (int64_t row = 0; row < blocks; ++row) {
      for (int64_t column = 0; column <= row; ++column) {
        if (column != row && !active(random)) continue;
        columns.push_back(column);
        by_column[column].push_back(row);
        pairs += (column == row ? 0.5 : 1.0) * tile * tile;
      }
      row_offsets.push_back(static_cast<int32_t>(columns.size()));
    }
    column_offsets.push_back(static_cast<int32_t>(rows.size()));
    for (const auto& list : by_column) {
      rows.insert(rows.end(), list.begin(), list.end());
      column_offsets.push_back(static_cast<int32_t>(rows.size()));
    }
  }
  const auto upload = [](const std::vector<int32_t>& values) {
    return at::tensor(values, at::kInt).to(at::kCUDA);
  };
  const at::Tensor gpu_row_offsets = upload(row_offsets), gpu_columns = upload(columns),
                   gpu_column_offsets = upload(column_offsets), gpu_rows = upload(rows);
  const TileSelection tiles = {.pattern = TilePattern::kCsr,
                               .tile = tile,
                               .row_offsets = gpu_row_offsets.data_ptr<int32_t>(),
                               .columns = gpu_columns.data_ptr<int32_t>(),
                               .column_offsets = gpu_column_offsets.data_ptr<int32_t>(),
                               .rows = gpu_rows.data_ptr<int32_t>()};
  return {"csr", tile, pairs, CausalPairs(s),
          MeasureTiles(t, s, tiles, {{kWhole, kWhole}}, kRepeats)};
}

// 4,096 columns a head beside a Toeplitz pattern of 5 %.
Measured BenchColumns(const Tensors& t, const Shape& s) {
  constexpr int kColumns = 4096;
  const auto diagonals = RandomDiagonals(s.heads, kTokens, 0.05);
  TileSelection tiles = {.pattern = TilePattern::kToeplitz};
  const at::Tensor bits = PackDiagonals(diagonals, 128, &tiles.diagonal_words);
  tiles.diagonals = reinterpret_cast<const uint64_t*>(bits.data_ptr<int64_t>());
  std::vector<int64_t> positions;
  std::mt19937 random(20251121);
  double tile_pairs = 0;
  for (int h = 0; h < s.heads; ++h) {
    std::vector<int64_t> all(kTokens);
    for (int64_t i = 0; i < kTokens; ++i) all[i] = i;
    std::shuffle(all.begin(), all.end(), random);
    std::sort(all.begin(), all.begin() + kColumns);
    positions.insert(positions.end(), all.begin(), all.begin() + kColumns);
    // Tiles of columns, as the figure is stated: what is masked in them counts.
    for (int c = 0; c < kColumns; c += 128) {
      const int64_t rows = kTokens - all[c] / 128 * 128;
      tile_pairs += 128.0 * static_cast<double>(rows);
    }
  }
  const at::Tensor gpu_positions = at::tensor(positions, at::kLong).to(at::kCUDA);
  const at::Tensor counts = at::full({s.heads}, kColumns, OnGpu(at::kInt));
  const ColumnSelection columns = {gpu_positions.data_ptr<int64_t>(), counts.data_ptr<int32_t>(),
                                   kColumns};
  const at::Tensor keys = at::empty({s.heads, kColumns, s.head_dim}, OnGpu(at::kBFloat16));
  const at::Tensor values = at::empty_like(keys);
  const at::Tensor d_keys = at::empty({s.heads, kColumns, s.head_dim}, OnGpu(at::kFloat));
  const at::Tensor d_values = at::empty_like(d_keys);
  auto* const keys_data = static_cast<__nv_bfloat16*>(keys.data_ptr());
  auto* const values_data = static_cast<__nv_bfloat16*>(values.data_ptr());
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  Milliseconds ms;
  ms.forward = MedianMs(
      [&] {
        t.Reset();
        Check(sm90::GatherColumns(View<const __nv_bfloat16>(t.k), View<const __nv_bfloat16>(t.v),
                                  kWhole, columns, s.heads, keys_data, values_data, nullptr));
        Check(sm90::ColumnForward({.q = View<const __nv_bfloat16>(t.q),
                                   .keys = keys_data,
                                   .values = values_data,
                                   .columns = columns,
                                   .tiles = tiles,
                                   .query_layout = kWhole,
                                   .out = View<float>(t.out),
                                   .lse = t.f(t.lse),
                                   .scale = scale},
                                  t.scratch(), nullptr));
      },
      kRepeats);
  t.ComputeDelta();
  MeasureBackward(s, kRepeats, ms, [&](bool deterministic) {
    d_keys.zero_();
    d_values.zero_();
    Check(sm90::ColumnBackward({.q = View<const __nv_bfloat16>(t.q),
                                .d_out = View<const __nv_bfloat16>(t.d_out),
                                .keys = keys_data,
                                .values = values_data,
                                .columns = columns,
                                .tiles = tiles,
                                .query_layout = kWhole,
                                .lse = t.f(t.lse),
                                .delta = t.f(t.delta),
                                .dq = View<float>(t.dq),
                                .d_keys = t.f(d_keys),
                                .d_values = t.f(d_values),
                                .scale = scale,
                                .deterministic = deterministic},
                               t.scratch(), nullptr));
    Check(sm90::ScatterColumns(t.f(d_keys), t.f(d_values), kWhole, columns, s.heads,
                               View<float>(t.dk), View<float>(t.dv), nullptr));
  });
  return {"columns", 128, tile_pairs, CausalPairs(s), ms};
}

// The groups that each tile of a head keeps, ascending: half of them from the first ones of an
// order that the head's tiles share, the others drawn by the tile.
std::vector<std::vector<int32_t>> RandomGroups(const KeyGroupBudget& budget, std::mt19937& random) {
  std::vector<int32_t> favoured(kTokens / kGroupKeys);
  std::iota(favoured.begin(), favoured.end(), 0);
  std::shuffle(favoured.begin(), favoured.end(), random);
  std::vector<std::vector<int32_t>> rows;
  std::vector<bool> taken;
  for (int64_t first = 0; first < kTokens; first += kGroupTile) {
    const auto all = static_cast<int32_t>(first / kGroupKeys);
    const int32_t kept = budget.MostGroups(first, 0);
    taken.assign(all, false);
    int32_t count = 0;
    for (size_t i = 0; i < favoured.size() && count < kept / 2; ++i) {
      if (favoured[i] >= all) continue;
      taken[favoured[i]] = true;
      ++count;
    }
    while (count < kept) {
      const auto group = std::uniform_int_distribution<int32_t>(0, all - 1)(random);
      count += !taken[group];
      taken[group] = true;
    }
    std::vector<int32_t>& row = rows.emplace_back();
    for (int32_t group = 0; group < all; ++group) {
      if (taken[group]) row.push_back(group);
    }
  }
  return rows;
}

// Rows of so many heads that have their groups in common.
Measured BenchGroups(const Tensors& t, const Shape& s, double density, int heads_together) {
  const KeyGroupBudget budget = KeyGroupBudgetOf(static_cast<float>(density), kTokens);
  const int32_t capacity = budget.MostGroups(kTokens - kGroupTile, 0);
  const int64_t tiles_a_head = kTokens / kGroupTile;
  std::mt19937 random(20251121);
  std::vector<int32_t> groups, ends;
  double pairs = 0.5 * s.heads * kTokens * (kGroupTile + 1);  // of the tiles' own
  for (int h = 0; h < s.heads; h += heads_together) {
    for (const std::vector<int32_t>& row : RandomGroups(budget, random)) {
      groups.insert(groups.end(), row.begin(), row.end());
      groups.resize(groups.size() + capacity - row.size());
      ends.push_back(static_cast<int32_t>(row.size()));
      pairs += static_cast<double>(row.size()) * kGroupKeys * kGroupTile * heads_together;
    }
  }
  const auto upload = [](const std::vector<int32_t>& values) {
    return at::tensor(values, at::kInt).to(at::kCUDA);
  };
  const at::Tensor gpu_groups = upload(groups), gpu_ends = upload(ends),
                   gpu_begins = at::zeros_like(gpu_ends);
  TileSelection tiles = {.pattern = TilePattern::kToeplitz, .tile = kGroupTile};
  const int32_t words = static_cast<int32_t>((tiles_a_head + 63) / 64);
  at::Tensor bits = at::zeros({s.heads, words}, at::kLong);
  bits.select(1, 0).fill_(1);
  bits = bits.to(at::kCUDA);
  tiles.diagonal_words = words;
  tiles.diagonals = reinterpret_cast<const uint64_t*>(bits.data_ptr<int64_t>());
  tiles.groups = {.groups = gpu_groups.data_ptr<int32_t>(),
                  .begins = gpu_begins.data_ptr<int32_t>(),
                  .ends = gpu_ends.data_ptr<int32_t>(),
                  .capacity = capacity,
                  .heads_together = heads_together};
  return {heads_together == 1 ? "groups" : "groups_of_pairs", kGroupTile, pairs, CausalPairs(s),
          MeasureTiles(t, s, tiles, {{kWhole, kWhole}}, kRepeats)};
}

void BenchShape(const Shape& s, bool lists, const std::string& only, Report& report) {
  const Milliseconds cudnn = MeasureCudnn(s, /*causal=*/true, kRepeats);
  const auto add_direction = [&](const Measured& row, const char* direction, double flops_per_pair,
                                 double ms, double cudnn_ms) {
    const double tflops = flops_per_pair * s.head_dim * row.pairs / ms * 1e-9;
    const double cudnn_tflops = flops_per_pair * s.head_dim * CausalPairs(s) / cudnn_ms * 1e-9;
    report.Add({row.kernel, direction, absl::StrFormat("%d", kTokens),
                absl::StrFormat("%.3f", row.pairs / row.dense_pairs),
                absl::StrFormat("%d", row.tile), absl::StrFormat("%d", s.heads),
                absl::StrFormat("%d", s.kv_heads), absl::StrFormat("%d", s.head_dim),
                absl::StrFormat("%.3f", ms), absl::StrFormat("%.1f", tflops),
                absl::StrFormat("%.1f", cudnn_tflops),
                absl::StrFormat("%.3f", tflops / cudnn_tflops)});
  };
  const auto add = [&](const Measured& row) {
    add_direction(row, "forward", 4, row.ms.forward, cudnn.forward);
    add_direction(row, "backward", 10, row.ms.backward, cudnn.backward);
    if (row.ms.deterministic > 0) {
      add_direction(row, "deterministic", 10, row.ms.deterministic, cudnn.backward);
    }
  };
  {
    const Tensors t(s);
    const auto wanted = [&](const char* kernel) { return only.empty() || only == kernel; };
    if (wanted("causal")) add(BenchCausal(t, s, 128));
    if (lists && wanted("causal")) add(BenchCausal(t, s, 64));
    for (const double density : {0.05, 0.1, 0.2}) {
      if (!lists) break;
      if (wanted("toeplitz")) {
        add(BenchToeplitz(t, s, 128, density));
        add(BenchToeplitz(t, s, 64, density));
      }
      if (wanted("csr")) add(BenchCsr(t, s, 128, density));
      if (wanted("groups") && !s.deterministic) {
        add(BenchGroups(t, s, density, 1));
        add(BenchGroups(t, s, density, 2));
      }
    }
    if (lists && wanted("csr")) add(BenchCsr(t, s, 64, 0.05));
    if (lists && wanted("columns")) add(BenchColumns(t, s));
    if (lists && wanted("ring4")) add(BenchRing(t, s, 0.05));
  }
  add({"cudnn", 128, CausalPairs(s), CausalPairs(s), MeasureCudnn(s, /*causal=*/true, kRepeats)});
}

int Main(int argc, char** argv) {
  Flags flags;
  std::string only;
  bool quick = false, deterministic = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--csv") == 0 && i + 1 < argc) {
      flags.csv = argv[++i];
    } else if (std::strcmp(argv[i], "--commit") == 0 && i + 1 < argc) {
      flags.commit = argv[++i];
    } else if (std::strcmp(argv[i], "--kernel") == 0 && i + 1 < argc) {
      only = argv[++i];
    } else if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--deterministic") == 0) {
      deterministic = true;
    } else {
      std::fprintf(
          stderr,
          "usage: attention_bench [--csv FILE] [--commit NAME] [--quick] [--deterministic] "
          "[--kernel NAME]\n");
      return 2;
    }
  }
  if (!FindGpu("attention_bench")) return 0;
  Report report(flags, {"kernel", "direction", "tokens", "density", "tile", "heads", "kv_heads",
                        "head_dim", "ms", "tflops", "cudnn_tflops", "ratio"});
  BenchShape({kTokens, 16, 2, 128, deterministic}, /*lists=*/true, only, report);
  if (!quick) {
    for (const Shape& shape :
         {Shape{kTokens, 16, 2, 64, deterministic}, Shape{kTokens, 32, 8, 128, deterministic},
          Shape{kTokens, 28, 4, 128, deterministic}, Shape{kTokens, 4, 4, 128, deterministic},
          Shape{kTokens, 64, 8, 128, deterministic}}) {
      BenchShape(shape, /*lists=*/false, only, report);
    }
  }
  return 0;
}

}  // namespace
}  // namespace ringleader::kernels::bench

int main(int argc, char** argv) {
  return ringleader::kernels::bench::Main(argc, argv);
}
