// index_bench [--csv FILE] [--commit NAME]: the vertical-slash index of one layer on one rank, step
// by step and all in, without the reductions between ranks.
#include <cmath>
#include <cstdio>
#include <string>

#include "absl/strings/str_format.h"
#include "kernels/bench/bench_report.h"
#include "kernels/bench/random_tensor.h"
#include "kernels/fused/device_buffer.h"
#include "kernels/index/estimate.h"
#include "kernels/index/select.h"

namespace ringleader::kernels::bench {
namespace {

using fused::DeviceBuffer;

struct Shape {
  int64_t local_tokens;
  int ranks, heads, kv_heads, head_dim, queries;
};

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

void BenchIndex(const Shape& shape, Report& report) {
  constexpr int kTile = 128, kMaxColumns = 4096, kSink = 64, kLocalBlocks = 1;
  const int64_t n = shape.local_tokens, tokens = n * shape.ranks, blocks = tokens / kTile;
  const int heads = shape.heads, dim = shape.head_dim;
  const ShardLayout layout = {.kind = LayoutKind::kStriped,
                              .ranks = shape.ranks,
                              .rank = 0,
                              .stripe = kTile,
                              .tokens = tokens};
  auto q = RandomTensor(int64_t{shape.queries} * heads * dim);
  auto k = RandomTensor(n * shape.kv_heads * dim);
  std::vector<int64_t> positions(shape.queries);
  for (int e = 0; e < shape.queries; ++e) positions[e] = tokens - shape.queries + e;
  DeviceBuffer<int64_t> gpu_positions(positions), row_sum(heads * shape.queries),
      column_positions(heads * kMaxColumns), load(shape.ranks);
  DeviceBuffer<index::IndexMass> masses(heads);
  DeviceBuffer<float> row_max(heads * shape.queries), mass(std::vector<float>(heads, 0.9f));
  DeviceBuffer<int32_t> column_mass(heads * n), diagonal_mass(heads * blocks),
      caps(std::vector<int32_t>(heads, kMaxColumns)), counts(heads), diagonal_counts(heads),
      residue_offsets(heads * (shape.ranks + 1)), residues(heads * blocks);
  const int64_t candidates = int64_t{heads} * kMaxColumns;
  DeviceBuffer<int32_t> candidate_mass(shape.ranks * candidates),
      candidate_positions(shape.ranks * candidates);
  candidate_mass.Zero();
  DeviceBuffer<char> workspace(static_cast<int64_t>(index::SelectWorkspaceBytes(heads, tokens)));
  DeviceBuffer<uint64_t> diagonals(heads * ((blocks + 63) / 64));
  const index::EstimateArgs estimate = {
      .q = {q.data(), shape.queries, heads, dim, int64_t{heads} * dim, dim},
      .query_positions = gpu_positions.data(),
      .k = {k.data(), n, shape.kv_heads, dim, int64_t{shape.kv_heads} * dim, dim},
      .key_layout = layout,
      .tile = kTile,
      .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
      .row_max = row_max.data(),
      .row_sum = row_sum.data(),
      .column_mass = column_mass.data(),
      .diagonal_mass = diagonal_mass.data()};
  const HeadBudgets budgets = {.mass = mass.data(), .max_count = caps.data()};
  const auto run_max = [&] { Check(index::EstimateRowMax(estimate, nullptr)); };
  const auto run_sum = [&] { Check(index::EstimateRowSum(estimate, nullptr)); };
  const auto run_mass = [&] { Check(index::EstimateMass(estimate, nullptr)); };
  const auto run_candidates = [&] {
    Check(index::SelectColumnCandidates({.column_mass = column_mass.data(),
                                         .layout = layout,
                                         .heads = heads,
                                         .max_columns = kMaxColumns,
                                         .sink_tokens = kSink,
                                         .mass = candidate_mass.data(),
                                         .positions = candidate_positions.data()},
                                        nullptr));
  };
  const auto run_select = [&] {
    Check(index::Select({.candidate_mass = candidate_mass.data(),
                         .candidate_positions = candidate_positions.data(),
                         .diagonal_mass = diagonal_mass.data(),
                         .column_budgets = budgets,
                         .diagonal_budgets = budgets,
                         .layout = layout,
                         .heads = heads,
                         .tile = kTile,
                         .max_columns = kMaxColumns,
                         .sink_tokens = kSink,
                         .local_blocks = kLocalBlocks,
                         .workspace = workspace.data(),
                         .column_positions = column_positions.data(),
                         .column_counts = counts.data(),
                         .diagonals = diagonals.data(),
                         .diagonal_counts = diagonal_counts.data(),
                         .residue_offsets = residue_offsets.data(),
                         .residues = residues.data(),
                         .load = load.data(),
                         .masses = masses.data()},
                        nullptr));
  };
  // What later kernels keep of it, and what only building it takes.
  const size_t kept_bytes = column_positions.Bytes() + counts.Bytes() + diagonals.Bytes() +
                            residue_offsets.Bytes() + residues.Bytes() + load.Bytes();
  const size_t scratch_bytes = column_mass.Bytes() + diagonal_mass.Bytes() + row_max.Bytes() +
                               row_sum.Bytes() + candidate_mass.Bytes() +
                               candidate_positions.Bytes() + workspace.Bytes();
  const auto add = [&](const char* step, const std::function<void()>& run) {
    report.Add({step, absl::StrFormat("%d", n), absl::StrFormat("%d", shape.ranks),
                absl::StrFormat("%d", heads), absl::StrFormat("%d", shape.kv_heads),
                absl::StrFormat("%d", dim), absl::StrFormat("%d", shape.queries),
                absl::StrFormat("%.4f", MedianMs(run)), absl::StrFormat("%d", kept_bytes),
                absl::StrFormat("%d", scratch_bytes)});
  };
  add("row_max", run_max);
  add("row_sum", run_sum);
  add("mass", run_mass);
  add("candidates", run_candidates);
  add("select", run_select);
  add("all", [&] {
    run_max();
    run_sum();
    run_mass();
    run_candidates();
    run_select();
  });
}

}  // namespace
}  // namespace ringleader::kernels::bench

int main(int argc, char** argv) {
  std::string csv, commit = "unknown";
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--csv") csv = argv[i + 1];
    if (flag == "--commit") commit = argv[i + 1];
  }
  if (!ringleader::kernels::fused::HaveGpu()) {
    std::printf("index_bench: SKIPPED, no GPU on this machine\n");
    return 0;
  }
  ringleader::kernels::bench::Report report(
      commit, {"step", "local_tokens", "ranks", "heads", "kv_heads", "head_dim", "queries", "ms",
               "index_bytes", "scratch_bytes"});
  ringleader::kernels::bench::BenchIndex({131072, 1, 16, 2, 128, 64}, report);
  ringleader::kernels::bench::BenchIndex({131072, 4, 16, 2, 128, 64}, report);
  ringleader::kernels::bench::BenchIndex({131072, 1, 32, 8, 128, 64}, report);
  ringleader::kernels::bench::BenchIndex({131072, 1, 28, 4, 64, 64}, report);
  report.PrintTable();
  return csv.empty() || report.WriteCsv(csv) ? 0 : 1;
}
