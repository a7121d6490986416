#include "worker/attention/index/index_builder.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "base/status_macros.h"
#include "kernels/reference/index/index_estimate.h"
#include "kernels/reference/index/index_select.h"
#include "kernels/reference/tiles/block_topk.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

using comm::Channel;
using kernels::ShardLayout;
using kernels::TokenMajor;
namespace reference = kernels::reference;

namespace {

// Estimate queries on which recall is measured: every so many.
constexpr int kRecallStride = 8;

}  // namespace

IndexBuilder::IndexBuilder(const patterns::AttentionOptions& options,
                           comm::Communicator* communicator, reference::Engine* engine,
                           double* exposed_seconds)
    : options_(options),
      communicator_(communicator),
      engine_(*engine),
      exposed_seconds_(exposed_seconds) {}

absl::StatusOr<std::shared_ptr<LayerIndex>> IndexBuilder::Build(const patterns::LayerBudget& budget,
                                                                const IndexInputs& inputs,
                                                                LayerStats& stats) {
  auto index = std::make_shared<LayerIndex>();
  index->tile = options_.tile;
  index->documents = inputs.documents;
  if (budget.dense) return index;
  switch (options_.pattern) {
    case patterns::Pattern::kDense:
      break;
    case patterns::Pattern::kSlidingWindow:
      index->pattern = kernels::TilePattern::kWindow;
      index->window = options_.window;
      break;
    case patterns::Pattern::kVerticalSlash:
      index->pattern = kernels::TilePattern::kToeplitz;
      RETURN_IF_ERROR(BuildVerticalSlash(budget, inputs, *index, stats));
      break;
    case patterns::Pattern::kBlockTopK:
      index->pattern = kernels::TilePattern::kCsr;
      RETURN_IF_ERROR(BuildBlockTopK(inputs, *index));
      break;
  }
  return index;
}

absl::Status IndexBuilder::ReduceMax(std::vector<float>& values) {
  if (communicator_->size() == 1) return absl::OkStatus();
  const Stopwatch watch(exposed_seconds_);
  return communicator_->AllReduceMax(Channel::kControl, values.data(), values.size());
}

absl::Status IndexBuilder::ReduceSum(std::vector<int64_t>& values) {
  const int ranks = communicator_->size();
  if (ranks == 1) return absl::OkStatus();
  const Stopwatch watch(exposed_seconds_);
  std::vector<int64_t> all(values.size() * ranks);
  RETURN_IF_ERROR(communicator_->AllGather(Channel::kControl, values.data(),
                                           values.size() * sizeof(int64_t), all.data()));
  std::fill(values.begin(), values.end(), 0);
  for (size_t i = 0; i < all.size(); ++i) values[i % values.size()] += all[i];
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> IndexBuilder::GatherQueries(
    const IndexInputs& inputs, const std::vector<int64_t>& positions) {
  const TokenMajor<const float>& q = inputs.q;
  const ShardLayout layout = inputs.layout_of(communicator_->rank());
  const int64_t row = int64_t{q.heads} * q.head_dim;
  // One rank has each query; all others add zeros.
  std::vector<float> queries(positions.size() * row, 0.0f);
  for (size_t e = 0; e < positions.size(); ++e) {
    if (layout.Owner(positions[e]) != layout.rank) continue;
    const int64_t i = layout.LocalIndex(positions[e]);
    for (int head = 0; head < q.heads; ++head) {
      std::copy_n(q.data + i * q.token_stride + head * q.head_stride, q.head_dim,
                  queries.data() + e * row + int64_t{head} * q.head_dim);
    }
  }
  if (communicator_->size() > 1) {
    const Stopwatch watch(exposed_seconds_);
    RETURN_IF_ERROR(communicator_->AllReduceSum(Channel::kControl, queries.data(), queries.size()));
  }
  return queries;
}

absl::Status IndexBuilder::BuildVerticalSlash(const patterns::LayerBudget& budget,
                                              const IndexInputs& inputs, LayerIndex& index,
                                              LayerStats& stats) {
  const int ranks = communicator_->size(), heads = inputs.q.heads;
  const ShardLayout layout = inputs.layout_of(communicator_->rank());
  const int64_t n = inputs.k.tokens, tokens = layout.tokens;
  const int64_t blocks = (tokens + options_.tile - 1) / options_.tile;
  const EstimateQueries chosen =
      ChooseEstimateQueries(tokens, options_.estimate_queries, inputs.documents.get());
  const auto count = static_cast<int64_t>(chosen.positions.size());
  ASSIGN_OR_RETURN(const std::vector<float> queries, GatherQueries(inputs, chosen.positions));

  std::vector<float> row_max(heads * count);
  std::vector<int64_t> row_sum(heads * count);
  std::vector<int32_t> column_mass(heads * n), diagonal_part(heads * blocks);
  const int64_t row = int64_t{heads} * inputs.q.head_dim;
  ASSIGN_OR_RETURN(
      reference::IndexEstimate estimate,
      reference::IndexEstimate::Create(
          engine_, {.q = {.data = queries.data(),
                          .tokens = count,
                          .heads = heads,
                          .head_dim = inputs.q.head_dim,
                          .token_stride = row,
                          .head_stride = inputs.q.head_dim},
                    .query_positions = chosen.positions.data(),
                    .query_starts = chosen.starts.empty() ? nullptr : chosen.starts.data(),
                    .k = inputs.k,
                    .key_layout = layout,
                    .tile = options_.tile,
                    .scale = inputs.scale,
                    .row_max = row_max.data(),
                    .row_sum = row_sum.data(),
                    .column_mass = column_mass.data(),
                    .diagonal_mass = diagonal_part.data()}));
  estimate.RowMax();
  RETURN_IF_ERROR(ReduceMax(row_max));
  estimate.RowSum();
  RETURN_IF_ERROR(ReduceSum(row_sum));
  estimate.Mass();

  // One exchange for what is left: masses of diagonals, of all columns, and the best columns.
  const bool top_k = options_.select == patterns::Select::kTopK;
  const int32_t max_columns = static_cast<int32_t>(
      std::min<int64_t>(tokens, std::max<int64_t>(budget.max_verticals, options_.sink_tokens)));
  const int32_t candidates = static_cast<int32_t>(std::min<int64_t>(max_columns, n));
  std::vector<int64_t> sums(heads * (blocks + 1), 0);
  std::copy(diagonal_part.begin(), diagonal_part.end(), sums.begin());
  std::vector<reference::ColumnCandidate> mine(int64_t{heads} * candidates);
  engine_.pool().For(heads, [&](int64_t head, int) {
    const int32_t* mass = column_mass.data() + head * n;
    sums[heads * blocks + head] = std::accumulate(mass, mass + n, int64_t{0});
    reference::CandidateColumns(mass, layout, options_.sink_tokens, candidates,
                                mine.data() + head * candidates);
  });
  RETURN_IF_ERROR(ReduceSum(sums));
  std::vector<reference::ColumnCandidate> all(mine.size() * ranks);
  if (ranks > 1) {
    const Stopwatch watch(exposed_seconds_);
    RETURN_IF_ERROR(communicator_->AllGather(Channel::kControl, mine.data(),
                                             mine.size() * sizeof(mine[0]), all.data()));
  } else {
    all = mine;
  }

  index.diagonal_words = static_cast<int32_t>((blocks + 63) / 64);
  index.diagonals.resize(int64_t{heads} * index.diagonal_words);
  index.max_columns = max_columns;
  index.column_positions.resize(heads * int64_t{max_columns});
  index.column_counts.resize(heads);
  std::vector<int32_t> slashes(heads);
  engine_.pool().For(heads, [&](int64_t head, int) {
    std::vector<int32_t> masses(sums.begin() + head * blocks, sums.begin() + (head + 1) * blocks);
    slashes[head] =
        reference::SelectDiagonals(masses.data(), blocks, options_.local_blocks,
                                   top_k ? 1.0f : static_cast<float>(budget.slash_mass),
                                   static_cast<int32_t>(budget.max_slashes),
                                   index.diagonals.data() + head * index.diagonal_words);
    std::vector<reference::ColumnCandidate> of_head;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto begin = all.begin() + (int64_t{rank} * heads + head) * candidates;
      of_head.insert(of_head.end(), begin, begin + candidates);
    }
    index.column_counts[head] = reference::SelectColumns(
        of_head.data(), static_cast<int64_t>(of_head.size()), sums[heads * blocks + head],
        options_.sink_tokens, top_k ? 1.0f : static_cast<float>(budget.vertical_mass),
        static_cast<int32_t>(budget.max_verticals), max_columns,
        index.column_positions.data() + head * max_columns);
  });
  stats.verticals +=
      std::accumulate(index.column_counts.begin(), index.column_counts.end(), 0.0) / heads;
  stats.slashes += std::accumulate(slashes.begin(), slashes.end(), 0.0) / heads;

  // This rank's part of the recall; the sum over ranks is the layer's.
  std::vector<char> selected(heads * n, 0);
  for (int head = 0; head < heads; ++head) {
    for (int32_t c = 0; c < index.column_counts[head]; ++c) {
      const int64_t position = index.column_positions[head * int64_t{max_columns} + c];
      if (layout.Owner(position) == layout.rank) {
        selected[head * n + layout.LocalIndex(position)] = 1;
      }
    }
  }
  std::vector<double> kept(heads);
  estimate.KeptMass(kRecallStride, index.diagonals.data(), index.diagonal_words, selected.data(),
                    kept.data());
  const int64_t sampled = (count + kRecallStride - 1) / kRecallStride;
  if (ranks > 1) {
    const Stopwatch watch(exposed_seconds_);
    RETURN_IF_ERROR(communicator_->AllReduceSum(Channel::kControl, kept.data(), kept.size()));
  }
  stats.recall = std::max(stats.recall, 0.0) + std::accumulate(kept.begin(), kept.end(), 0.0) /
                                                   static_cast<double>(heads * sampled);
  return absl::OkStatus();
}

absl::Status IndexBuilder::BuildBlockTopK(const IndexInputs& inputs, LayerIndex& index) {
  const int ranks = communicator_->size(), tile = options_.tile;
  const ShardLayout layout = inputs.layout_of(communicator_->rank());
  const int64_t local_tiles = (inputs.k.tokens + tile - 1) / tile;
  const int64_t row = int64_t{inputs.k.heads} * inputs.k.head_dim;
  std::vector<float> mine(local_tiles * row), all(local_tiles * ranks * row);
  reference::TileKeySums(engine_, inputs.k, tile, mine.data());
  if (ranks > 1) {
    const Stopwatch watch(exposed_seconds_);
    RETURN_IF_ERROR(communicator_->AllGather(Channel::kControl, mine.data(),
                                             mine.size() * sizeof(float), all.data()));
  } else {
    all = mine;
  }
  // From the order of ranks to the order of the sequence.
  std::vector<float> sums(all.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const ShardLayout owner = inputs.layout_of(rank);
    for (int64_t b = 0; b < local_tiles; ++b) {
      std::copy_n(all.begin() + (rank * local_tiles + b) * row, row,
                  sums.begin() + owner.Position(b * tile) / tile * row);
    }
  }
  const int32_t* const document_starts = index.TilesOf(layout.rank).document_starts;
  const std::vector<char> selected =
      reference::SelectBlocks(engine_, {.q = inputs.q,
                                        .query_layout = layout,
                                        .document_starts = document_starts,
                                        .key_sums = sums.data(),
                                        .kv_heads = inputs.k.heads,
                                        .tile = tile,
                                        .block_size = options_.block_size,
                                        .topk_blocks = options_.topk_blocks});
  for (int rank = 0; rank < ranks; ++rank) {
    index.owners.push_back(reference::CsrOfBlocks(selected, inputs.q.heads, tile,
                                                  options_.block_size, layout,
                                                  inputs.layout_of(rank), document_starts));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::attention
