// Shared-memory barriers that count arrivals and bytes of the bulk copy engine. Phases alternate; a
// waiter names the parity of the phase that it waits for.
#pragma once

#include <cstdint>

namespace ringleader::kernels::sm90::ptx {

using Mbarrier = uint64_t;

__device__ __forceinline__ uint32_t SmemAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void MbarrierInit(Mbarrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SmemAddress(barrier)),
               "r"(arrivals));
}

// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void MbarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SmemAddress(barrier)) : "memory");
}

// Keeps the phase open until `bytes` more have been copied; the arrival comes later.
__device__ __forceinline__ void MbarrierExpect(Mbarrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(SmemAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives, and keeps the phase open until `bytes` more have been copied.
__device__ __forceinline__ void MbarrierArriveExpect(Mbarrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SmemAddress(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void MbarrierWait(Mbarrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(SmemAddress(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace ringleader::kernels::sm90::ptx
