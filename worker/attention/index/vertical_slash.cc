#include "worker/attention/index/vertical_slash.h"

#include <algorithm>

#include "base/status_macros.h"

namespace ringleader::attention {

namespace {

// The numbers of a build, no memory yet.
VerticalSlash Plan(const patterns::AttentionOptions& options, const patterns::LayerBudget& budget,
                   const IndexInputs& inputs) {
  const int64_t tokens = inputs.layout.tokens, blocks = (tokens + options.tile - 1) / options.tile;
  const bool top_k = options.select == patterns::Select::kTopK;
  // A slot at least, so that no list is empty memory.
  const auto max_columns = static_cast<int32_t>(
      std::min(tokens, std::max<int64_t>({budget.max_verticals, options.sink_tokens, 1})));
  return {
      .layout = inputs.layout,
      .heads = inputs.heads,
      .tile = options.tile,
      .scale = inputs.scale,
      .queries = static_cast<int32_t>(inputs.documents == nullptr
                                          ? std::min<int64_t>(options.estimate_queries, tokens)
                                          : inputs.documents->estimate_positions.size),
      .documents = inputs.documents.get(),
      .column_mass = top_k ? 1.0f : static_cast<float>(budget.vertical_mass),
      .diagonal_mass = top_k ? 1.0f : static_cast<float>(budget.slash_mass),
      .max_verticals = static_cast<int32_t>(std::min<int64_t>(budget.max_verticals, max_columns)),
      .max_slashes = static_cast<int32_t>(std::min<int64_t>(budget.max_slashes, blocks)),
      .sink_tokens = std::min(options.sink_tokens, max_columns),
      .local_blocks = options.local_blocks,
      .parts = {.heads = inputs.heads, .blocks = blocks, .max_columns = max_columns}};
}

// Steps 1 to 3: what the estimate queries attend to, by column of this rank and by diagonal.
absl::Status Estimate(VerticalSlash& work, const IndexInputs& inputs, IndexDevice& device) {
  const bool ranks = work.layout.ranks > 1;
  const int64_t slots = int64_t{work.heads} * work.queries;
  const int64_t query_elements = slots * inputs.head_dim;
  if (ranks || work.documents != nullptr) {
    work.query_rows = AllocateArray<std::byte>(device, query_elements * device.element_bytes());
  }
  work.query_positions = AllocateArray<int64_t>(device, work.queries);
  RETURN_IF_ERROR(device.PrepareEstimate(work));
  // One rank has each of the estimate queries; all others add zeros.
  if (ranks) {
    RETURN_IF_ERROR(device.Sum(SumType::kQueries, work.query_rows.data(), query_elements));
  }
  work.gathered = AllocateArray<int32_t>(device, work.layout.ranks * work.parts.elements());
  work.row_max = AllocateArray<float>(device, slots);
  work.row_sum = AllocateArray<int64_t>(device, slots);
  work.column_mass_of = AllocateArray<int32_t>(device, work.heads * work.layout.local_tokens());
  RETURN_IF_ERROR(device.RowMax(work));
  if (ranks) RETURN_IF_ERROR(device.Max(work.row_max.data(), slots));
  RETURN_IF_ERROR(device.RowSum(work));
  if (ranks) RETURN_IF_ERROR(device.Sum(SumType::kInt64, work.row_sum.data(), slots));
  return device.Mass(work);
}

// Step 4: every rank's best columns and masses of diagonals, in one exchange.
absl::Status Merge(VerticalSlash& work, IndexDevice& device) {
  RETURN_IF_ERROR(device.Candidates(work));
  if (work.layout.ranks == 1) {
    work.merged = work.gathered;
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(device.Gather(work.gathered.data(),
                                work.parts.elements() * static_cast<int64_t>(sizeof(int32_t))));
  work.merged = AllocateArray<int32_t>(device, work.merged_parts().elements());
  return device.MergeParts(work);
}

}  // namespace

absl::Status BuildVerticalSlash(const patterns::AttentionOptions& options,
                                const patterns::LayerBudget& budget, const IndexInputs& inputs,
                                IndexDevice& device, LayerIndex& index) {
  VerticalSlash work = Plan(options, budget, inputs);
  RETURN_IF_ERROR(Estimate(work, inputs, device));
  RETURN_IF_ERROR(Merge(work, device));
  // Step 5.
  const int64_t heads = work.heads, columns = heads * work.parts.max_columns;
  index.max_columns = work.parts.max_columns;
  index.column_positions = AllocateArray<int64_t>(device, columns);
  index.column_counts = AllocateArray<int32_t>(device, heads);
  index.diagonal_words = static_cast<int32_t>((work.parts.blocks + 63) / 64);
  index.diagonals = AllocateArray<uint64_t>(device, heads * index.diagonal_words);
  RETURN_IF_ERROR(device.Select(work, index));
  RETURN_IF_ERROR(device.CountSelection(work, index));
  const int64_t bytes = columns * inputs.head_dim * device.element_bytes();
  index.column_keys = AllocateArray<std::byte>(device, bytes);
  index.column_values = AllocateArray<std::byte>(device, bytes);
  return absl::OkStatus();
}

}  // namespace ringleader::attention
