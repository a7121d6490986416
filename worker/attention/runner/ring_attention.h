// Attention of one rank's queries to the whole sequence, over a ring of ranks, on the CPU.
//
// A layer's call: build the index (estimates merged over ranks; the index is the same, bit for bit,
// on any number of ranks), run the ring schedule with transfers behind computation, then the pass
// over the selected columns, which were picked up as the keys went by. Output, log-sum-exp and
// index are kept for backward, where the gradients of keys and values travel with them and come
// home.
#pragma once

#include <torch/types.h>

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

class AttentionEngine;

class RingAttention : public ContextAttention {
 public:
  // `communicator` spans the ranks that share one sequence and must outlive this object; its size
  // is ring.inner * ring.outer. INVALID_ARGUMENT, naming the option, where options do not fit each
  // other; a sequence length that does not fit surfaces from Forward.
  static absl::StatusOr<std::unique_ptr<RingAttention>> Create(
      const patterns::AttentionOptions& options, comm::Communicator* communicator);
  ~RingAttention() override;

  // ContextAttention, of float32 tensors on the CPU.
  AttentionOutput ForwardRaw(int layer, const torch::Tensor& q, const torch::Tensor& k,
                             const torch::Tensor& v) override;
  absl::Status SetBudgets(std::span<const patterns::LayerBudget> budgets) override;
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts) override;
  AttentionStats TakeStats() override;

 private:
  explicit RingAttention(std::shared_ptr<AttentionEngine> engine);

  // Shared with the records, which may outlive this object.
  std::shared_ptr<AttentionEngine> engine_;
};

}  // namespace ringleader::attention
