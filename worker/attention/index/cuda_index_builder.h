// Builds a layer's index on all ranks together, on the device: what IndexBuilder does on the CPU.
// Everything that ranks merge is an integer sum, a maximum or a concatenation in rank order, so
// that the index is the same on any number of ranks. Nothing waits for the device.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "patterns/attention_options.h"
#include "ringleader/kernels/attention.h"
#include "worker/attention/index/sequence_documents.h"
#include "worker/attention/stats/device_stats.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

// SequenceDocuments on the device, shared by the layers of a sequence.
struct CudaDocuments {
  std::shared_ptr<const SequenceDocuments> host;
  torch::Tensor starts;                               // [n] int32: TileSelection::document_starts
  torch::Tensor estimate_positions, estimate_starts;  // [queries] int64: EstimateQueries
};
// Copies behind the host's back, on the current stream. `documents` is not null.
std::shared_ptr<const CudaDocuments> UploadDocuments(
    std::shared_ptr<const SequenceDocuments> documents, int estimate_queries);

// What one layer attends to in one call, on the device; small but for the selected columns.
struct CudaLayerIndex {
  kernels::TilePattern pattern = kernels::TilePattern::kCausal;
  int32_t tile = 128;
  int64_t window = 0;

  // Vertical-slash: block diagonals, and columns with the keys and values picked up on the ring.
  torch::Tensor diagonals;                   // [heads, words] int64 (bits)
  torch::Tensor column_positions;            // [heads, max_columns] int64
  torch::Tensor column_counts;               // [heads] int32
  torch::Tensor column_keys, column_values;  // [heads, max_columns, d] bf16

  // Block top-k: kernels::index::BlockGateArgs::chosen, from which each hop builds its lists.
  torch::Tensor chosen;  // [heads, query tiles, words] int32 (bits)
  int32_t block_size = 0;
  int32_t kept_blocks = 0;  // of a query tile, at most

  std::shared_ptr<const CudaDocuments> documents;  // null: one

  bool has_columns() const { return column_positions.defined(); }
  kernels::ColumnSelection Columns() const;
  const int32_t* DocumentStarts() const {
    return documents == nullptr ? nullptr : documents->starts.const_data_ptr<int32_t>();
  }
};

// The tiles of one hop and the lists that they point into.
struct OwnerTiles {
  kernels::TileSelection tiles;
  std::vector<torch::Tensor> lists;
};
OwnerTiles TilesOf(const CudaLayerIndex& index, int32_t heads,
                   const kernels::ShardLayout& query_layout, const kernels::ShardLayout& key_layout,
                   const torch::TensorOptions& device);

struct CudaIndexInputs {
  torch::Tensor q, k;  // this rank's
  float scale = 0.0f;
  std::function<kernels::ShardLayout(int rank)> layout_of;
  std::shared_ptr<const CudaDocuments> documents = nullptr;  // null: one
};

// Throws c10::Error.
class CudaIndexBuilder {
 public:
  // `options`, `communicator` and `timers` outlive it.
  CudaIndexBuilder(const patterns::AttentionOptions& options,
                   comm::DeviceCommunicator* communicator, DeviceTimers* timers);

  // The index under `budget`. Adds verticals, slashes, recall and the tiles of diagonals to
  // `counters`.
  std::shared_ptr<CudaLayerIndex> Build(const patterns::LayerBudget& budget,
                                        const CudaIndexInputs& inputs,
                                        const CounterSlots& counters);

 private:
  void BuildVerticalSlash(const patterns::LayerBudget& budget, const CudaIndexInputs& inputs,
                          const CounterSlots& counters, CudaLayerIndex& index);
  void BuildBlockTopK(const CudaIndexInputs& inputs, CudaLayerIndex& index);
  void Await(const absl::StatusOr<comm::DeviceTransfer>& transfer);

  const patterns::AttentionOptions& options_;
  comm::DeviceCommunicator* const communicator_;
  DeviceTimers& timers_;
};

}  // namespace ringleader::attention
