#include "worker/attention/index/cuda_index_builder.h"

#include <algorithm>

#include "kernels/index/blocks.h"
#include "kernels/index/estimate.h"
#include "kernels/index/select.h"
#include "kernels/ops/cuda_call.h"
#include "worker/attention/cuda/device_slots.h"

namespace ringleader::attention {

namespace index = kernels::index;
using comm::Channel;
using comm::ElementType;
using kernels::ShardLayout;
using kernels::ops::Check;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

namespace {

int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <typename T>
Tensor Upload(const std::vector<T>& values, torch::ScalarType type) {
  Tensor pinned = torch::empty({static_cast<int64_t>(values.size())},
                               torch::TensorOptions().dtype(type).pinned_memory(true));
  std::copy(values.begin(), values.end(), pinned.mutable_data_ptr<T>());
  return pinned.to(torch::kCUDA, /*non_blocking=*/true);
}

}  // namespace

std::shared_ptr<const CudaDocuments> UploadDocuments(
    std::shared_ptr<const SequenceDocuments> documents, int estimate_queries) {
  const EstimateQueries estimate =
      ChooseEstimateQueries(documents->tokens, estimate_queries, documents.get());
  auto result = std::make_shared<CudaDocuments>();
  result->starts = Upload(documents->local_starts, torch::kInt);
  result->estimate_positions = Upload(estimate.positions, torch::kLong);
  result->estimate_starts = Upload(estimate.starts, torch::kLong);
  result->host = std::move(documents);
  return result;
}

kernels::ColumnSelection CudaLayerIndex::Columns() const {
  return {.positions = column_positions.const_data_ptr<int64_t>(),
          .counts = column_counts.const_data_ptr<int32_t>(),
          .max_columns = static_cast<int32_t>(column_positions.size(1))};
}

OwnerTiles TilesOf(const CudaLayerIndex& layer, int32_t heads, const ShardLayout& query_layout,
                   const ShardLayout& key_layout, const torch::TensorOptions& device) {
  OwnerTiles out{.tiles = {.pattern = layer.pattern,
                           .tile = layer.tile,
                           .window = layer.window,
                           .document_starts = layer.DocumentStarts()},
                 .lists = {}};
  if (layer.diagonals.defined()) {
    out.tiles.diagonals =
        reinterpret_cast<const uint64_t*>(layer.diagonals.const_data_ptr<int64_t>());
    out.tiles.diagonal_words = static_cast<int32_t>(layer.diagonals.size(1));
  }
  if (layer.pattern != kernels::TilePattern::kCsr) return out;
  const int64_t query_tiles = CeilDiv(query_layout.local_tokens(), layer.tile);
  const int64_t key_tiles = CeilDiv(key_layout.local_tokens(), layer.tile);
  // No list can be longer.
  const int64_t capacity =
      heads * query_tiles *
      std::min(key_tiles, int64_t{layer.kept_blocks} * (layer.block_size / layer.tile));
  const auto ints = device.dtype(torch::kInt);
  const Tensor row_offsets = torch::empty({heads, query_tiles + 1}, ints),
               columns = torch::empty({capacity}, ints),
               column_offsets = torch::empty({heads, key_tiles + 1}, ints),
               rows = torch::empty({capacity}, ints);
  const index::TileListsArgs lists = {
      .chosen = reinterpret_cast<const uint32_t*>(layer.chosen.const_data_ptr<int32_t>()),
      .query_layout = query_layout,
      .key_layout = key_layout,
      .document_starts = layer.DocumentStarts(),
      .heads = heads,
      .tile = layer.tile,
      .block_size = layer.block_size,
      .capacity = capacity,
      .row_offsets = row_offsets.mutable_data_ptr<int32_t>(),
      .columns = columns.mutable_data_ptr<int32_t>(),
      .column_offsets = column_offsets.mutable_data_ptr<int32_t>(),
      .rows = rows.mutable_data_ptr<int32_t>()};
  Check(index::BuildTileLists(lists, Stream()));
  out.tiles.row_offsets = lists.row_offsets;
  out.tiles.columns = lists.columns;
  out.tiles.column_offsets = lists.column_offsets;
  out.tiles.rows = lists.rows;
  out.lists = {row_offsets, columns, column_offsets, rows};
  return out;
}

CudaIndexBuilder::CudaIndexBuilder(const patterns::AttentionOptions& options,
                                   comm::DeviceCommunicator* communicator, DeviceTimers* timers)
    : options_(options), communicator_(communicator), timers_(*timers) {}

std::shared_ptr<CudaLayerIndex> CudaIndexBuilder::Build(const patterns::LayerBudget& budget,
                                                        const CudaIndexInputs& inputs,
                                                        const CounterSlots& counters) {
  auto layer = std::make_shared<CudaLayerIndex>();
  layer->tile = options_.tile;
  layer->documents = inputs.documents;
  if (budget.dense) return layer;
  switch (options_.pattern) {
    case patterns::Pattern::kDense:
      break;
    case patterns::Pattern::kSlidingWindow:
      layer->pattern = kernels::TilePattern::kWindow;
      layer->window = options_.window;
      break;
    case patterns::Pattern::kVerticalSlash:
      layer->pattern = kernels::TilePattern::kToeplitz;
      BuildVerticalSlash(budget, inputs, counters, *layer);
      break;
    case patterns::Pattern::kBlockTopK:
      layer->pattern = kernels::TilePattern::kCsr;
      BuildBlockTopK(inputs, *layer);
      break;
  }
  return layer;
}

void CudaIndexBuilder::Await(const absl::StatusOr<comm::DeviceTransfer>& transfer) {
  Check(AwaitTransfer(transfer, timers_, Stream()));
}

void CudaIndexBuilder::BuildVerticalSlash(const patterns::LayerBudget& budget,
                                          const CudaIndexInputs& inputs,
                                          const CounterSlots& counters, CudaLayerIndex& layer) {
  const cudaStream_t stream = Stream();
  const int ranks = communicator_->size();
  const auto heads = static_cast<int32_t>(inputs.q.size(1));
  const ShardLayout layout = inputs.layout_of(communicator_->rank());
  const int64_t n = inputs.k.size(0), tokens = layout.tokens, d = inputs.q.size(2);
  const int64_t blocks = CeilDiv(tokens, options_.tile);
  const CudaDocuments* const documents = inputs.documents.get();
  const int64_t count = documents == nullptr ? std::min<int64_t>(options_.estimate_queries, tokens)
                                             : documents->estimate_positions.size(0);
  const int64_t* const query_starts =
      documents == nullptr ? nullptr : documents->estimate_starts.const_data_ptr<int64_t>();
  const bool top_k = options_.select == patterns::Select::kTopK;
  // A slot at least, so that no list is empty memory.
  const auto max_columns = static_cast<int32_t>(
      std::min(tokens, std::max<int64_t>({budget.max_verticals, options_.sink_tokens, 1})));
  const int32_t sink_tokens = std::min(options_.sink_tokens, max_columns);
  const auto floats = inputs.q.options().dtype(torch::kFloat),
             ints = inputs.q.options().dtype(torch::kInt),
             longs = inputs.q.options().dtype(torch::kLong);

  // One rank has each of the estimate queries; all others add zeros.
  const Tensor positions = torch::empty({count}, longs), masses = torch::empty({2, heads}, floats),
               max_counts = torch::empty({2, heads}, ints);
  Tensor queries = inputs.q.slice(0, n - std::min(count, n), n);
  const bool gathers = ranks > 1 || documents != nullptr;
  if (gathers) queries = torch::empty({count, heads, d}, inputs.q.options());
  Check(PrepareEstimate(
      {.q = View(inputs.q),
       .layout = layout,
       .count = static_cast<int32_t>(count),
       .chosen =
           documents == nullptr ? nullptr : documents->estimate_positions.const_data_ptr<int64_t>(),
       .queries = gathers ? kernels::ops::MutableBf16(queries) : nullptr,
       .positions = positions.mutable_data_ptr<int64_t>(),
       .column_mass = top_k ? 1.0f : static_cast<float>(budget.vertical_mass),
       .diagonal_mass = top_k ? 1.0f : static_cast<float>(budget.slash_mass),
       .max_columns = static_cast<int32_t>(std::min<int64_t>(budget.max_verticals, max_columns)),
       .max_diagonals = static_cast<int32_t>(std::min<int64_t>(budget.max_slashes, blocks)),
       .masses = masses.mutable_data_ptr<float>(),
       .max_counts = max_counts.mutable_data_ptr<int32_t>()},
      stream));
  if (ranks > 1) {
    Await(communicator_->AllReduceSum(Channel::kControl, queries.mutable_data_ptr(),
                                      queries.numel(), ElementType::kBfloat16, stream));
  }

  // The parts of all ranks; with one rank they are what the selection takes.
  const IndexParts parts{.heads = heads, .blocks = blocks, .max_columns = max_columns};
  const Tensor gathered = torch::empty({ranks, parts.elements()}, ints);
  int32_t* const mine =
      gathered.mutable_data_ptr<int32_t>() + communicator_->rank() * parts.elements();
  const Tensor row_max = torch::empty({heads, count}, floats),
               row_sum = torch::empty({heads, count}, longs),
               column_mass = torch::empty({heads, n}, ints);
  const index::EstimateArgs estimate = {.q = View(queries),
                                        .query_positions = positions.const_data_ptr<int64_t>(),
                                        .query_starts = query_starts,
                                        .k = View(inputs.k),
                                        .key_layout = layout,
                                        .tile = options_.tile,
                                        .scale = inputs.scale,
                                        .row_max = row_max.mutable_data_ptr<float>(),
                                        .row_sum = row_sum.mutable_data_ptr<int64_t>(),
                                        .column_mass = column_mass.mutable_data_ptr<int32_t>(),
                                        .diagonal_mass = mine};
  Check(index::EstimateRowMax(estimate, stream));
  if (ranks > 1) {
    Await(communicator_->AllReduceMax(Channel::kControl, row_max.mutable_data_ptr(),
                                      row_max.numel(), ElementType::kFloat32, stream));
  }
  Check(index::EstimateRowSum(estimate, stream));
  if (ranks > 1) {
    Await(communicator_->AllReduceSum(Channel::kControl, row_sum.mutable_data_ptr(),
                                      row_sum.numel(), ElementType::kInt64, stream));
  }
  Check(index::EstimateMass(estimate, stream));
  Check(index::SelectColumnCandidates({.column_mass = column_mass.const_data_ptr<int32_t>(),
                                       .layout = layout,
                                       .heads = heads,
                                       .max_columns = max_columns,
                                       .sink_tokens = sink_tokens,
                                       .mass = mine + parts.candidate_mass(),
                                       .positions = mine + parts.candidate_positions()},
                                      stream));
  int32_t* diagonal_mass = mine;
  int32_t* candidate_mass = mine + parts.candidate_mass();
  int32_t* candidate_positions = mine + parts.candidate_positions();
  Tensor merged;
  if (ranks > 1) {
    Await(communicator_->AllGather(Channel::kControl, mine, parts.elements() * sizeof(int32_t),
                                   gathered.mutable_data_ptr(), stream));
    const IndexParts all{.heads = heads, .blocks = blocks, .max_columns = max_columns * ranks};
    merged = torch::empty({all.elements()}, ints);
    diagonal_mass = merged.mutable_data_ptr<int32_t>();
    candidate_mass = diagonal_mass + all.candidate_mass();
    candidate_positions = diagonal_mass + all.candidate_positions();
    Check(MergeIndexParts(parts, gathered.const_data_ptr<int32_t>(), ranks, diagonal_mass,
                          candidate_mass, candidate_positions, stream));
  }

  layer.column_positions = torch::empty({heads, max_columns}, longs);
  layer.column_counts = torch::empty({heads}, ints);
  layer.diagonals = torch::empty({heads, CeilDiv(blocks, 64)}, longs);
  const Tensor diagonal_counts = torch::empty({heads}, ints),
               residue_offsets = torch::empty({heads, ranks + 1}, ints),
               residues = torch::empty({heads, blocks}, ints), load = torch::empty({ranks}, longs),
               head_masses = torch::empty({heads, 3}, longs);
  const Tensor scratch = kernels::ops::Scratch(
      static_cast<int64_t>(index::SelectWorkspaceBytes(heads, tokens)), inputs.q);
  const index::SelectArgs select = {
      .candidate_mass = candidate_mass,
      .candidate_positions = candidate_positions,
      .diagonal_mass = diagonal_mass,
      .column_budgets = {.mass = masses.const_data_ptr<float>(),
                         .max_count = max_counts.const_data_ptr<int32_t>()},
      .diagonal_budgets = {.mass = masses.const_data_ptr<float>() + heads,
                           .max_count = max_counts.const_data_ptr<int32_t>() + heads},
      .layout = layout,
      .heads = heads,
      .tile = options_.tile,
      .max_columns = max_columns,
      .sink_tokens = sink_tokens,
      .local_blocks = options_.local_blocks,
      .workspace = scratch.mutable_data_ptr(),
      .column_positions = layer.column_positions.mutable_data_ptr<int64_t>(),
      .column_counts = layer.column_counts.mutable_data_ptr<int32_t>(),
      .diagonals = reinterpret_cast<uint64_t*>(layer.diagonals.mutable_data_ptr<int64_t>()),
      .diagonal_counts = diagonal_counts.mutable_data_ptr<int32_t>(),
      .residue_offsets = residue_offsets.mutable_data_ptr<int32_t>(),
      .residues = residues.mutable_data_ptr<int32_t>(),
      .load = load.mutable_data_ptr<int64_t>(),
      .masses = reinterpret_cast<index::IndexMass*>(head_masses.mutable_data_ptr<int64_t>())};
  Check(index::Select(select, stream));
  Check(CountSelection({.selected = select,
                        .estimate_queries = static_cast<int32_t>(count),
                        .query_positions = positions.const_data_ptr<int64_t>(),
                        .query_starts = query_starts,
                        .document_starts = layer.DocumentStarts(),
                        .counters = counters.counters,
                        .owner_tiles = counters.owner_tiles},
                       stream));
  layer.column_keys = torch::empty({heads, max_columns, d}, inputs.q.options());
  layer.column_values = torch::empty_like(layer.column_keys);
}

void CudaIndexBuilder::BuildBlockTopK(const CudaIndexInputs& inputs, CudaLayerIndex& layer) {
  const cudaStream_t stream = Stream();
  const int ranks = communicator_->size(), tile = options_.tile;
  const ShardLayout layout = inputs.layout_of(communicator_->rank());
  const int64_t heads = inputs.q.size(1), kv_heads = inputs.k.size(1), d = inputs.q.size(2);
  const int64_t local_tiles = CeilDiv(inputs.k.size(0), tile), row = kv_heads * d;
  const int64_t blocks = CeilDiv(layout.tokens, options_.block_size);
  const auto floats = inputs.q.options().dtype(torch::kFloat);
  const Tensor query_sums = torch::empty({local_tiles, heads, d}, floats),
               gathered = torch::empty({ranks, local_tiles, row}, floats),
               means = torch::empty({kv_heads, blocks, d}, floats);
  float* const mine =
      gathered.mutable_data_ptr<float>() + communicator_->rank() * local_tiles * row;
  Check(index::TileSums(View(inputs.q), tile, query_sums.mutable_data_ptr<float>(), stream));
  Check(index::TileSums(View(inputs.k), tile, mine, stream));
  Tensor key_sums = gathered;
  if (ranks > 1) {
    Await(communicator_->AllGather(Channel::kControl, mine, local_tiles * row * sizeof(float),
                                   gathered.mutable_data_ptr(), stream));
    key_sums = torch::empty_like(gathered);
    Check(OrderTileSums(gathered.const_data_ptr<float>(), layout, tile, row,
                        key_sums.mutable_data_ptr<float>(), stream));
  }
  layer.block_size = options_.block_size;
  layer.kept_blocks = static_cast<int32_t>(std::min<int64_t>(options_.topk_blocks + 1, blocks));
  layer.chosen = torch::empty({heads, local_tiles, index::BlockWords(static_cast<int32_t>(blocks))},
                              inputs.q.options().dtype(torch::kInt));
  Check(index::SelectBlocksByMean(
      {.query_sums = query_sums.const_data_ptr<float>(),
       .key_sums = key_sums.const_data_ptr<float>(),
       .query_layout = layout,
       .document_starts = layer.DocumentStarts(),
       .heads = static_cast<int32_t>(heads),
       .kv_heads = static_cast<int32_t>(kv_heads),
       .head_dim = static_cast<int32_t>(d),
       .tile = tile,
       .block_size = options_.block_size,
       .topk_blocks = options_.topk_blocks,
       .means = means.mutable_data_ptr<float>(),
       .chosen = reinterpret_cast<uint32_t*>(layer.chosen.mutable_data_ptr<int32_t>())},
      stream));
}

}  // namespace ringleader::attention
