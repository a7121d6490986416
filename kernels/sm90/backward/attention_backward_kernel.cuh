// Backward attention for Hopper, key-stationary: a CTA holds 128 keys of one KV head and walks the
// queries that attend to them, over some query heads of the group. Its two consumer warpgroups hold
// dK and dV of 64 keys each in registers. All gradients are added to global memory in fp32 by the
// copy engine.
//
// Per step of 64 queries, transposed so that P and dS come out as register operands:
//   S^T = K Q^T;  P^T = exp2(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ = dS K (through shared memory: it sums over both warpgroups).
//
// Lists of 64-token tiles differ between the consumers' keys. Where rows that both list are few,
// QueryGradient::kApart lets each consumer walk its own rows at its own pace: it gives stages that
// are for the other alone back without a product, and adds its own part of dQ.
//
// Deterministic mode: fp32 terms that several CTAs add to one element make its bits depend on which
// comes first. So here no element has two: dQ comes from attention_query_gradient_kernel.cuh, where
// one CTA sums all of a query's terms, and an item takes all heads of a group, so that one CTA sums
// all of a key's. What a CTA sums it sums in the order of its walk, which depends on the arguments
// and the number of multiprocessors alone. No CTA waits for another: there is no order between
// items that could be cyclic.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/backward/attention_backward_apart.cuh"
#include "kernels/sm90/backward/attention_backward_together.cuh"
#include "kernels/sm90/warpgroup/roles.cuh"

namespace ringleader::kernels::sm90 {

template <int kHeadDim, WalkKind kKind, QueryGradient kQueryGradient, bool kDocuments>
__global__ void __launch_bounds__(BackwardTile<kHeadDim>::kThreads, 1) AttentionBackwardKernel(
    const __grid_constant__ BackwardParams params, const __grid_constant__ CUtensorMap query_map,
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
    const __grid_constant__ CUtensorMap d_out_map, const __grid_constant__ CUtensorMap dq_map,
    const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map) {
  using Tile = BackwardTile<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<BackwardShared<kHeadDim, KeyStepOf<kKind>>*>(raw_shared);
  if (threadIdx.x == 0) {
    constexpr int kConsumerThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
    ptx::MbarrierInit(&shared.item_arrived, 1);
    ptx::MbarrierInit(&shared.item_released, kConsumerThreads);
    ptx::MbarrierInit(&shared.d_scores_released, kConsumerThreads);
    for (int i = 0; i < Tile::kQueryStages; ++i) {
      ptx::MbarrierInit(&shared.query_arrived[i], BackwardTiles<kKind, kDocuments>::kDescribers);
      ptx::MbarrierInit(&shared.query_released[i], kConsumerThreads);
    }
    for (int i = 0; i < Tile::kOutStages; ++i) {
      ptx::MbarrierInit(&shared.d_out_arrived[i], 1);
      ptx::MbarrierInit(&shared.d_out_released[i], kConsumerThreads);
    }
    ptx::MbarrierInitFence();
    ptx::PrefetchTensorMap(&query_map);
    ptx::PrefetchTensorMap(&key_map);
    ptx::PrefetchTensorMap(&value_map);
    ptx::PrefetchTensorMap(&d_out_map);
  }
  __syncthreads();
  RunRoles<1>(
      [&](int) {
        BackwardProduce<kHeadDim, kKind, kDocuments>(params, &query_map, &key_map, &value_map,
                                                     &d_out_map, shared);
      },
      [&](int consumer) {
        BackwardConsumer<kHeadDim, kKind, kQueryGradient, kDocuments>(params, &dq_map, &dk_map,
                                                                      &dv_map, shared, consumer)
            .Run();
      });
}

}  // namespace ringleader::kernels::sm90
