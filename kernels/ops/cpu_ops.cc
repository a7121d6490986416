// The operators of attention_ops.h on the CPU: kernels/reference, in float32.
#include <pthread.h>
#include <torch/library.h>
#include <torch/utils.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "base/status_macros.h"
#include "kernels/ops/attention_calls.h"
#include "kernels/ops/attention_ops.h"
#include "kernels/ops/choice_calls.h"
#include "kernels/ops/device_ops.h"
#include "kernels/reference/attention/attention.h"
#include "kernels/reference/attention/columns.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/gates/key_group_gate.h"
#include "kernels/reference/index/index_estimate.h"
#include "kernels/reference/index/index_select.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::kernels::ops {
namespace {

using torch::Tensor;

// The process's one engine, and the lock of the call that holds it.
struct Shared {
  std::mutex mutex;
  std::unique_ptr<reference::Engine> engine;
};

// A child that fork() made has neither the engine's threads nor the call that may have held the
// lock. It begins with its own and leaves alone what it inherits: whoever waits for those threads,
// as their pool's destructor does, waits for ever. So nothing here is destroyed, at exit neither.
Shared& SharedByCalls() {
  static Shared* shared = new Shared;
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { shared = new Shared; });
  return *shared;
}

// The process's engine, with as many threads as LibTorch has, for the call that holds it.
class CpuEngine {
 public:
  using Element = float;
  static constexpr torch::ScalarType kElement = torch::kFloat;
  static constexpr bool kRoundsAtOnce = false;
  static constexpr bool kAddsGroupsInOrder = true;
  using Groups = reference::ListedGroups;

  CpuEngine() : lock_(SharedByCalls().mutex) {
    std::unique_ptr<reference::Engine>& engine = SharedByCalls().engine;
    if (engine == nullptr || engine->pool().threads() != at::get_num_threads()) {
      engine = std::make_unique<reference::Engine>(at::get_num_threads());
    }
    engine_ = engine.get();
  }

  Tensor Take(const char* name, const Tensor& x) const {
    TORCH_CHECK(x.scalar_type() == torch::kFloat || x.scalar_type() == torch::kBFloat16, name,
                " is ", x.scalar_type(), "; float32 and bfloat16 are supported on the CPU: ", name,
                ".to(torch.bfloat16)");
    const Tensor rows = x.transpose(1, 2).to(kElement);
    return rows.stride(3) == 1 ? rows : rows.contiguous();
  }
  Tensor StartSums(const Tensor& out) const { return torch::zeros_like(out); }
  absl::Status Finish(const Tensor& sums, const float* /*lse*/, const Tensor& out) const {
    out.copy_(sums);
    return absl::OkStatus();
  }
  absl::Status Delta(const Tensor& d_out, const Tensor& out, const Tensor& delta) {
    reference::AttentionDelta(*engine_, Read<float>(d_out), Read<float>(out),
                              delta.mutable_data_ptr<float>());
    return absl::OkStatus();
  }
  // Tiles are visited whole, whatever their queries chose.
  absl::Status Run(const AttentionForwardArgs<float>& args,
                   const std::optional<QueryRowsPlan>& /*rows*/) {
    return reference::AttentionForward(*engine_, args);
  }
  absl::Status Run(const AttentionBackwardArgs<float>& args,
                   const std::optional<QueryRowsPlan>& /*rows*/) {
    return reference::AttentionBackward(*engine_, args);
  }
  absl::Status Run(const ColumnForwardArgs<float>& args) {
    return reference::ColumnForward(*engine_, args);
  }
  absl::Status Run(const ColumnBackwardArgs<float>& args) {
    return reference::ColumnBackward(*engine_, args);
  }
  absl::Status GatherColumns(const TokenMajor<const float>& k, const TokenMajor<const float>& v,
                             const ShardLayout& owner, const ColumnSelection& columns,
                             int32_t heads, float* keys, float* values) {
    reference::GatherColumns(k, v, owner, columns, heads, keys, values);
    return absl::OkStatus();
  }
  absl::Status ScatterColumns(const float* d_keys, const float* d_values, const ShardLayout& owner,
                              const ColumnSelection& columns, int32_t heads,
                              const TokenMajor<float>& dk, const TokenMajor<float>& dv) {
    reference::ScatterColumns(d_keys, d_values, owner, columns, heads, dk, dv);
    return absl::OkStatus();
  }
  absl::StatusOr<KeyGroups> ListGroups(const ChosenGroups& of, const AttentionSizes& sizes,
                                       int32_t /*most*/, Groups* memory) const {
    *memory = reference::ListGroups(of, sizes.layout(), static_cast<int>(sizes.heads));
    return memory->lists.Of(sizes.layout());
  }
  absl::Status Run(const BlockStep& step, const Tensor& q, const Tensor& k) {
    reference::RunBlockStep(*engine_, Read<float>(q), Read<float>(k), step);
    return absl::OkStatus();
  }
  absl::Status VerticalSlash(const Tensor& queries, const Tensor& k, const AttentionSizes& sizes,
                             const int64_t* positions, const int64_t* starts, float scale,
                             const VerticalSlashOptions& options, uint64_t* diagonals,
                             int64_t* column_positions, int32_t* column_counts, int64_t* visited);
  absl::Status BuildLists(const Tensor& chosen, int64_t tokens, int64_t tile, int64_t block_size,
                          const Tensor& row_offsets, const Tensor& columns,
                          const Tensor& column_offsets, const Tensor& rows);

 private:
  const std::scoped_lock<std::mutex> lock_;
  reference::Engine* engine_ = nullptr;
};

absl::Status CpuEngine::VerticalSlash(const Tensor& queries, const Tensor& k,
                                      const AttentionSizes& sizes, const int64_t* positions,
                                      const int64_t* starts, float scale,
                                      const VerticalSlashOptions& options, uint64_t* diagonals,
                                      int64_t* column_positions, int32_t* column_counts,
                                      int64_t* visited) {
  const int64_t rows = sizes.heads * queries.size(0), blocks = sizes.Tiles(options.tile);
  const auto max_columns = static_cast<int32_t>(options.max_columns);
  std::vector<float> row_max(rows);
  std::vector<int64_t> row_sum(rows);
  std::vector<int32_t> column_mass(sizes.heads * sizes.tokens), diagonal_mass(sizes.heads * blocks);
  ASSIGN_OR_RETURN(
      reference::IndexEstimate estimate,
      reference::IndexEstimate::Create(*engine_, {.q = Read<float>(queries),
                                                  .query_positions = positions,
                                                  .query_starts = starts,
                                                  .k = Read<float>(k),
                                                  .key_layout = sizes.layout(),
                                                  .tile = static_cast<int32_t>(options.tile),
                                                  .scale = scale,
                                                  .row_max = row_max.data(),
                                                  .row_sum = row_sum.data(),
                                                  .column_mass = column_mass.data(),
                                                  .diagonal_mass = diagonal_mass.data()}));
  estimate.RowMax();
  estimate.RowSum();
  estimate.Mass();
  *visited = 0;
  const int64_t words = (blocks + 63) / 64;
  for (int64_t head = 0; head < sizes.heads; ++head) {
    const int32_t* const diagonal_mass_of = diagonal_mass.data() + head * blocks;
    const bool late = TiesGoLate(static_cast<int32_t>(head));
    uint64_t* const bits = diagonals + head * words;
    reference::SelectDiagonals(diagonal_mass_of, blocks, static_cast<int32_t>(options.local_blocks),
                               static_cast<float>(options.diagonal_mass),
                               DiagonalBudget(options, blocks), bits, options.density > 0);
    std::vector<reference::ColumnCandidate> candidates(max_columns);
    reference::CandidateColumns(column_mass.data() + head * sizes.tokens, sizes.layout(),
                                options.sink_tokens, max_columns, candidates.data(), late);
    std::erase_if(candidates, [&](const auto& c) { return c.position >= sizes.tokens; });
    column_counts[head] = reference::SelectColumns(
        candidates.data(), static_cast<int64_t>(candidates.size()),
        std::accumulate(diagonal_mass_of, diagonal_mass_of + blocks, int64_t{0}),
        options.sink_tokens, static_cast<float>(options.column_mass), max_columns, max_columns,
        column_positions + head * max_columns, /*taken=*/nullptr, late);
    for (int64_t delta = 0; delta < blocks; ++delta) {
      if ((bits[delta / 64] >> (delta % 64) & 1) != 0) *visited += blocks - delta;
    }
  }
  return absl::OkStatus();
}

absl::Status CpuEngine::BuildLists(const Tensor& chosen, int64_t tokens, int64_t tile,
                                   int64_t block_size, const Tensor& row_offsets,
                                   const Tensor& columns, const Tensor& column_offsets,
                                   const Tensor& rows) {
  const ShardLayout layout = {.tokens = tokens};
  const int64_t tiles = (tokens + tile - 1) / tile, blocks = (tokens + block_size - 1) / block_size,
                words = chosen.size(3), heads = chosen.size(0) * chosen.size(1);
  const auto* const bits = reinterpret_cast<const uint32_t*>(chosen.const_data_ptr<int32_t>());
  std::vector<char> selected(heads * tiles * blocks);
  for (int64_t i = 0; i < heads * tiles * blocks; ++i) {
    const int64_t row = i / blocks, block = i % blocks;
    selected[i] = static_cast<char>(bits[row * words + block / 32] >> block % 32 & 1);
  }
  const reference::TileCsr csr =
      reference::CsrOfBlocks(selected, static_cast<int>(heads), static_cast<int>(tile),
                             static_cast<int>(block_size), layout, layout, /*seen=*/{});
  TORCH_CHECK(static_cast<int64_t>(csr.columns.size()) <= columns.numel(), "capacity is ",
              columns.numel(), "; the lists hold ", csr.columns.size(), " tiles");
  std::ranges::copy(csr.row_offsets, row_offsets.mutable_data_ptr<int32_t>());
  std::ranges::copy(csr.columns, columns.mutable_data_ptr<int32_t>());
  // The transpose, head by head; a head's tiles are as many in both directions.
  for (int64_t head = 0; head < heads; ++head) {
    const int32_t* const offsets = csr.row_offsets.data() + head * (tiles + 1);
    reference::TileList list;
    for (int64_t a = 0; a <= tiles; ++a) list.row_offsets.push_back(offsets[a] - offsets[0]);
    list.columns.assign(csr.columns.begin() + offsets[0], csr.columns.begin() + offsets[tiles]);
    const reference::TransposedTileList by_key = reference::Transpose(list, tiles);
    int32_t* const transposed = column_offsets.mutable_data_ptr<int32_t>() + head * (tiles + 1);
    for (int64_t b = 0; b <= tiles; ++b) {
      transposed[b] = offsets[0] + static_cast<int32_t>(by_key.column_offsets[b]);
    }
    std::ranges::copy(by_key.rows, rows.mutable_data_ptr<int32_t>() + offsets[0]);
  }
  return absl::OkStatus();
}

}  // namespace

TORCH_LIBRARY_IMPL(ringleader, CPU, m) {
  DeviceOps<CpuEngine>::Register(m);
}

}  // namespace ringleader::kernels::ops
