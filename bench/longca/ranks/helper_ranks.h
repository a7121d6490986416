// Helper ranks for contiguous shards under causal attention, DISTFLASHATTN's load balance (arXiv
// 2310.03294, section 3.2): a baseline beside stripes, which need no help. Of P ranks, rank r has
// the keys of r ranks before its own to attend to. At step t = 1 … P / 2 it takes those of rank
// r - t, where there is one; a rank without, r < t, helps instead: it attends with the queries of
// rank P - t + r to its own keys, and sends back what it found. So P / 2 + 1 steps do what P would.
// What a step needs travels during the one before it.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/longca/problem.h"
#include "bench/longca/ranks/rank_run.h"
#include "kernels/masks/masks.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"
#include "worker/comm/communicator.h"

namespace ringleader::bench {

// What a rank attends with and by what it sends. Tensors are dense and on its device, [tokens,
// heads, d]; those of the attention in its type, sums and logarithms in fp32.
class HelperDevice {
 public:
  // Makes what is computed from now on wait for a transfer.
  using Await = std::function<absl::Status()>;
  // One rank's queries, with which it attends to the keys of `keys`, its own or another's.
  struct Call {
    kernels::ShardLayout queries, keys;
    torch::Tensor q, k, v;
    torch::Tensor lse;  // [heads, tokens]
    float scale = 0;    // of logits
  };

  virtual ~HelperDevice() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual int tile() const = 0;  // of its kernels
  // Keeps both tensors until the transfer has run. A peer of -1: nobody, and its tensor does not
  // count.
  virtual absl::StatusOr<Await> SendReceive(comm::Channel channel, const torch::Tensor& sent,
                                            int to, const torch::Tensor& received, int from) = 0;
  // Merges into `out` and call.lse.
  virtual absl::Status Forward(const Call& call, const torch::Tensor& out) = 0;
  // Adds into dq, dk and dv; call.lse is the final one, delta [heads, tokens].
  virtual absl::Status Backward(const Call& call, const torch::Tensor& d_out,
                                const torch::Tensor& delta, const torch::Tensor& dq,
                                const torch::Tensor& dk, const torch::Tensor& dv) = 0;
  // Until all ranks are here, with nothing of the inputs in their caches.
  virtual absl::Status Meet() = 0;
  // Until everything that was asked for is done.
  virtual void Finish() = 0;
};

// A rank's rows.
struct HelperInputs {
  torch::Tensor q, k, v, d_out;
};
struct HelperOutputs {
  torch::Tensor out, dq, dk, dv;  // fp32
};

// Whether no query sees a key of a later of `ranks` ranks.
bool HelpersCan(const MaskedSequence& sequence, kernels::MaskKind mask, int ranks);

// One rank's forwards and backwards, after `warm_ups` that are not timed; the outputs are the last
// ones. All ranks call it. `rows`: what each query of the sequence sees; the tiles of it count as
// work.
absl::StatusOr<HelperOutputs> RunHelperRank(const HelperInputs& inputs,
                                            std::span<const kernels::KeyIntervals> rows,
                                            int warm_ups, int repetitions, HelperDevice& device,
                                            RankRun* run);

}  // namespace ringleader::bench
