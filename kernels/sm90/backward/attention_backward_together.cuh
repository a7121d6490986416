// Steps of backward attention that both consumers take together.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_consumer.cuh"

namespace ringleader::kernels::sm90 {

// All steps of an item, software-pipelined so that the tensor cores always have work queued:
// while the exponentials of a step are computed, its dP and the last step's dK are in flight;
// while dS is computed, dV is; and the next step's scores go before this step's dQ and dK. dQ
// leaves one step late, after the barrier that the next dS needs anyway.
template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient, bool kDocuments>
__device__ __forceinline__ void
BackwardConsumer<kHeadDim, kKind, kQueryGradient, kDocuments>::StepsTogether() {
  float scores[32];
  ptx::MbarrierWait(&shared_.query_arrived[query_.index], query_.lap);
  IssueTransposedScores(scores, shared_.key, shared_.query[query_.index]);
  bool accumulate = false;
  int previous = 0;  // stage of the last step's queries
  DqTarget target = {};
  bool last;
  do {
    const int query = query_.index;
    const RowStats& stats = shared_.stats[query];
    ptx::MbarrierWait(&shared_.d_out_arrived[d_out_.index], d_out_.lap);
    float d_weights[32];
    IssueTransposedScores(d_weights, shared_.value, shared_.d_out[d_out_.index]);
    const TileStep step = shared_.step[query].part[kTiles64 ? consumer_ : 0];
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(scores);
    if (accumulate) {
      Release(&shared_.query_released[previous]);
      Release(&shared_.d_scores_released);
    }

    if (step.masked) Mask(scores, step, query);
    float2 lse[8];
    LoadStats(lse, stats.lse_log2);
    uint32_t weights[16];
    Exponentials(scores, weights, lse);
    IssueKeyGradient(dv_, weights, shared_.d_out[d_out_.index], accumulate);
    ptx::WgmmaWait<1>();
    ptx::PinRegisters(d_weights);

    uint32_t d_scores[16];
    PackScoreGradient(d_scores, scores, d_weights, stats);
    if (accumulate) {
      ptx::MbarrierWait(&shared_.d_scores_released, d_scores_lap_);
      d_scores_lap_ ^= 1;
    }
    StoreScores(d_scores);
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(dv_);
    ptx::PinRegisters(weights);
    Release(&shared_.d_out_released[d_out_.index]);
    d_out_.Advance();
    query_.Advance();
    // Read here and not with the rest of the step: the compiler would wait for it between the
    // products that it issues.
    last = shared_.step[query].part[kTiles64 ? consumer_ : 0].last;
    if (!last) ptx::MbarrierWait(&shared_.query_arrived[query_.index], query_.lap);
    // On the last step the product is of stale data and is not used: a branch around it would
    // make the compiler wait for the tensor cores.
    IssueTransposedScores(scores, shared_.key, shared_.query[query_.index]);
    ptx::FenceAsyncShared();
    if constexpr (kQueryGradient == QueryGradient::kTogether) {
      if (Leads()) ptx::BulkWaitRead<0>();
      ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
      if (accumulate) SendDq(target);
      target = {shared_.step[query].head, shared_.step[query].first_query};

      float dq[Tile::kDqColumns / 2];
      IssueQueryGradient(dq, shared_.d_scores);
      IssueKeyGradient(dk_, shared_.d_scores, shared_.query[query], accumulate);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(dq);
      Stage(dq);
    } else {
      ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
      IssueKeyGradient(dk_, shared_.d_scores, shared_.query[query], accumulate);
      ptx::WgmmaWait<1>();
      ptx::PinRegisters(scores);
    }
    accumulate = true;
    previous = query;
  } while (!last);
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(dk_);
  ptx::PinRegisters(scores);
  Release(&shared_.query_released[previous]);
  if constexpr (kQueryGradient == QueryGradient::kTogether) {
    ptx::FenceAsyncShared();
    if (Leads()) ptx::BulkWaitRead<0>();  // the other buffer is free for what follows
    ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
    SendDq(target);
  } else {
    // The next item's first dS overwrites what the other consumer's product may still read.
    ptx::NamedBarrierSync(kScoresStored, 2 * ptx::kWarpgroupThreads);
  }
}

}  // namespace ringleader::kernels::sm90
