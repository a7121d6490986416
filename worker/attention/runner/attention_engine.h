// Ring attention on plain memory: what RingAttention wraps for autograd. No LibTorch.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/reference/math/engine.h"
#include "patterns/attention_options.h"
#include "patterns/layer_budgets.h"
#include "ringleader/kernels/attention.h"
#include "worker/attention/cpu/travelling_buffers.h"
#include "worker/attention/index/index_builder.h"
#include "worker/attention/index/layer_index.h"
#include "worker/attention/index/sequence_documents.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// One call at a time, the same calls in the same order on all ranks.
class AttentionEngine {
 public:
  static absl::StatusOr<std::shared_ptr<AttentionEngine>> Create(
      const patterns::AttentionOptions& options, comm::Communicator* communicator);

  // q: [n, heads, d]; k and v: [n, kv_heads, d]. out: [n, heads, d] zero, lse: [heads, n] -infinity
  // on entry. The index serves the layer's Backward.
  absl::StatusOr<std::shared_ptr<const LayerIndex>> Forward(
      int layer, const kernels::TokenMajor<const float>& q,
      const kernels::TokenMajor<const float>& k, const kernels::TokenMajor<const float>& v,
      const kernels::TokenMajor<float>& out, float* lse);

  // What Forward took and left. dq, dk and dv are dense and zero on entry.
  struct BackwardCall {
    kernels::TokenMajor<const float> q, k, v, out, d_out;
    const float* lse = nullptr;
    kernels::TokenMajor<float> dq, dk, dv;
  };
  absl::Status Backward(const LayerIndex& index, const BackwardCall& call);
  // AttentionRecord::StartBackward.
  absl::Status StartBackward(const kernels::TokenMajor<const float>& k,
                             const kernels::TokenMajor<const float>& v);

  absl::Status SetBudgets(std::span<const patterns::LayerBudget> budgets);
  // ContextAttention::SetDocuments.
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts);
  AttentionStats TakeStats();

 private:
  AttentionEngine(const patterns::AttentionOptions& options, comm::Communicator* communicator);

  kernels::ShardLayout LayoutOf(int rank, int64_t local_tokens) const;
  LayerStats& StatsOf(int layer);
  // The ring's slots with this rank's keys and values in place, and with kAllGather everyone's.
  absl::StatusOr<std::unique_ptr<TravellingBuffers>> LoadKv(
      const ring::RingSchedule& schedule, const kernels::TokenMajor<const float>& k,
      const kernels::TokenMajor<const float>& v);
  absl::Status ReturnGradients(const ring::RingSchedule& schedule, TravellingBuffers& grads,
                               const BackwardCall& call);

  const patterns::AttentionOptions options_;
  comm::Communicator* const communicator_;
  kernels::reference::Engine engine_;
  ring::RingSchedule forward_, backward_;
  patterns::LayerBudgets budgets_;
  std::shared_ptr<const SequenceDocuments> documents_;  // of the next forwards; null: one
  AttentionStats stats_;
  std::unique_ptr<TravellingBuffers> started_;  // keys and values of a backward that was started
  IndexBuilder index_builder_;
};

}  // namespace ringleader::attention
