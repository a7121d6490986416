#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/status_macros.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/index/index_select.h"
#include "patterns/index/vertical_slash.h"
#include "worker/attention/cpu/cpu_attention_call.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

using comm::Channel;
using kernels::TokenMajor;
namespace reference = kernels::reference;

namespace {

// Estimate queries on which recall is measured: every so many.
constexpr int kRecallStride = 8;

}  // namespace

DeviceMemory CpuCall::Allocate(int64_t bytes) {
  return {new char[bytes](), std::default_delete<char[]>()};
}

DeviceMemory CpuCall::Upload(const void* values, int64_t bytes) {
  DeviceMemory memory = Allocate(bytes);
  std::memcpy(memory.get(), values, bytes);
  return memory;
}

absl::Status CpuCall::Sum(patterns::SumType type, void* values, int64_t count) {
  const Stopwatch watch(device_.exposed_seconds());
  if (type == patterns::SumType::kQueries) {
    return device_.communicator().AllReduceSum(Channel::kControl, static_cast<float*>(values),
                                               count);
  }
  if (type == patterns::SumType::kInt32) {  // doubles hold them exactly
    auto* const sums = static_cast<int32_t*>(values);
    std::vector<double> exact(sums, sums + count);
    RETURN_IF_ERROR(
        device_.communicator().AllReduceSum(Channel::kControl, exact.data(), exact.size()));
    std::copy(exact.begin(), exact.end(), sums);
    return absl::OkStatus();
  }
  // Exact, whatever the size of the sums.
  auto* const sums = static_cast<int64_t*>(values);
  std::vector<int64_t> all(count * device_.communicator().size());
  RETURN_IF_ERROR(device_.communicator().AllGather(Channel::kControl, sums, count * sizeof(int64_t),
                                                   all.data()));
  std::fill_n(sums, count, 0);
  for (size_t i = 0; i < all.size(); ++i) sums[i % count] += all[i];
  return absl::OkStatus();
}

absl::Status CpuCall::Max(float* values, int64_t count) {
  const Stopwatch watch(device_.exposed_seconds());
  return device_.communicator().AllReduceMax(Channel::kControl, values, count);
}

absl::Status CpuCall::Gather(void* values, int64_t bytes) {
  const Stopwatch watch(device_.exposed_seconds());
  const char* const own = static_cast<char*>(values) + device_.communicator().rank() * bytes;
  const std::vector<char> mine(own, own + bytes);
  return device_.communicator().AllGather(Channel::kControl, mine.data(), bytes, values);
}

absl::Status CpuCall::PrepareEstimate(const patterns::VerticalSlash& work) {
  int64_t* const positions = work.query_positions.data();
  for (int32_t e = 0; e < work.queries; ++e) {
    positions[e] = work.documents != nullptr ? work.documents->estimate_positions.data()[e]
                   : work.spread ? kernels::SpreadPosition(work.layout.tokens, work.queries, e)
                                 : work.layout.tokens - work.queries + e;
  }
  for (int head = 0; head < work.heads; ++head) {
    work.budget_masses.data()[head] = work.column_mass;
    work.budget_masses.data()[work.heads + head] = work.diagonal_mass;
    work.budget_counts.data()[head] = work.max_verticals;
    work.budget_counts.data()[work.heads + head] = work.max_slashes;
  }
  auto* const rows = reinterpret_cast<float*>(work.query_rows.data());
  if (rows == nullptr) return absl::OkStatus();
  for (int64_t e = 0; e < work.queries; ++e) {
    if (work.layout.Owner(positions[e]) != work.layout.rank) continue;
    const int64_t i = work.layout.LocalIndex(positions[e]);
    for (int head = 0; head < tensors_.q.heads; ++head) {
      std::copy_n(tensors_.q.data + i * tensors_.q.token_stride + head * tensors_.q.head_stride,
                  tensors_.q.head_dim, rows + (e * tensors_.q.heads + head) * tensors_.q.head_dim);
    }
  }
  return absl::OkStatus();
}

absl::Status CpuCall::RowMax(const patterns::VerticalSlash& work) {
  TokenMajor<const float> queries = tensors_.q;
  queries.tokens = work.queries;
  if (work.query_rows.data() != nullptr) {
    queries.data = reinterpret_cast<const float*>(work.query_rows.data());
    queries.token_stride = int64_t{tensors_.q.heads} * tensors_.q.head_dim;
    queries.head_stride = tensors_.q.head_dim;
  } else {
    queries.data += (tensors_.q.tokens - work.queries) * tensors_.q.token_stride;
  }
  ASSIGN_OR_RETURN(
      const reference::IndexEstimate estimate,
      reference::IndexEstimate::Create(
          device_.engine(),
          {.q = queries,
           .query_positions = work.query_positions.data(),
           .query_starts =
               work.documents == nullptr ? nullptr : work.documents->estimate_starts.data(),
           .k = tensors_.k,
           .key_layout = work.layout,
           .tile = work.tile,
           .scale = work.scale,
           .row_max = work.row_max.data(),
           .row_sum = work.row_sum.data(),
           .column_mass = work.column_mass_of.data(),
           .diagonal_mass = work.diagonal_mass_of.data()}));
  estimate_.emplace(estimate);
  estimate_->RowMax();
  return absl::OkStatus();
}

absl::Status CpuCall::RowSum(const patterns::VerticalSlash& /*work*/) {
  estimate_->RowSum();
  return absl::OkStatus();
}

absl::Status CpuCall::Mass(const patterns::VerticalSlash& /*work*/) {
  estimate_->Mass();
  return absl::OkStatus();
}

absl::Status CpuCall::Candidates(const patterns::VerticalSlash& work) {
  const int32_t columns = work.max_columns;
  const int64_t n = work.layout.local_tokens();
  device_.engine().pool().For(work.heads, [&](int64_t head, int) {
    const int32_t* const mass = work.column_mass_of.data() + head * n;
    std::vector<reference::ColumnCandidate> best(columns);
    reference::CandidateColumns(mass, work.layout, work.sink_tokens, columns, best.data(),
                                kernels::TiesGoLate(static_cast<int32_t>(head)));
    int32_t* const masses = work.CandidateMass(work.layout.rank) + head * columns;
    int32_t* const positions = work.CandidatePositions(work.layout.rank) + head * columns;
    for (int32_t c = 0; c < columns; ++c) {
      const bool used = best[c].position < work.layout.tokens;
      masses[c] = static_cast<int32_t>(best[c].mass);
      positions[c] = used ? static_cast<int32_t>(best[c].position) : -1;
    }
  });
  return absl::OkStatus();
}

absl::Status CpuCall::Select(const patterns::VerticalSlash& work, const LayerIndex& index) {
  const int64_t blocks = work.blocks, columns = index.max_columns;
  const float* const shares = work.budget_masses.data();
  const int32_t* const counts = work.budget_counts.data();
  choices_.resize(work.heads);
  device_.engine().pool().For(work.heads, [&](int64_t head, int) {
    const int32_t* const diagonals = work.diagonal_mass_of.data() + head * blocks;
    HeadChoice& choice = choices_[head];
    reference::Taken of_diagonals, of_columns;
    choice.slashes = reference::SelectDiagonals(
        diagonals, blocks, work.local_blocks, shares[work.heads + head], counts[work.heads + head],
        index.diagonals.data() + head * index.diagonal_words, work.slashes_by_tiles, &of_diagonals,
        work.content_blocks());
    std::vector<reference::ColumnCandidate> candidates;
    for (int rank = 0; rank < work.layout.ranks; ++rank) {
      for (int64_t c = head * columns; c < (head + 1) * columns; ++c) {
        const int32_t position = work.CandidatePositions(rank)[c];
        if (position >= 0) candidates.push_back({position, work.CandidateMass(rank)[c]});
      }
    }
    const int64_t total = std::accumulate(diagonals, diagonals + blocks, int64_t{0});
    index.column_counts.data()[head] = reference::SelectColumns(
        candidates.data(), static_cast<int64_t>(candidates.size()), total, work.sink_tokens,
        shares[head], std::min(counts[head], index.max_columns), index.max_columns,
        index.column_positions.data() + head * columns, &of_columns,
        kernels::TiesGoLate(static_cast<int32_t>(head)));
    choice.recall = total > 0 ? static_cast<double>(of_columns.mass + of_diagonals.mass) /
                                    static_cast<double>(total)
                              : 0.0;
    choice.column_mass = of_columns.mass;
    choice.diagonal_mass = of_diagonals.mass;
    choice.total = total;
    choice.verticals_at_budget = of_columns.at_budget;
    choice.slashes_at_budget = of_diagonals.at_budget;
  });
  return absl::OkStatus();
}

absl::Status CpuCall::AdaptBudgets(const patterns::VerticalSlash& work) {
  std::vector<double> recall;
  for (const HeadChoice& choice : choices_) recall.push_back(choice.recall);
  reference::AdaptBudgets(recall, work.budget_counts.data());
  return absl::OkStatus();
}

absl::Status CpuCall::NoteChoices(const patterns::VerticalSlash& work, const LayerIndex& index,
                                  kernels::HeadChoice* choices) {
  for (int head = 0; head < work.heads; ++head) {
    const HeadChoice& of_head = choices_[head];
    choices[head] = {.columns = index.column_counts.data()[head],
                     .column_mass = of_head.column_mass,
                     .diagonal_mass = of_head.diagonal_mass,
                     .total = of_head.total};
    const uint64_t* const bits = index.diagonals.data() + int64_t{head} * index.diagonal_words;
    for (int64_t delta = 0; delta < work.blocks; ++delta) {
      if ((bits[delta / 64] >> delta % 64 & 1) == 0) continue;
      choices[head].diagonal_tiles +=
          kernels::DiagonalCost(/*by_tiles=*/true, work.content_blocks(), delta);
    }
  }
  return absl::OkStatus();
}

absl::Status CpuCall::CountRecall(const int64_t* kept, const int64_t* total, int32_t heads) {
  LayerStats& stats = device_.StatsOf(layer_);
  stats.recall = std::max(stats.recall, 0.0);
  for (int head = 0; head < heads; ++head) {
    stats.recall += kernels::RecallOf(kept[head], total[head]) / heads;
  }
  return absl::OkStatus();
}

absl::Status CpuCall::CountMove(const int64_t* work_before, const int64_t* work_after,
                                const float* factor) {
  if (*factor == 1.0f) return absl::OkStatus();
  LayerStats& stats = device_.StatsOf(layer_);
  ++stats.balanced;
  stats.anchor_missed += kernels::MissesAnchor(*work_before, *work_after, *factor) ? 1 : 0;
  return absl::OkStatus();
}

absl::Status CpuCall::CountSelection(const patterns::VerticalSlash& work, const LayerIndex& index) {
  LayerStats& stats = device_.StatsOf(layer_);
  const int64_t n = work.layout.local_tokens();
  const int32_t* const counts = index.column_counts.data();
  stats.verticals += std::accumulate(counts, counts + work.heads, 0.0) / work.heads;
  for (const HeadChoice& choice : choices_) {
    stats.slashes += static_cast<double>(choice.slashes) / work.heads;
    stats.verticals_at_budget += static_cast<double>(choice.verticals_at_budget) / work.heads;
    stats.slashes_at_budget += static_cast<double>(choice.slashes_at_budget) / work.heads;
  }
  // This rank's part of the recall; the sum over ranks is the layer's.
  std::vector<char> selected(work.heads * n, 0);
  for (int head = 0; head < work.heads; ++head) {
    for (int32_t c = 0; c < counts[head]; ++c) {
      const int64_t position = index.column_positions.data()[head * int64_t{index.max_columns} + c];
      if (work.layout.Owner(position) == work.layout.rank) {
        selected[head * n + work.layout.LocalIndex(position)] = 1;
      }
    }
  }
  std::vector<double> kept(work.heads);
  estimate_->KeptMass(kRecallStride, index.diagonals.data(), index.diagonal_words, selected.data(),
                      kept.data());
  if (work.layout.ranks > 1) {
    const Stopwatch watch(device_.exposed_seconds());
    RETURN_IF_ERROR(
        device_.communicator().AllReduceSum(Channel::kControl, kept.data(), kept.size()));
  }
  const int64_t sampled = (work.queries + kRecallStride - 1) / kRecallStride;
  stats.recall = std::max(stats.recall, 0.0) + std::accumulate(kept.begin(), kept.end(), 0.0) /
                                                   static_cast<double>(work.heads * sampled);
  return absl::OkStatus();
}

absl::Status CpuCall::CountProbe(const patterns::VerticalSlash& work, ProbedRows rows) {
  const int64_t n = work.layout.local_tokens();
  std::vector<int32_t> visited(work.heads, 0);
  for (int32_t e = 0; e < work.queries; ++e) {
    const int64_t position = work.query_positions.data()[e];
    if (work.layout.Owner(position) != work.layout.rank) continue;
    for (int head = 0; head < work.heads; ++head) {
      visited[head] +=
          kernels::VisitedShare(tensors_.lse[head * n + work.layout.LocalIndex(position)],
                                work.row_max.data()[head * work.queries + e],
                                work.row_sum.data()[head * work.queries + e]);
    }
  }
  if (work.layout.ranks > 1) {
    RETURN_IF_ERROR(Sum(patterns::SumType::kInt32, visited.data(), work.heads));
  }
  device_.StatsOf(layer_).AddProbe(visited, work.queries, tensors_.first_head, rows);
  return absl::OkStatus();
}

absl::Status CpuCall::Run(const kernels::BlockStep& step) {
  reference::RunBlockStep(device_.engine(), ChoosingQueries(), tensors_.k, step);
  return absl::OkStatus();
}

}  // namespace ringleader::attention
