// Blocks of a cluster: their rank, their barrier, and stores into each other's shared memory.
#pragma once

#include <cstdint>

#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringleader::kernels::sm90::ptx {

__device__ __forceinline__ int ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Waits for all threads of all blocks of the cluster; whole warps call.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// Arrives at the barrier that block `rank` has where `barrier` lies here. Says that products which
// were waited for have read shared memory; other accesses to memory are not ordered by it.
__device__ __forceinline__ void MbarrierArriveAt(Mbarrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 bar;\n"
      "mapa.shared::cluster.u32 bar, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [bar];\n"
      "}" ::"r"(SmemAddress(barrier)),
      "r"(rank)
      : "memory");
}

// Writes two floats into block `rank`, at the place that `to` (8-byte aligned) has here, and counts
// 8 bytes towards that block's `barrier`. Needs no fence: whoever waits for the barrier sees them.
__device__ __forceinline__ void SendFloats(float* to, Mbarrier* barrier, int rank, float x,
                                           float y) {
  asm volatile(
      "{\n"
      ".reg .b32 data, bar;\n"
      "mapa.shared::cluster.u32 data, %0, %2;\n"
      "mapa.shared::cluster.u32 bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [data], {%3, %4}, [bar];\n"
      "}" ::"r"(SmemAddress(to)),
      "r"(SmemAddress(barrier)), "r"(rank), "f"(x), "f"(y)
      : "memory");
}

}  // namespace ringleader::kernels::sm90::ptx
