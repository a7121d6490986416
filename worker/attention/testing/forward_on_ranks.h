// One forward of the CPU engine on the ranks of a ring, each in a thread of its own.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "worker/attention/cpu/cpu_attention_call.h"
#include "worker/attention/runner/ring_runner.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention::testing {

// What a rank has after its forward.
template <typename Call>
struct RankForward {
  int rank;
  RingRunner& runner;
  Call& call;
  std::shared_ptr<const LayerIndex> index;
  const kernels::reference::testing::Tensor& out;
};

// q, k, v: of the whole sequence, dealt to the ranks of options.ring. prepare(runner) goes before
// each rank's forward of `layer`, take(RankForward<Call>) after it.
template <typename Call = CpuCall, typename Prepare, typename Take>
void ForwardOnRanks(const patterns::AttentionOptions& options, int layer,
                    const kernels::reference::testing::Tensor& q,
                    const kernels::reference::testing::Tensor& k,
                    const kernels::reference::testing::Tensor& v, const Prepare& prepare,
                    const Take& take) {
  using kernels::reference::testing::Shard;
  using kernels::reference::testing::Tensor;
  comm::testing::RunRanks(options.ring.ranks(), [&](comm::Communicator& communicator) {
    const kernels::ShardLayout layout{.kind = options.layout,
                                      .ranks = options.ring.ranks(),
                                      .rank = communicator.rank(),
                                      .stripe = options.stripe == 0 ? options.tile : options.stripe,
                                      .tokens = q.tokens};
    const Tensor my_q = Shard(q, layout), my_k = Shard(k, layout), my_v = Shard(v, layout);
    Tensor out(layout.local_tokens(), q.heads, q.head_dim);
    std::vector<float> lse(q.heads * layout.local_tokens(),
                           -std::numeric_limits<float>::infinity());
    CpuAttentionDevice device(&communicator, options.threads);
    const auto runner = RingRunner::Create(options, &device);
    ASSERT_TRUE(runner.ok()) << runner.status();
    prepare(**runner);
    Call call(&device, layer, {my_q.view(), my_k.view(), my_v.view(), out.view(), lse.data()});
    const auto index = (*runner)->Forward(call);
    ASSERT_TRUE(index.ok()) << index.status();
    take(RankForward<Call>{layout.rank, **runner, call, *index, out});
  });
}

}  // namespace ringleader::attention::testing
