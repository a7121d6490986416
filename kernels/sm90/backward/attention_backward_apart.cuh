// Steps of backward attention over lists of 64-token tiles, which each consumer takes by itself.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_consumer.cuh"

namespace ringleader::kernels::sm90 {

// Takes all steps of an item that are this consumer's and returns whether there was one. Steps are
// not pipelined: the other consumer, which is at another step, keeps the tensor cores busy.
template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient, bool kDocuments>
__device__ __forceinline__ bool
BackwardConsumer<kHeadDim, kKind, kQueryGradient, kDocuments>::StepsApart() {
  bool accumulate = false;
  bool last;
  do {
    const int query = query_.index, d_out = d_out_.index;
    ptx::MbarrierWait(&shared_.query_arrived[query], query_.lap);
    const TileStep step = shared_.step[query].part[consumer_];
    last = step.last;
    query_.Advance();
    if (step.keys == 0) {  // the other consumer's alone
      Release(&shared_.query_released[query]);
      // Without this wait, the wait one lap later would find this phase's parity and not wait at
      // all.
      ptx::MbarrierWait(&shared_.d_out_arrived[d_out], d_out_.lap);
      Release(&shared_.d_out_released[d_out]);
      d_out_.Advance();
      continue;
    }
    float scores[32], d_weights[32];
    IssueTransposedScores(scores, shared_.key, shared_.query[query]);
    ptx::MbarrierWait(&shared_.d_out_arrived[d_out], d_out_.lap);
    d_out_.Advance();
    IssueTransposedScores(d_weights, shared_.value, shared_.d_out[d_out]);
    const RowStats& stats = shared_.stats[query];
    float2 lse[8];
    LoadStats(lse, stats.lse_log2);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(scores);
    if (step.masked) Mask(scores, step, query);
    uint32_t weights[16];
    Exponentials(scores, weights, lse);
    IssueKeyGradient(dv_, weights, shared_.d_out[d_out], accumulate);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(d_weights);

    uint32_t d_scores[16];
    PackScoreGradient(d_scores, scores, d_weights, stats);
    StoreScores(d_scores);
    const DqTarget target = {shared_.step[query].head, shared_.step[query].first_query};
    ptx::FenceAsyncShared();
    if (Leads()) ptx::BulkWaitRead<0>();  // both buffers are free
    ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
    float dq[Tile::kDqColumns / 2];
    IssueOwnQueryGradient(dq, 0);
    IssueKeyGradient(dk_, shared_.d_scores, shared_.query[query], accumulate);
    accumulate = true;
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(dv_);
    ptx::PinRegisters(weights);
    ptx::PinRegisters(dq);
    Release(&shared_.d_out_released[d_out]);
    Stage(dq);
    ptx::FenceAsyncShared();
    ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
    Send(dq_map_, target.first_query, 0, target.head);
    IssueOwnQueryGradient(dq, 1);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(dk_);
    ptx::PinRegisters(dq);
    Release(&shared_.query_released[query]);
    Stage(dq);
    ptx::FenceAsyncShared();
    ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
    Send(dq_map_, target.first_query, 1, target.head);
  } while (!last);
  if (accumulate) {
    if (Leads()) ptx::BulkWaitRead<0>();  // both buffers are free for what follows
    ptx::NamedBarrierSync(kKeyGradientStaged + consumer_, ptx::kWarpgroupThreads);
  }
  return accumulate;
}

}  // namespace ringleader::kernels::sm90
