#include <algorithm>

#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/between_ranks.h"
#include "kernels/index/gates/antidiagonal.h"
#include "kernels/index/gates/block_steps.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/gates/query_gate.h"
#include "kernels/index/groups/key_groups.h"
#include "kernels/index/groups/narrow_rows.h"
#include "kernels/index/move.h"

namespace ringleader::kernels::index {
namespace {

struct Step {
  const TokenMajor<const __nv_bfloat16>&q, &k;
  void* workspace;
  cudaStream_t stream;

  absl::Status operator()(const FixedBlocksStep& step) const {
    return KeepFixedBlocks(step, stream);
  }
  absl::Status operator()(const TileKeySumsStep& step) const {
    return TileKeySums(k, step, stream);
  }
  absl::Status operator()(const OrderTilesStep& step) const {
    return OrderTileSums(step.gathered, step.layout, step.tile, step.row, step.ordered, stream);
  }
  absl::Status operator()(const MeanGateStep& step) const {
    const int64_t tiles = (q.tokens + step.tile - 1) / step.tile;
    auto* const sums = static_cast<float*>(workspace);
    if (step.first_query_gates) {
      RETURN_IF_ERROR(TileFirsts(q, step.tile, sums, stream));
    } else {
      TokenMajor<const __nv_bfloat16> choosing = q;
      choosing.tokens = std::min(q.tokens, step.choosing);
      if (choosing.tokens < q.tokens) {
        RETURN_IF_CUDA_ERROR(
            cudaMemsetAsync(sums, 0, sizeof(float) * tiles * q.heads * q.head_dim, stream),
            "TileSums: memset");
      }
      RETURN_IF_ERROR(TileSums(choosing, step.tile, sums, stream));
    }
    return SelectBlocksByMean({.query_sums = sums,
                               .key_sums = step.key_sums,
                               .counted = step.counted,
                               .query_layout = step.query_layout,
                               .seen = step.seen,
                               .heads = q.heads,
                               .kv_heads = k.heads,
                               .head_dim = q.head_dim,
                               .tile = step.tile,
                               .block_size = step.block_size,
                               .topk_blocks = step.topk_blocks,
                               .head_halves = step.head_halves,
                               .scale = step.scale,
                               .queries = step.first_query_gates ? 1 : step.tile,
                               .choosing = step.choosing,
                               .move = step.move,
                               .means = sums + tiles * q.heads * q.head_dim,
                               .chosen = step.chosen},
                              stream);
  }
  absl::Status operator()(const QueryGateStep& step) const {
    return ChooseByQuery(q, k.heads, step, workspace, stream);
  }
  absl::Status operator()(const PackKeysStep& step) const {
    return PackKeys(k, step.packed, stream);
  }
  absl::Status operator()(const AntidiagonalGateStep& step) const {
    return ChooseByAntidiagonals(q, SequenceKeys(step.keys, step.query_layout), step, workspace,
                                 stream);
  }
  absl::Status operator()(const DimEnergyStep& step) const {
    return SumDimEnergy(q, k, step, stream);
  }
  absl::Status operator()(const PickDimsStep& step) const {
    return PickDims(k.heads, k.head_dim, step, stream);
  }
  absl::Status operator()(const NarrowRowsStep& step) const {
    return NarrowRows(q, k, step, stream);
  }
  absl::Status operator()(const KeyGroupGateStep& step) const {
    return ChooseKeyGroups(q.heads, k.heads, step, workspace, stream);
  }
  absl::Status operator()(const BlockMassStep& step) const {
    return BlockMass(q, SequenceKeys(step.keys, step.query_layout), step, workspace, stream);
  }
  absl::Status operator()(const MassGateStep& step) const {
    return SelectBlocksByMass(step, stream);
  }
  absl::Status operator()(const AdaptDensityStep& step) const { return AdaptDensity(step, stream); }
  absl::Status operator()(const CountWorkStep& step) const { return CountWork(step, stream); }
  absl::Status operator()(const FindMoveStep& step) const { return FindMove(step, stream); }
  absl::Status operator()(const SumChoicesStep& step) const { return SumChoices(step, stream); }
  absl::Status operator()(const MoveBudgetsStep& step) const { return MoveBudgets(step, stream); }
  absl::Status operator()(const HoldMassStep& step) const { return HoldMass(step, stream); }

 private:
  // The keys of the whole sequence: as a step has gathered them, or, on one rank, the call's.
  TokenMajor<const __nv_bfloat16> SequenceKeys(const void* keys, const ShardLayout& layout) const {
    if (keys == nullptr) return k;
    return {static_cast<const __nv_bfloat16*>(keys), layout.tokens, k.heads, k.head_dim,
            int64_t{k.heads} * k.head_dim,           k.head_dim};
  }
};

}  // namespace

size_t BlockStepWorkspaceBytes(const TokenMajor<const __nv_bfloat16>& q,
                               const TokenMajor<const __nv_bfloat16>& k, const BlockStep& step) {
  if (const auto* const antidiagonals = std::get_if<AntidiagonalGateStep>(&step)) {
    return AntidiagonalWorkspaceBytes(q, *antidiagonals);
  }
  if (const auto* const by_query = std::get_if<QueryGateStep>(&step)) {
    return QueryGateWorkspaceBytes(q, k.heads, *by_query);
  }
  if (const auto* const mass = std::get_if<BlockMassStep>(&step)) {
    return BlockMassWorkspaceBytes(mass->query_layout.tokens);
  }
  if (const auto* const key_groups = std::get_if<KeyGroupGateStep>(&step)) {
    return KeyGroupWorkspaceBytes(q.heads, k.heads, *key_groups);
  }
  const auto* const gate = std::get_if<MeanGateStep>(&step);
  if (gate == nullptr) return 0;
  // Sums of queries by tile, means of keys by block.
  const int64_t tiles = (q.tokens + gate->tile - 1) / gate->tile,
                blocks = (gate->query_layout.tokens + gate->block_size - 1) / gate->block_size;
  return sizeof(float) * (tiles * q.heads + blocks * k.heads) * q.head_dim;
}

absl::Status RunBlockStep(const TokenMajor<const __nv_bfloat16>& q,
                          const TokenMajor<const __nv_bfloat16>& k, const BlockStep& step,
                          void* workspace, cudaStream_t stream) {
  return std::visit(Step{q, k, workspace, stream}, step);
}

}  // namespace ringleader::kernels::index
