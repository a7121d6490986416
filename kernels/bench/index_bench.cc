// index_bench [--csv FILE] [--commit NAME]: the vertical-slash index of one layer on one rank, step
// by step and all in, without the reductions between ranks; and the lists of tiles that are chosen
// from block scores: gate of means (MoBA), exact block mass (AdaSpa), CSR both ways; and of
// antidiagonals (XAttention) and by each query (MoBA); and groups of 8 keys by their best pairs.
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/bench/bench_report.h"
#include "kernels/bench/random_tensor.h"
#include "kernels/index/estimate.h"
#include "kernels/index/gates/antidiagonal.h"
#include "kernels/index/gates/block_steps.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/gates/query_gate.h"
#include "kernels/index/groups/group_lists.h"
#include "kernels/index/groups/key_groups.h"
#include "kernels/index/select.h"
#include "kernels/index/visited_share.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/selection_buffers.h"

namespace ringleader::kernels::bench {
namespace {

struct Shape {
  int64_t local_tokens;
  int ranks, heads, kv_heads, head_dim, queries;
  bool spread = false;  // the queries, over the sequence
};

constexpr int kTile = 128;

// The first rank of a striped sequence.
ShardLayout LayoutOf(const Shape& shape) {
  return {.kind = LayoutKind::kStriped,
          .ranks = shape.ranks,
          .rank = 0,
          .stripe = kTile,
          .tokens = shape.local_tokens * shape.ranks};
}

// A rank's queries, and keys of so many tokens.
struct QueriesAndKeys {
  QueriesAndKeys(const Shape& shape, int64_t key_tokens)
      : q(RandomTensor(shape.local_tokens * shape.heads * shape.head_dim)),
        k(RandomTensor(key_tokens * shape.kv_heads * shape.head_dim)),
        queries(View(q, shape.local_tokens, shape.heads, shape.head_dim)),
        keys(View(k, key_tokens, shape.kv_heads, shape.head_dim)) {}

  static TokenMajor<const __nv_bfloat16> View(const DeviceBuffer<__nv_bfloat16>& of, int64_t tokens,
                                              int heads, int dim) {
    return {of.data(), tokens, heads, dim, int64_t{heads} * dim, dim};
  }

  const DeviceBuffer<__nv_bfloat16> q, k;
  const TokenMajor<const __nv_bfloat16> queries, keys;
};

// A line of the report: a step's time, and the memory that attention keeps of it and that only
// building takes.
void AddStep(const Shape& shape, const char* step, int64_t queries, double ms, size_t kept_bytes,
             size_t scratch_bytes, Report& report) {
  report.Add({step, absl::StrFormat("%d", shape.local_tokens), absl::StrFormat("%d", shape.ranks),
              absl::StrFormat("%d", shape.heads), absl::StrFormat("%d", shape.kv_heads),
              absl::StrFormat("%d", shape.head_dim), absl::StrFormat("%d", queries),
              absl::StrFormat("%.4f", ms), absl::StrFormat("%d", kept_bytes),
              absl::StrFormat("%d", scratch_bytes)});
}

std::vector<int64_t> EstimatePositions(const Shape& shape) {
  const int64_t tokens = shape.local_tokens * shape.ranks;
  std::vector<int64_t> positions(shape.queries);
  for (int e = 0; e < shape.queries; ++e) {
    positions[e] =
        shape.spread ? SpreadPosition(tokens, shape.queries, e) : tokens - shape.queries + e;
  }
  return positions;
}

void BenchIndex(const Shape& shape, Report& report) {
  constexpr int kMaxColumns = 4096, kSink = 64, kLocalBlocks = 1;
  const int64_t n = shape.local_tokens;
  const int heads = shape.heads, dim = shape.head_dim;
  const ShardLayout layout = LayoutOf(shape);
  auto q = RandomTensor(int64_t{shape.queries} * heads * dim);
  auto k = RandomTensor(n * shape.kv_heads * dim);
  const DeviceBuffer<int64_t> gpu_positions(EstimatePositions(shape)),
      row_sum(int64_t{heads} * shape.queries);
  const DeviceBuffer<float> row_max(int64_t{heads} * shape.queries),
      run_sums(int64_t{heads} * shape.queries * RunsOf(n));
  const DeviceBuffer<int32_t> column_mass(heads * n);
  SelectionBuffers selected({.layout = layout,
                             .heads = heads,
                             .tile = kTile,
                             .max_columns = kMaxColumns,
                             .sink_tokens = kSink,
                             .local_blocks = kLocalBlocks},
                            std::vector<float>(heads, 0.9f),
                            std::vector<int32_t>(heads, kMaxColumns));
  selected.candidate_mass.Zero();
  const index::EstimateArgs estimate = {
      .q = {q.data(), shape.queries, heads, dim, int64_t{heads} * dim, dim},
      .query_positions = gpu_positions.data(),
      .k = {k.data(), n, shape.kv_heads, dim, int64_t{shape.kv_heads} * dim, dim},
      .key_layout = layout,
      .tile = kTile,
      .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
      .row_max = row_max.data(),
      .row_sum = row_sum.data(),
      .run_sums = run_sums.data(),
      .column_mass = column_mass.data(),
      .diagonal_mass = selected.diagonal_mass.data()};
  const index::ColumnCandidatesArgs candidates = {.column_mass = column_mass.data(),
                                                  .layout = layout,
                                                  .heads = heads,
                                                  .max_columns = kMaxColumns,
                                                  .sink_tokens = kSink,
                                                  .mass = selected.candidate_mass.data(),
                                                  .positions = selected.candidate_positions.data()};
  const std::vector<std::pair<const char*, std::function<void()>>> steps = {
      {"row_max", [&] { Check(index::EstimateRowMax(estimate, nullptr)); }},
      {"row_sum", [&] { Check(index::EstimateRowSum(estimate, nullptr)); }},
      {"mass", [&] { Check(index::EstimateMass(estimate, nullptr)); }},
      {"candidates", [&] { Check(index::SelectColumnCandidates(candidates, nullptr)); }},
      {"select", [&] { Check(index::Select(selected.Args(), nullptr)); }},
  };
  const size_t scratch_bytes = column_mass.Bytes() + selected.diagonal_mass.Bytes() +
                               row_max.Bytes() + row_sum.Bytes() + run_sums.Bytes() +
                               selected.candidate_mass.Bytes() +
                               selected.candidate_positions.Bytes() + selected.workspace.Bytes();
  const auto add = [&](const char* name, const std::function<void()>& run) {
    const std::string step = absl::StrCat(name, shape.spread ? "_spread" : "");
    AddStep(shape, step.c_str(), shape.queries, MedianMs(run), selected.KeptBytes(), scratch_bytes,
            report);
  };
  for (const auto& [name, run] : steps) add(name, run);
  add("all", [&] {
    for (const auto& [name, run] : steps) run();
  });
  // Attention's own sums of these rows are among what it leaves; here any will do.
  const DeviceBuffer<float> lse(std::vector<float>(heads * n, 0.0f));
  const DeviceBuffer<int32_t> visited(heads);
  add("probe", [&] {
    Check(index::EstimateRowMax(estimate, nullptr));
    Check(index::EstimateRowSum(estimate, nullptr));
    Check(index::CountVisited({.layout = layout,
                               .heads = heads,
                               .queries = shape.queries,
                               .positions = gpu_positions.data(),
                               .row_max = row_max.data(),
                               .row_sum = row_sum.data(),
                               .lse = lse.data(),
                               .visited = visited.data()},
                              nullptr));
  });
}

// Lists of tiles by row and by column, at most `capacity` of them.
struct TileListBuffers {
  TileListBuffers(int heads, int tiles, int64_t capacity)
      : row_offsets(int64_t{heads} * (tiles + 1)),
        columns(capacity),
        column_offsets(int64_t{heads} * (tiles + 1)),
        rows(capacity) {}

  size_t Bytes() const {
    return row_offsets.Bytes() + columns.Bytes() + column_offsets.Bytes() + rows.Bytes();
  }
  void Build(const DeviceBuffer<uint32_t>& chosen, const ShardLayout& layout, int heads, int tile,
             int block_size) const {
    Check(index::BuildTileLists({.chosen = chosen.data(),
                                 .query_layout = layout,
                                 .key_layout = layout,
                                 .heads = heads,
                                 .tile = tile,
                                 .block_size = block_size,
                                 .capacity = columns.size(),
                                 .row_offsets = row_offsets.data(),
                                 .columns = columns.data(),
                                 .column_offsets = column_offsets.data(),
                                 .rows = rows.data()},
                                nullptr));
  }

  DeviceBuffer<int32_t> row_offsets, columns, column_offsets, rows;
};

// One rank with the whole sequence, all its queries.
void BenchBlocks(const Shape& shape, Report& report) {
  constexpr int kBlock = 512, kTopk = 12;
  constexpr float kDensity = 0.05f;
  const int64_t n = shape.local_tokens;
  const int heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.head_dim;
  const ShardLayout layout = {.tokens = n};
  const int tiles = static_cast<int>(n / kTile), blocks = static_cast<int>(n / kBlock);
  const QueriesAndKeys rows(shape, n);
  const auto &queries = rows.queries, &keys = rows.keys;
  DeviceBuffer<float> query_sums(int64_t{tiles} * heads * dim),
      key_sums(int64_t{tiles} * kv_heads * dim), means(int64_t{kv_heads} * blocks * dim),
      density(std::vector<float>(heads, kDensity));
  DeviceBuffer<uint32_t> chosen_by_mean(int64_t{heads} * tiles * BlockWords(blocks)),
      chosen_by_mass(int64_t{heads} * tiles * BlockWords(tiles));
  DeviceBuffer<int32_t> mass(int64_t{heads} * tiles * tiles);
  DeviceBuffer<int64_t> kept(heads), total(heads);
  const TileListBuffers lists(heads, tiles,
                              int64_t{heads} * tiles * (kTopk + 1) * (kBlock / kTile));
  const auto add = [&](const char* step, size_t scratch_bytes, const std::function<void()>& run) {
    AddStep(shape, step, n, MedianMs(run, 5), lists.Bytes(), scratch_bytes, report);
  };
  const auto build_lists = [&](const DeviceBuffer<uint32_t>& chosen, int block_size) {
    lists.Build(chosen, layout, heads, kTile, block_size);
  };
  add("gate", query_sums.Bytes() + key_sums.Bytes() + means.Bytes() + chosen_by_mean.Bytes(), [&] {
    Check(index::TileSums(queries, kTile, query_sums.data(), nullptr));
    Check(index::TileSums(keys, kTile, key_sums.data(), nullptr));
    Check(index::SelectBlocksByMean({.query_sums = query_sums.data(),
                                     .key_sums = key_sums.data(),
                                     .query_layout = layout,
                                     .heads = heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = dim,
                                     .tile = kTile,
                                     .block_size = kBlock,
                                     .topk_blocks = kTopk,
                                     .means = means.data(),
                                     .chosen = chosen_by_mean.data()},
                                    nullptr));
  });
  add("gate_lists", 0, [&] { build_lists(chosen_by_mean, kBlock); });
  DeviceBuffer<char> workspace(static_cast<int64_t>(index::BlockMassWorkspaceBytes(n)));
  add("exact_mass", mass.Bytes() + workspace.Bytes(), [&] {
    Check(index::BlockMass(queries, keys,
                           {.query_layout = layout,
                            .tile = kTile,
                            .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                            .mass = mass.data()},
                           workspace.data(), nullptr));
  });
  add("mass_gate", chosen_by_mass.Bytes(), [&] {
    Check(index::SelectBlocksByMass({.mass = mass.data(),
                                     .query_layout = layout,
                                     .heads = heads,
                                     .tile = kTile,
                                     .density = density.data(),
                                     .chosen = chosen_by_mass.data(),
                                     .kept = kept.data(),
                                     .total = total.data()},
                                    nullptr));
  });
  add("mass_lists", 0, [&] { build_lists(chosen_by_mass, kTile); });
}

// What a rank of a striped sequence chooses by antidiagonals, from keys that have been gathered,
// and the lists of its own keys.
void BenchAntidiagonals(const Shape& shape, int stride, Report& report) {
  constexpr float kDensity = 0.05f;
  const int64_t n = shape.local_tokens;
  const int heads = shape.heads, dim = shape.head_dim;
  const ShardLayout layout = LayoutOf(shape);
  const int tiles = static_cast<int>(n / kTile), blocks = static_cast<int>(layout.tokens / kTile);
  const QueriesAndKeys rows(shape, layout.tokens);
  const auto &queries = rows.queries, &keys = rows.keys;
  DeviceBuffer<uint32_t> chosen(int64_t{heads} * tiles * BlockWords(blocks));
  const AntidiagonalGateStep step = {.query_layout = layout,
                                     .tile = kTile,
                                     .stride = stride,
                                     .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                                     .threshold = 1.0f,
                                     .density = kDensity,
                                     .chosen = chosen.data()};
  const DeviceBuffer<char> workspace(
      static_cast<int64_t>(index::AntidiagonalWorkspaceBytes(queries, step)));
  const TileListBuffers lists(heads, tiles, int64_t{heads} * tiles * MostBlocks(kDensity, blocks));
  const auto add = [&](const char* name, const std::function<void()>& run) {
    AddStep(shape, absl::StrCat(name, stride).c_str(), n, MedianMs(run, 5), lists.Bytes(),
            workspace.Bytes() + chosen.Bytes(), report);
  };
  add("antidiagonals_",
      [&] { Check(index::ChooseByAntidiagonals(queries, keys, step, workspace.data(), nullptr)); });
  add("antidiagonal_lists_", [&] { lists.Build(chosen, layout, heads, kTile, kTile); });
}

// What a rank of a striped sequence chooses by query, from gathered sums of keys, and the lists of
// its own keys.
void BenchQueryGate(const Shape& shape, int block_size, Report& report) {
  const int64_t n = shape.local_tokens;
  const int heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.head_dim;
  const ShardLayout layout = LayoutOf(shape);
  const int tiles = static_cast<int>(n / kTile),
            blocks = static_cast<int>(layout.tokens / block_size);
  const QueriesAndKeys rows(shape, n);
  const auto &queries = rows.queries, &keys = rows.keys;
  const DeviceBuffer<float> sums(layout.tokens / kTile * kv_heads * dim);
  for (int rank = 0; rank < shape.ranks; ++rank) {  // as if all ranks had the same keys
    Check(index::TileSums(keys, kTile, sums.data() + rank * (n / kTile) * kv_heads * dim, nullptr));
  }
  const DeviceBuffer<uint32_t> chosen_queries(int64_t{heads} * blocks * QueryWords(n)),
      chosen(int64_t{heads} * tiles * BlockWords(blocks));
  const QueryGateStep step = {.key_sums = sums.data(),
                              .query_layout = layout,
                              .tile = kTile,
                              .block_size = block_size,
                              .density = 0.05f,
                              .queries = chosen_queries.data(),
                              .chosen = chosen.data()};
  const DeviceBuffer<char> workspace(
      static_cast<int64_t>(index::QueryGateWorkspaceBytes(queries, kv_heads, step)));
  const TileListBuffers lists(heads, tiles, int64_t{heads} * tiles * tiles);
  const auto add = [&](const char* name, const std::function<void()>& run) {
    AddStep(shape, absl::StrCat(name, block_size).c_str(), n, MedianMs(run, 5), lists.Bytes(),
            workspace.Bytes() + chosen.Bytes() + chosen_queries.Bytes(), report);
  };
  add("query_gate_", [&] {
    Check(index::TileSums(keys, kTile, sums.data(), nullptr));
    Check(index::ChooseByQuery(queries, kv_heads, step, workspace.data(), nullptr));
  });
  add("query_gate_lists_", [&] { lists.Build(chosen, layout, heads, kTile, block_size); });
}

// What a rank of a striped sequence chooses of groups of keys, from its rows on; narrow keys of
// other ranks are as if they had been gathered.
void BenchKeyGroups(const Shape& shape, float density, Report& report) {
  constexpr int kTile = 64;
  const int64_t n = shape.local_tokens, tokens = n * shape.ranks, tiles = n / kTile;
  const int heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.head_dim;
  const QueriesAndKeys rows(shape, n);
  const DeviceBuffer<int64_t> energy(int64_t{2} * kv_heads * dim);
  const DeviceBuffer<float> largest(int64_t{2} * kv_heads * dim), inverses(int64_t{2} * kv_heads);
  const DeviceBuffer<int32_t> dims(int64_t{kv_heads} * kScoreDims);
  const DeviceBuffer<uint8_t> queries(n * heads * kScoreDims), keys(tokens * kv_heads * kScoreDims);
  const ShardLayout layout = {.kind = LayoutKind::kStriped,
                              .ranks = shape.ranks,
                              .rank = 0,
                              .stripe = kTile,
                              .tokens = tokens};
  const DeviceBuffer<int64_t> of_tiles(GroupRows(layout));
  const DeviceBuffer<uint32_t> chosen(heads * GroupRows(layout).back());
  const int capacity = KeyGroupBudgetOf(density, tokens).MostGroups(tokens - kTile, 0);
  const DeviceBuffer<int32_t> groups(heads * tiles * capacity),
      bounds((shape.ranks + 1) * heads * tiles);
  const GroupLists lists = {groups.data(), bounds.data(), heads * tiles, capacity};
  const KeyGroupGateStep gate = {.queries = queries.data(),
                                 .keys = keys.data(),
                                 .query_layout = layout,
                                 .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                                 .density = density,
                                 .rows = of_tiles.data(),
                                 .chosen = chosen.data()};
  const DeviceBuffer<char> workspace(
      static_cast<int64_t>(index::KeyGroupWorkspaceBytes(heads, kv_heads, gate)));
  const std::vector<std::pair<const char*, BlockStep>> steps = {
      {"energy",
       DimEnergyStep{
           .tokens = tokens, .rows = tokens, .energy = energy.data(), .largest = largest.data()}},
      {"pick", PickDimsStep{.energy = energy.data(),
                            .largest = largest.data(),
                            .dims = dims.data(),
                            .inverses = inverses.data()}},
      {"narrow", NarrowRowsStep{.dims = dims.data(),
                                .inverses = inverses.data(),
                                .queries = queries.data(),
                                .keys = keys.data()}},
      {"gate", gate}};
  const auto run = [&](const BlockStep& step) {
    Check(index::RunBlockStep(rows.queries, rows.keys, step, workspace.data(), nullptr));
  };
  const auto add = [&](const std::string& name, const std::function<void()>& timed) {
    AddStep(shape, name.c_str(), n, MedianMs(timed, 5), chosen.Bytes(),
            workspace.Bytes() + queries.Bytes() + keys.Bytes() + groups.Bytes() + bounds.Bytes(),
            report);
  };
  for (const auto& [name, step] : steps) {
    add(absl::StrCat("key_groups_", name, "_", density), [&] { run(step); });
  }
  const auto list = [&] {
    Check(index::ListGroups({.rows = of_tiles.data(), .chosen = chosen.data()}, layout, heads,
                            lists, nullptr));
  };
  add(absl::StrCat("key_groups_lists_", density), list);
  add(absl::StrCat("key_groups_", density), [&] {
    for (const auto& [name, step] : steps) run(step);
    list();
  });
}

}  // namespace
}  // namespace ringleader::kernels::bench

int main(int argc, char** argv) {
  const auto flags = ringleader::kernels::bench::ParseFlags(argc, argv);
  if (!ringleader::kernels::HaveGpu()) {
    std::printf("index_bench: SKIPPED, no GPU on this machine\n");
    return 0;
  }
  ringleader::kernels::bench::Report report(
      flags, {"step", "local_tokens", "ranks", "heads", "kv_heads", "head_dim", "queries", "ms",
              "index_bytes", "scratch_bytes"});
  ringleader::kernels::bench::BenchIndex({131072, 1, 16, 2, 128, 64}, report);
  ringleader::kernels::bench::BenchIndex({131072, 1, 16, 2, 128, 64, /*spread=*/true}, report);
  ringleader::kernels::bench::BenchIndex({131072, 4, 16, 2, 128, 64}, report);
  ringleader::kernels::bench::BenchIndex({131072, 1, 32, 8, 128, 64}, report);
  ringleader::kernels::bench::BenchIndex({131072, 1, 28, 4, 64, 64}, report);
  ringleader::kernels::bench::BenchBlocks({131072, 1, 16, 2, 128, 0}, report);
  for (const int block_size : {512, 1024, 4096}) {
    for (const int ranks : {1, 2}) {
      ringleader::kernels::bench::BenchQueryGate({131072, ranks, 16, 2, 128, 0}, block_size,
                                                 report);
    }
  }
  for (const int stride : {16, 32, 64}) {
    ringleader::kernels::bench::BenchAntidiagonals({131072, 1, 16, 2, 128, 0}, stride, report);
    ringleader::kernels::bench::BenchAntidiagonals({131072, 2, 16, 2, 128, 0}, stride, report);
  }
  for (const float density : {0.05f, 0.1f}) {
    ringleader::kernels::bench::BenchKeyGroups({131072, 1, 16, 2, 128, 0}, density, report);
  }
  return 0;
}
