// The index pipelines' arithmetic on a GPU: kernels/index, enqueued on LibTorch's current stream.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "kernels/index/estimate.h"
#include "kernels/index/select.h"
#include "worker/attention/index/index_device.h"
#include "worker/attention/stats/device_stats.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

class CudaIndex : public IndexDevice {
 public:
  // q, k: this rank's. `communicator` and `stats` outlive it.
  CudaIndex(comm::DeviceCommunicator* communicator, DeviceStats* stats, int layer, torch::Tensor q,
            torch::Tensor k);

  DeviceMemory Allocate(int64_t bytes) override;
  int64_t element_bytes() const override { return sizeof(__nv_bfloat16); }
  absl::Status Sum(SumType type, void* values, int64_t count) override;
  absl::Status Max(float* values, int64_t count) override;
  absl::Status Gather(void* values, int64_t bytes) override;

  absl::Status PrepareEstimate(const VerticalSlash& work) override;
  absl::Status RowMax(const VerticalSlash& work) override;
  absl::Status RowSum(const VerticalSlash& work) override;
  absl::Status Mass(const VerticalSlash& work) override;
  absl::Status Candidates(const VerticalSlash& work) override;
  absl::Status MergeParts(const VerticalSlash& work) override;
  absl::Status Select(const VerticalSlash& work, const LayerIndex& index) override;
  // On the device; recall is that of all estimate queries.
  absl::Status CountSelection(const VerticalSlash& work, const LayerIndex& index) override;

  absl::Status TileSums(const BlockTopK& work) override;
  absl::Status OrderTileSums(const BlockTopK& work) override;
  absl::Status Gate(const BlockTopK& work, const LayerIndex& index) override;

 private:
  kernels::index::EstimateArgs EstimateArgsOf(const VerticalSlash& work) const;

  comm::DeviceCommunicator& communicator_;
  DeviceStats& stats_;
  const int layer_;
  const torch::Tensor q_, k_;
  torch::Tensor masses_, max_counts_;    // [2, heads], of columns and of diagonals
  kernels::index::SelectArgs selected_;  // after Select
  std::vector<torch::Tensor> selected_memory_;
  torch::Tensor query_sums_;  // block top-k
};

}  // namespace ringleader::attention
