// The CPU engine (kernels/reference) as a device of the ring: one rank, float32, host memory. No
// LibTorch. Transfers run beside the computation; awaiting one blocks.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/reference/math/engine.h"
#include "kernels/reference/tiles/block_topk.h"
#include "worker/attention/cpu/cpu_index.h"
#include "worker/attention/runner/attention_device.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

class CpuAttentionDevice : public AttentionDevice {
 public:
  // `communicator` spans the ranks that share one sequence and outlives it.
  CpuAttentionDevice(comm::Communicator* communicator, int threads)
      : communicator_(*communicator), engine_(threads) {}

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  absl::Status Begin(double AttentionSeconds::*phase) override;
  absl::Status End() override;
  LayerStats& StatsOf(int layer) override;
  AttentionStats TakeStats(const ring::RingSchedule& forward) override;
  std::shared_ptr<const DeviceDocuments> Upload(std::shared_ptr<const SequenceDocuments> documents,
                                                int estimate_queries) override;

  comm::Communicator& communicator() { return communicator_; }
  kernels::reference::Engine& engine() { return engine_; }
  double* exposed_seconds() { return &stats_.seconds.exposed_communication; }

 private:
  comm::Communicator& communicator_;
  kernels::reference::Engine engine_;
  AttentionStats stats_;
  double AttentionSeconds::*phase_ = nullptr;
  std::chrono::steady_clock::time_point phase_start_;
  double exposed_before_ = 0.0;
};

// Keys and values of one call: [n, kv_heads, d].
class CpuKeys : public CallKeys {
 public:
  CpuKeys(CpuAttentionDevice* device, const kernels::TokenMajor<const float>& k,
          const kernels::TokenMajor<const float>& v)
      : device_(*device), k_(k), v_(v) {}
  absl::StatusOr<std::unique_ptr<RingSlots>> Place(const ring::RingSchedule& schedule) override;

  const kernels::TokenMajor<const float>& k() const { return k_; }
  // Part 0: the keys, part 1: the values that a step attends to.
  kernels::TokenMajor<const float> At(const StepKeys& keys, int part) const;

 private:
  CpuAttentionDevice& device_;
  const kernels::TokenMajor<const float> k_, v_;
};

class CpuForward : public ForwardCall {
 public:
  struct Tensors {
    kernels::TokenMajor<const float> q, k, v;  // [n, heads, d]; [n, kv_heads, d]
    kernels::TokenMajor<float> out;            // [n, heads, d], zero
    float* lse = nullptr;                      // [heads, n], -infinity
  };
  CpuForward(CpuAttentionDevice* device, const Tensors& tensors);

  CallShape shape() const override;
  CallKeys& keys() override { return keys_; }
  IndexDevice& ForIndex(int layer) override;
  absl::Status StartOutput(const LayerIndex& index, const kernels::ShardLayout& mine) override;
  absl::Status GatherColumns(const StepKeys& keys) override;
  absl::Status Attend(const StepKeys& keys) override;
  absl::Status AttendColumns() override;
  absl::Status Finish() override { return absl::OkStatus(); }

 private:
  CpuAttentionDevice& device_;
  const Tensors tensors_;
  CpuKeys keys_;
  std::optional<CpuIndex> index_device_;
  LayerStats* stats_ = nullptr;
  const LayerIndex* index_ = nullptr;
  kernels::ShardLayout mine_;
};

class CpuBackward : public BackwardCall {
 public:
  struct Tensors {
    kernels::TokenMajor<const float> q, k, v, out, d_out;  // what forward took and left
    const float* lse = nullptr;
    kernels::TokenMajor<float> dq, dk, dv;  // dense; dq is zero
  };
  CpuBackward(CpuAttentionDevice* device, const Tensors& tensors);

  CallShape shape() const override;
  CallKeys& keys() override { return keys_; }
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceGradients(
      const ring::RingSchedule& schedule) override;
  absl::Status StartGradients(const LayerIndex& index, const kernels::ShardLayout& mine) override;
  absl::Status ColumnsBackward() override;
  absl::Status AttendBackward(const StepKeys& keys, void* slot) override;
  absl::Status ScatterColumns(const StepKeys& keys, void* slot) override;
  absl::Status FinishQueries() override { return absl::OkStatus(); }
  absl::Status ReturnGradients(const ring::RingSchedule& schedule, RingSlots& gradients) override;

 private:
  CpuAttentionDevice& device_;
  const Tensors tensors_;
  CpuKeys keys_;
  const LayerIndex* index_ = nullptr;
  kernels::ShardLayout mine_;
  std::vector<float> delta_;                            // [heads, n]
  std::vector<float> d_column_keys_, d_column_values_;  // [heads, max_columns, d]
};

}  // namespace ringleader::attention
