// The index pipelines' arithmetic on the CPU engine (kernels/reference). No LibTorch.
#pragma once

#include <optional>
#include <vector>

#include "kernels/reference/index/index_estimate.h"
#include "kernels/reference/math/engine.h"
#include "worker/attention/index/index_device.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

class CpuIndex : public IndexDevice {
 public:
  // q, k: this rank's; all but them outlive it.
  CpuIndex(kernels::reference::Engine* engine, comm::Communicator* communicator,
           const kernels::TokenMajor<const float>& q, const kernels::TokenMajor<const float>& k,
           double* exposed_seconds, LayerStats* stats);

  DeviceMemory Allocate(int64_t bytes) override;
  int64_t element_bytes() const override { return sizeof(float); }
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
  // Recall is that of every eighth estimate query.
  absl::Status CountSelection(const VerticalSlash& work, const LayerIndex& index) override;

  absl::Status TileSums(const BlockTopK& work) override;
  absl::Status OrderTileSums(const BlockTopK& work) override;
  absl::Status Gate(const BlockTopK& work, const LayerIndex& index) override;

 private:
  kernels::reference::Engine& engine_;
  comm::Communicator& communicator_;
  const kernels::TokenMajor<const float> q_, k_;
  double* const exposed_seconds_;
  LayerStats& stats_;
  std::optional<kernels::reference::IndexEstimate> estimate_;  // from RowMax on
  std::vector<int32_t> slashes_;                               // [heads], from Select on
};

}  // namespace ringleader::attention
