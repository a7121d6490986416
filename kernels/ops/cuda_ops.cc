// The operators of attention_ops.h on Hopper: kernels/sm90 and kernels/index, in bf16.
#include <torch/library.h>
#include <torch/utils.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/status_macros.h"
#include "kernels/fused/rows/attention_rows.h"
#include "kernels/index/estimate.h"
#include "kernels/index/gates/block_steps.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/groups/group_lists.h"
#include "kernels/index/select.h"
#include "kernels/ops/attention_ops.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/ops/device_ops.h"
#include "kernels/ops/gathered_queries.h"
#include "kernels/sm90/attention.h"
#include "kernels/sm90/columns.h"

namespace ringleader::kernels::ops {
namespace {

using torch::Tensor;

// LibTorch's current stream and device.
class CudaEngine {
 public:
  using Element = __nv_bfloat16;
  static constexpr torch::ScalarType kElement = torch::kBFloat16;
  static constexpr bool kRoundsAtOnce = true;
  static constexpr bool kAddsGroupsInOrder = false;
  struct Groups {
    Tensor groups, bounds;
  };

  // The kernels load 16 bytes at a time.
  Tensor Take(const char* name, const Tensor& x) const {
    TORCH_CHECK(x.scalar_type() == kElement, name, " is ", x.scalar_type(),
                "; bfloat16 is supported on GPUs: ", name, ".to(torch.bfloat16)");
    TORCH_CHECK(x.size(3) == 64 || x.size(3) == 128, name, " has a head_dim of ", x.size(3),
                "; 64 and 128 are supported on GPUs");
    const Tensor rows = x.transpose(1, 2);
    bool aligned =
        rows.stride(3) == 1 && reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0;
    for (const int dimension : {0, 1, 2}) {
      aligned = aligned && rows.stride(dimension) % 8 == 0 && rows.stride(dimension) > 0;
    }
    // What is dense already, and begins at another address, would stay where it is.
    return aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
  }
  // Read only where the logarithm of a row's sum says it was written.
  Tensor StartSums(const Tensor& out) const {
    return torch::empty(out.sizes(), out.options().dtype(torch::kFloat));
  }
  absl::Status Finish(const Tensor& sums, const float* lse, const Tensor& out) const {
    return fused::FinishOutput(Read<float>(sums), lse, MutableBf16(out), /*cast=*/{}, Stream());
  }
  absl::Status Delta(const Tensor& d_out, const Tensor& out, const Tensor& delta) {
    return fused::RowDelta(View(d_out), View(out), delta.mutable_data_ptr<float>(), Stream());
  }
  absl::Status Run(const AttentionForwardArgs<Element>& args,
                   const std::optional<QueryRowsPlan>& rows) {
    return OwnBlocksThenRows(
        args, rows,
        [&](const auto& tiles) {
          return Call(tiles, sm90::ForwardWorkspaceBytes, sm90::AttentionForward);
        },
        &QueryRows::Attend);
  }
  absl::Status Run(const AttentionBackwardArgs<Element>& args,
                   const std::optional<QueryRowsPlan>& rows) {
    return OwnBlocksThenRows(
        args, rows,
        [&](const auto& tiles) {
          return Call(tiles, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward);
        },
        &QueryRows::AttendBackward);
  }
  absl::Status Run(const sm90::ColumnForwardArgs& args) {
    return Call(args, sm90::ColumnForwardWorkspaceBytes, sm90::ColumnForward);
  }
  absl::Status Run(const sm90::ColumnBackwardArgs& args) {
    return Call(args, sm90::ColumnBackwardWorkspaceBytes, sm90::ColumnBackward);
  }
  absl::Status GatherColumns(const TokenMajor<const Element>& k, const TokenMajor<const Element>& v,
                             const ShardLayout& owner, const ColumnSelection& columns,
                             int32_t heads, Element* keys, Element* values) {
    return sm90::GatherColumns(k, v, owner, columns, heads, keys, values, Stream());
  }
  absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                              const ColumnSelection& columns, int32_t heads,
                              const TokenMajor<float>& dk, const TokenMajor<float>& dv) {
    return sm90::ScatterColumns(d_keys, d_values, owner, columns, heads, dk, dv, Stream());
  }
  absl::StatusOr<KeyGroups> ListGroups(const ChosenGroups& of, const AttentionSizes& sizes,
                                       int32_t most, Groups* memory) const {
    const auto ints = torch::device(torch::kCUDA).dtype(torch::kInt);
    const int64_t tiles = sizes.Tiles(kGroupTile), rows = sizes.heads * tiles;
    memory->groups = torch::empty({rows, most}, ints);
    memory->bounds = torch::empty({2, rows}, ints);
    const GroupLists lists = {memory->groups.mutable_data_ptr<int32_t>(),
                              memory->bounds.mutable_data_ptr<int32_t>(), rows, most};
    RETURN_IF_ERROR(
        index::ListGroups(of, sizes.layout(), static_cast<int>(sizes.heads), lists, Stream()));
    return lists.Of(sizes.layout());
  }
  absl::Status Run(const BlockStep& step, const Tensor& q, const Tensor& k) {
    const Tensor scratch =
        Scratch(static_cast<int64_t>(index::BlockStepWorkspaceBytes(View(q), View(k), step)), q);
    return index::RunBlockStep(View(q), View(k), step, scratch.mutable_data_ptr(), Stream());
  }
  absl::Status VerticalSlash(const Tensor& queries, const Tensor& k, const AttentionSizes& sizes,
                             const int64_t* positions, const int64_t* starts, float scale,
                             const VerticalSlashOptions& options, uint64_t* diagonals,
                             int64_t* column_positions, int32_t* column_counts, int64_t* visited);
  absl::Status BuildLists(const Tensor& chosen, int64_t tokens, int64_t tile, int64_t block_size,
                          const Tensor& row_offsets, const Tensor& columns,
                          const Tensor& column_offsets, const Tensor& rows);

 private:
  template <typename Args, typename Bytes, typename Kernels>
  absl::Status Call(const Args& args, Bytes bytes, Kernels kernels) {
    const int64_t needed = bytes(args);
    const Tensor scratch = torch::empty({std::max<int64_t>(needed, 1)},
                                        torch::device(torch::kCUDA).dtype(torch::kByte));
    return kernels(args, sm90::Workspace{scratch.mutable_data_ptr(), needed}, Stream());
  }

  // args' tiles; where queries are gathered, those of their own blocks and then the rows of the
  // rest.
  template <typename Args, typename Tiles, typename Rows>
  absl::Status OwnBlocksThenRows(const Args& args, const std::optional<QueryRowsPlan>& plan,
                                 const Tiles& attend, Rows attend_rows) {
    if (!plan.has_value()) return attend(args);
    const QueryChoice& choice = args.tiles.choice;
    const int32_t heads = args.q.heads, tile = args.tiles.tile;
    const Tensor like = torch::empty({0}, torch::device(torch::kCUDA));
    ASSIGN_OR_RETURN(const Tensor chosen,
                     OwnBlocks(args.query_layout, heads, tile, choice.block_size, like));
    Args own = args;
    own.tiles.choice = {};  // all queries of a tile are of one block
    ASSIGN_OR_RETURN(
        const std::vector<Tensor> lists,
        ListTiles({.chosen = reinterpret_cast<const uint32_t*>(chosen.const_data_ptr<int32_t>()),
                   .query_layout = args.query_layout,
                   .key_layout = args.key_layout,
                   .heads = heads,
                   .tile = tile,
                   .block_size = choice.block_size},
                  /*kept_blocks=*/1, like, &own.tiles));
    RETURN_IF_ERROR(attend(own));
    ASSIGN_OR_RETURN(const QueryRows rows, QueryRows::List(args.tiles, args.query_layout,
                                                           args.key_layout, heads, *plan, like));
    return (rows.*attend_rows)(args);
  }
};

absl::Status CudaEngine::VerticalSlash(const Tensor& queries, const Tensor& k,
                                       const AttentionSizes& sizes, const int64_t* positions,
                                       const int64_t* starts, float scale,
                                       const VerticalSlashOptions& options, uint64_t* diagonals,
                                       int64_t* column_positions, int32_t* column_counts,
                                       int64_t* visited) {
  const int64_t heads = sizes.heads, rows = queries.size(0), blocks = sizes.Tiles(options.tile);
  const auto ints = k.options().dtype(torch::kInt), longs = k.options().dtype(torch::kLong),
             floats = k.options().dtype(torch::kFloat);
  const Tensor row_max = torch::empty({heads, rows}, floats),
               row_sum = torch::empty({heads, rows}, longs),
               run_sums = torch::empty({heads, rows, RunsOf(sizes.tokens)}, floats),
               column_mass = torch::empty({heads, sizes.tokens}, ints),
               diagonal_mass = torch::empty({heads, blocks}, ints),
               candidate_mass = torch::empty({heads, options.max_columns}, ints),
               candidate_positions = torch::empty_like(candidate_mass),
               residue_offsets = torch::empty({heads, 2}, ints),
               residues = torch::empty({heads, blocks}, ints),
               diagonal_counts = torch::empty({heads}, ints),
               masses = torch::empty(
                   {heads, static_cast<int64_t>(sizeof(index::IndexMass) / sizeof(int64_t))},
                   longs),
               column_share = torch::full({heads}, options.column_mass, floats),
               diagonal_share = torch::full({heads}, options.diagonal_mass, floats),
               column_cap = torch::full({heads}, options.max_columns, ints),
               diagonal_cap = torch::full({heads}, DiagonalBudget(options, blocks), ints),
               scratch = Scratch(static_cast<int64_t>(index::SelectWorkspaceBytes(
                                     static_cast<int32_t>(heads), sizes.tokens)),
                                 k);
  const index::EstimateArgs estimate = {.q = View(queries),
                                        .query_positions = positions,
                                        .query_starts = starts,
                                        .k = View(k),
                                        .key_layout = sizes.layout(),
                                        .tile = static_cast<int32_t>(options.tile),
                                        .scale = scale,
                                        .row_max = row_max.mutable_data_ptr<float>(),
                                        .row_sum = row_sum.mutable_data_ptr<int64_t>(),
                                        .run_sums = run_sums.mutable_data_ptr<float>(),
                                        .column_mass = column_mass.mutable_data_ptr<int32_t>(),
                                        .diagonal_mass = diagonal_mass.mutable_data_ptr<int32_t>()};
  RETURN_IF_ERROR(index::EstimateRowMax(estimate, Stream()));
  RETURN_IF_ERROR(index::EstimateRowSum(estimate, Stream()));
  RETURN_IF_ERROR(index::EstimateMass(estimate, Stream()));
  RETURN_IF_ERROR(
      index::SelectColumnCandidates({.column_mass = column_mass.const_data_ptr<int32_t>(),
                                     .layout = sizes.layout(),
                                     .heads = static_cast<int32_t>(heads),
                                     .max_columns = static_cast<int32_t>(options.max_columns),
                                     .sink_tokens = static_cast<int32_t>(options.sink_tokens),
                                     .mass = candidate_mass.mutable_data_ptr<int32_t>(),
                                     .positions = candidate_positions.mutable_data_ptr<int32_t>()},
                                    Stream()));
  return index::Select(
      {.candidate_mass = candidate_mass.const_data_ptr<int32_t>(),
       .candidate_positions = candidate_positions.const_data_ptr<int32_t>(),
       .diagonal_mass = diagonal_mass.const_data_ptr<int32_t>(),
       .column_budgets = {column_share.const_data_ptr<float>(),
                          column_cap.const_data_ptr<int32_t>()},
       .diagonal_budgets = {diagonal_share.const_data_ptr<float>(),
                            diagonal_cap.const_data_ptr<int32_t>()},
       .diagonals_by_tiles = options.density > 0,
       .layout = sizes.layout(),
       .heads = static_cast<int32_t>(heads),
       .tile = static_cast<int32_t>(options.tile),
       .max_columns = static_cast<int32_t>(options.max_columns),
       .sink_tokens = static_cast<int32_t>(options.sink_tokens),
       .local_blocks = static_cast<int32_t>(options.local_blocks),
       .workspace = scratch.mutable_data_ptr(),
       .column_positions = column_positions,
       .column_counts = column_counts,
       .diagonals = diagonals,
       .diagonal_counts = diagonal_counts.mutable_data_ptr<int32_t>(),
       .residue_offsets = residue_offsets.mutable_data_ptr<int32_t>(),
       .residues = residues.mutable_data_ptr<int32_t>(),
       .load = visited,
       .masses = reinterpret_cast<index::IndexMass*>(masses.mutable_data_ptr<int64_t>())},
      Stream());
}

absl::Status CudaEngine::BuildLists(const Tensor& chosen, int64_t tokens, int64_t tile,
                                    int64_t block_size, const Tensor& row_offsets,
                                    const Tensor& columns, const Tensor& column_offsets,
                                    const Tensor& rows) {
  const ShardLayout layout = {.tokens = tokens};
  return index::BuildTileLists(
      {.chosen = reinterpret_cast<const uint32_t*>(chosen.const_data_ptr<int32_t>()),
       .query_layout = layout,
       .key_layout = layout,
       .heads = static_cast<int32_t>(chosen.size(0) * chosen.size(1)),
       .tile = static_cast<int32_t>(tile),
       .block_size = static_cast<int32_t>(block_size),
       .capacity = columns.numel(),
       .row_offsets = row_offsets.mutable_data_ptr<int32_t>(),
       .columns = columns.mutable_data_ptr<int32_t>(),
       .column_offsets = column_offsets.mutable_data_ptr<int32_t>(),
       .rows = rows.mutable_data_ptr<int32_t>()},
      Stream());
}

}  // namespace

TORCH_LIBRARY_IMPL(ringleader, CUDA, m) {
  DeviceOps<CudaEngine>::Register(m);
}

}  // namespace ringleader::kernels::ops
