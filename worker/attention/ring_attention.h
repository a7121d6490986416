// Attention of one rank's queries to the whole sequence, over a ring of ranks, differentiable.
//
// A layer's call: build the index (estimates merged over ranks; the index is the same, bit for bit,
// on any number of ranks), run the ring schedule with transfers behind computation, then the pass
// over the selected columns, which were picked up as the keys went by. Output, log-sum-exp and
// index are kept for backward, where the gradients of keys and values travel with them and come
// home.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/attention/attention_options.h"
#include "worker/attention/attention_stats.h"
#include "worker/attention/layer_attention.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

class AttentionEngine;

// Not thread-safe. All ranks of the communicator make the same calls in the same order.
class RingAttention : public LayerAttention {
 public:
  // `communicator` spans the ranks that share one sequence and must outlive this object; its size
  // is ring.inner * ring.outer. INVALID_ARGUMENT, naming the option, where options do not fit each
  // other; a sequence length that does not fit surfaces from Forward.
  static absl::StatusOr<std::unique_ptr<RingAttention>> Create(const AttentionOptions& options,
                                                               comm::Communicator* communicator);
  ~RingAttention() override;

  // LayerAttention. float32 on CPU, any strides with a dense last dimension. The sequence has
  // n * communicator size tokens. c10::Error names what does not fit or went wrong in the ring.
  torch::Tensor Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v) override;

  // Replaces the budgets by layer from the next Forward on; layers behind the end keep the
  // options'. Must be called alike on all ranks, between steps.
  absl::Status SetBudgets(std::span<const LayerBudget> budgets);

  // What happened since the last call; resets it.
  AttentionStats TakeStats();

 private:
  explicit RingAttention(std::shared_ptr<AttentionEngine> engine);

  // Shared with the autograd graph, which may outlive this object.
  std::shared_ptr<AttentionEngine> engine_;
};

}  // namespace ringleader::attention
