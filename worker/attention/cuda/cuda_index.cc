#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "kernels/index/between_ranks.h"
#include "kernels/index/gates/block_steps.h"
#include "kernels/index/move.h"
#include "kernels/index/visited_share.h"
#include "kernels/ops/cuda_call.h"
#include "patterns/index/vertical_slash.h"
#include "worker/attention/cuda/cuda_attention_call.h"
#include "worker/attention/cuda/device_slots.h"

namespace ringleader::attention {

namespace index = kernels::index;
using comm::Channel;
using comm::ElementType;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

namespace {

const int64_t* QueryStarts(const patterns::VerticalSlash& work) {
  return work.documents == nullptr ? nullptr : work.documents->estimate_starts.data();
}

}  // namespace

DeviceMemory CudaCall::Allocate(int64_t bytes) {
  auto tensor =
      std::make_shared<Tensor>(torch::empty({bytes}, tensors_.q.options().dtype(torch::kByte)));
  void* const data = tensor->mutable_data_ptr();
  return {std::move(tensor), data};
}

DeviceMemory CudaCall::Upload(const void* values, int64_t bytes) {
  return UploadBytes(values, bytes);
}

absl::Status CudaCall::Sum(patterns::SumType type, void* values, int64_t count) {
  const ElementType element = type == patterns::SumType::kQueries ? ElementType::kBfloat16
                              : type == patterns::SumType::kInt32 ? ElementType::kInt32
                                                                  : ElementType::kInt64;
  return AwaitTransfer(
      device_.communicator().AllReduceSum(Channel::kControl, values, count, element, Stream()),
      device_.stats().timers(), Stream());
}

absl::Status CudaCall::Max(float* values, int64_t count) {
  return AwaitTransfer(device_.communicator().AllReduceMax(Channel::kControl, values, count,
                                                           ElementType::kFloat32, Stream()),
                       device_.stats().timers(), Stream());
}

absl::Status CudaCall::Gather(void* values, int64_t bytes) {
  const void* const own = static_cast<char*>(values) + device_.communicator().rank() * bytes;
  return AwaitTransfer(
      device_.communicator().AllGather(Channel::kControl, own, bytes, values, Stream()),
      device_.stats().timers(), Stream());
}

absl::Status CudaCall::PrepareEstimate(const patterns::VerticalSlash& work) {
  run_sums_ = torch::empty({work.heads, work.queries, kernels::RunsOf(work.layout.local_tokens())},
                           tensors_.q.options().dtype(torch::kFloat));
  return index::PrepareEstimate(
      {.q = View(tensors_.q),
       .layout = work.layout,
       .count = work.queries,
       .chosen = work.documents == nullptr ? nullptr : work.documents->estimate_positions.data(),
       .spread = work.spread,
       .queries = reinterpret_cast<__nv_bfloat16*>(work.query_rows.data()),
       .positions = work.query_positions.data(),
       .column_mass = work.column_mass,
       .diagonal_mass = work.diagonal_mass,
       .max_columns = work.max_verticals,
       .max_diagonals = work.max_slashes,
       .masses = work.budget_masses.data(),
       .max_counts = work.budget_counts.data()},
      Stream());
}

index::EstimateArgs CudaCall::EstimateArgsOf(const patterns::VerticalSlash& work) const {
  kernels::TokenMajor<const __nv_bfloat16> queries = View(tensors_.q);
  if (work.query_rows.data() == nullptr) {
    queries.data += (queries.tokens - work.queries) * queries.token_stride;
  } else {
    queries.data = reinterpret_cast<const __nv_bfloat16*>(work.query_rows.data());
    queries.token_stride = int64_t{queries.heads} * queries.head_dim;
    queries.head_stride = queries.head_dim;
  }
  queries.tokens = work.queries;
  return {.q = queries,
          .query_positions = work.query_positions.data(),
          .query_starts = QueryStarts(work),
          .k = View(tensors_.k),
          .key_layout = work.layout,
          .tile = work.tile,
          .scale = work.scale,
          .row_max = work.row_max.data(),
          .row_sum = work.row_sum.data(),
          .run_sums = run_sums_.mutable_data_ptr<float>(),
          .column_mass = work.column_mass_of.data(),
          .diagonal_mass = work.diagonal_mass_of.data()};
}

absl::Status CudaCall::RowMax(const patterns::VerticalSlash& work) {
  return index::EstimateRowMax(EstimateArgsOf(work), Stream());
}

absl::Status CudaCall::RowSum(const patterns::VerticalSlash& work) {
  return index::EstimateRowSum(EstimateArgsOf(work), Stream());
}

absl::Status CudaCall::Mass(const patterns::VerticalSlash& work) {
  const Tensor run_sums = run_sums_;  // freed in stream order
  const index::EstimateArgs args = EstimateArgsOf(work);
  run_sums_.reset();
  return index::EstimateMass(args, Stream());
}

absl::Status CudaCall::Candidates(const patterns::VerticalSlash& work) {
  return index::SelectColumnCandidates({.column_mass = work.column_mass_of.data(),
                                        .layout = work.layout,
                                        .heads = work.heads,
                                        .max_columns = work.max_columns,
                                        .sink_tokens = work.sink_tokens,
                                        .mass = work.CandidateMass(work.layout.rank),
                                        .positions = work.CandidatePositions(work.layout.rank)},
                                       Stream());
}

absl::Status CudaCall::Select(const patterns::VerticalSlash& work, const LayerIndex& layer) {
  const int64_t heads = work.heads, blocks = work.blocks, ranks = work.layout.ranks;
  const auto ints = tensors_.q.options().dtype(torch::kInt),
             longs = tensors_.q.options().dtype(torch::kLong);
  const Tensor diagonal_counts = torch::empty({heads}, ints),
               residue_offsets = torch::empty({heads, ranks + 1}, ints),
               residues = torch::empty({heads, blocks}, ints), load = torch::empty({ranks}, longs),
               head_masses = torch::empty(
                   {heads, static_cast<int64_t>(sizeof(index::IndexMass) / sizeof(int64_t))},
                   longs);
  const Tensor scratch = kernels::ops::Scratch(
      static_cast<int64_t>(index::SelectWorkspaceBytes(work.heads, work.layout.tokens)),
      tensors_.q);
  selected_memory_ = {diagonal_counts, residue_offsets, residues, load, head_masses, scratch};
  selected_ = {
      .candidate_mass = work.CandidateMass(0),
      .candidate_positions = work.CandidatePositions(0),
      .candidate_stride = 2 * work.candidate_slots(),
      .diagonal_mass = work.diagonal_mass_of.data(),
      .column_budgets = {.mass = work.budget_masses.data(), .max_count = work.budget_counts.data()},
      .diagonal_budgets = {.mass = work.budget_masses.data() + heads,
                           .max_count = work.budget_counts.data() + heads},
      .diagonals_by_tiles = work.slashes_by_tiles,
      .content_tokens = work.content,
      .layout = work.layout,
      .heads = work.heads,
      .tile = work.tile,
      .max_columns = work.max_columns,
      .sink_tokens = work.sink_tokens,
      .local_blocks = work.local_blocks,
      .workspace = scratch.mutable_data_ptr(),
      .column_positions = layer.column_positions.data(),
      .column_counts = layer.column_counts.data(),
      .diagonals = layer.diagonals.data(),
      .diagonal_counts = diagonal_counts.mutable_data_ptr<int32_t>(),
      .residue_offsets = residue_offsets.mutable_data_ptr<int32_t>(),
      .residues = residues.mutable_data_ptr<int32_t>(),
      .load = load.mutable_data_ptr<int64_t>(),
      .masses = reinterpret_cast<index::IndexMass*>(head_masses.mutable_data_ptr<int64_t>())};
  return index::Select(selected_, Stream());
}

absl::Status CudaCall::AdaptBudgets(const patterns::VerticalSlash& work) {
  return index::AdaptBudgets(selected_.masses, work.heads, work.budget_counts.data(), Stream());
}

absl::Status CudaCall::NoteChoices(const patterns::VerticalSlash& /*work*/,
                                   const LayerIndex& /*index*/, kernels::HeadChoice* choices) {
  return index::NoteChoices(selected_, choices, Stream());
}

absl::Status CudaCall::CountRecall(const int64_t* kept, const int64_t* total, int32_t heads) {
  device_.stats().SetEstimated(layer_);
  return index::CountRecall(kept, total, heads, device_.stats().SlotsOf(layer_).counters, Stream());
}

absl::Status CudaCall::CountMove(const int64_t* work_before, const int64_t* work_after,
                                 const float* factor) {
  return index::CountMove(work_before, work_after, factor, device_.stats().SlotsOf(layer_).counters,
                          Stream());
}

absl::Status CudaCall::CountSelection(const patterns::VerticalSlash& work,
                                      const LayerIndex& layer) {
  // Nothing is known of which of the queries a column's mass is of: what diagonals cover of it
  // would be a guess where queries lie all over the sequence.
  if (!work.spread) device_.stats().SetEstimated(layer_);
  const CounterSlots slots = device_.stats().SlotsOf(layer_);
  const std::vector<Tensor> memory = std::exchange(selected_memory_, {});  // freed in stream order
  return index::CountSelection({.selected = selected_,
                                .estimate_queries = work.spread ? 0 : work.queries,
                                .query_positions = work.query_positions.data(),
                                .query_starts = QueryStarts(work),
                                .document_starts = layer.document_starts(),
                                .counters = slots.counters,
                                .owner_tiles = slots.owner_tiles},
                               Stream());
}

absl::Status CudaCall::CountProbe(const patterns::VerticalSlash& work, ProbedRows rows) {
  run_sums_.reset();  // freed in stream order
  const Tensor visited = torch::empty({work.heads}, tensors_.q.options().dtype(torch::kInt));
  RETURN_IF_ERROR(index::CountVisited({.layout = work.layout,
                                       .heads = work.heads,
                                       .queries = work.queries,
                                       .positions = work.query_positions.data(),
                                       .row_max = work.row_max.data(),
                                       .row_sum = work.row_sum.data(),
                                       .lse = tensors_.lse.const_data_ptr<float>(),
                                       .visited = visited.mutable_data_ptr<int32_t>()},
                                      Stream()));
  if (work.layout.ranks > 1) {
    RETURN_IF_ERROR(
        Sum(patterns::SumType::kInt32, visited.mutable_data_ptr<int32_t>(), work.heads));
  }
  device_.stats().AddProbe(layer_, visited, work.queries, tensors_.first_head, rows);
  return absl::OkStatus();
}

absl::Status CudaCall::Silence(const DeviceArray<int64_t>& rows, float value) {
  if (rows.size == 0) return absl::OkStatus();
  silent_rows_ =
      torch::from_blob(rows.data(), {rows.size}, tensors_.q.options().dtype(torch::kLong));
  Tensor q = tensors_.q.variable_data();  // autograd counts no version: LetSpeak() undoes it
  silent_queries_ = q.index_select(0, silent_rows_);
  q.index_fill_(0, silent_rows_, value);
  return absl::OkStatus();
}

absl::Status CudaCall::LetSpeak() {
  if (!silent_rows_.defined()) return absl::OkStatus();
  tensors_.q.variable_data().index_copy_(0, silent_rows_, silent_queries_);
  silent_rows_.reset();  // freed in stream order
  silent_queries_.reset();
  return absl::OkStatus();
}

absl::Status CudaCall::Run(const kernels::BlockStep& step) {
  const auto q = View(tensors_.q), k = View(tensors_.k);
  const Tensor scratch = kernels::ops::Scratch(
      static_cast<int64_t>(index::BlockStepWorkspaceBytes(q, k, step)), tensors_.q);
  return index::RunBlockStep(q, k, step, scratch.mutable_data_ptr(), Stream());
}

}  // namespace ringleader::attention
