// One rank's part of ring attention on the device: what AttentionEngine is on the CPU. Enqueues on
// LibTorch's current stream and never waits for the device but in TakeStats. Throws c10::Error.
#pragma once

#include <torch/types.h>

#include <map>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "patterns/layer_budgets.h"
#include "worker/attention/cuda/device_slots.h"
#include "worker/attention/index/cuda_index_builder.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/attention/stats/device_stats.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::attention {

// One call at a time, the same calls in the same order on all ranks.
class CudaAttentionEngine {
 public:
  static absl::StatusOr<std::shared_ptr<CudaAttentionEngine>> Create(
      const patterns::AttentionOptions& options, comm::DeviceCommunicator* communicator);

  struct Output {
    torch::Tensor out;  // [n, heads, d] bf16
    torch::Tensor lse;  // [heads, n] fp32
    std::shared_ptr<const CudaLayerIndex> index;
  };
  // q: [n, heads, d]; k and v: [n, kv_heads, d]; bf16, aligned to 16 bytes.
  Output Forward(int layer, const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v);

  // What Forward took and returned, and the gradient of out.
  struct BackwardCall {
    torch::Tensor q, k, v, out, lse, d_out;
  };
  AttentionGradients Backward(const CudaLayerIndex& index, const BackwardCall& call);
  // AttentionRecord::StartBackward.
  void StartBackward(const torch::Tensor& k, const torch::Tensor& v);

  absl::Status SetBudgets(std::span<const patterns::LayerBudget> budgets) {
    return budgets_.Set(budgets);
  }
  // ContextAttention::SetDocuments.
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts);
  AttentionStats TakeStats() { return stats_.Take(forward_); }

 private:
  CudaAttentionEngine(const patterns::AttentionOptions& options,
                      comm::DeviceCommunicator* communicator);

  // A call's tensors as the kernels take them.
  struct Shape {
    int64_t tokens;  // local
    int32_t heads, kv_heads, head_dim;
    float scale;
    kernels::ShardLayout layout;  // of this rank

    int64_t kv_elements() const { return tokens * kv_heads * head_dim; }  // of keys alone
  };
  struct KeyValues {
    kernels::TokenMajor<const __nv_bfloat16> k, v;
  };

  Shape ShapeOf(const torch::Tensor& q, const torch::Tensor& k) const;
  kernels::ShardLayout LayoutOf(int rank, const Shape& shape) const;
  bool gathers() const { return forward_.shape.kind == ring::RingKind::kAllGather; }
  // Puts this rank's keys and values where the ring takes them from, or starts their gather.
  void PlaceKv(const ring::RingSchedule& schedule, const torch::Tensor& k, const torch::Tensor& v);
  // Behind PlaceKv.
  void StartFirstHops(const ring::RingSchedule& schedule, ring::RingLink link);
  // Starts what the schedule starts with the step, then waits for the step's keys.
  KeyValues ArriveKv(const ring::RingSchedule& schedule, size_t step, const Shape& shape,
                     const torch::Tensor& k, const torch::Tensor& v);
  void CountTiles(int layer, const CudaLayerIndex& index, size_t step, const Shape& shape,
                  const kernels::TileSelection& tiles);
  // Adds to dq. This rank's gradients of keys and values are complete after ReturnGradients.
  void ComputeGradients(const CudaLayerIndex& index, const BackwardCall& call, const Shape& shape,
                        const torch::Tensor& dq);
  void ReturnGradients(const torch::Tensor& dkv);  // [2, n, kv_heads, d] bf16
  // Memory for what travels, which serves all calls.
  struct RingMemory {
    std::shared_ptr<void> data;
    size_t bytes = 0;
  };
  // At least `bytes` of it, for transfers of `channels`; allocated when a call needs more.
  void* Reserve(RingMemory& memory, size_t bytes, std::span<const comm::Channel> channels);

  const patterns::AttentionOptions options_;
  comm::DeviceCommunicator* const communicator_;
  ring::RingSchedule forward_, backward_;
  bool backward_started_ = false;  // its keys and values are on the ring
  patterns::LayerBudgets budgets_;
  std::shared_ptr<const CudaDocuments> documents_;  // of the next forwards; null: one
  DeviceStats stats_;
  CudaIndexBuilder index_builder_;
  RingMemory kv_memory_, grad_memory_, wire_memory_;
  DeviceSlots kv_, grads_;
  // Tiles of patterns that do not depend on the data, by (owner, tokens, window); of `documents_`.
  std::map<std::tuple<int, int64_t, int64_t>, int64_t> band_tiles_;
};

}  // namespace ringleader::attention
