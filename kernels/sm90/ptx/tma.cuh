// The bulk copy engine: tensor tiles and plain ranges from global to shared memory, and fp32 sums
// back; and sums from registers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringleader::kernels::sm90::ptx {

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a box of a [heads, d / 64, tokens, 64] tensor; the coordinates are those of its first
// element, in elements. What lies beyond the tensor's end arrives as zeros and counts towards the
// barrier's bytes.
__device__ __forceinline__ void TmaLoadTile(void* smem, const CUtensorMap* map, Mbarrier* barrier,
                                            int32_t token, int32_t head) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %3, %5}], [%2];" ::"r"(SmemAddress(smem)),
      "l"(map), "r"(SmemAddress(barrier)), "r"(0), "r"(token), "r"(head)
      : "memory");
}

// The same for boxes of one block of 64 columns.
__device__ __forceinline__ void TmaLoadBlock(void* smem, const CUtensorMap* map, Mbarrier* barrier,
                                             int32_t token, int32_t block, int32_t head) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SmemAddress(smem)),
      "l"(map), "r"(SmemAddress(barrier)), "r"(0), "r"(token), "r"(block), "r"(head)
      : "memory");
}

// Copies `bytes` (a multiple of 16, as both addresses are).
__device__ __forceinline__ void BulkLoad(void* smem, const void* global, uint32_t bytes,
                                         Mbarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SmemAddress(smem)),
      "l"(global), "r"(bytes), "r"(SmemAddress(barrier))
      : "memory");
}

// Adds a box of shared memory into a [heads, d / 32, tokens, 32] fp32 tensor; rows beyond its end
// are dropped.
__device__ __forceinline__ void TmaAddTile(const CUtensorMap* map, const void* smem, int32_t token,
                                           int32_t part, int32_t head) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];" ::"l"(map),
      "r"(SmemAddress(smem)), "r"(0), "r"(token), "r"(part), "r"(head)
      : "memory");
}

// Adds four neighbours in global memory, aligned to 16 bytes.
__device__ __forceinline__ void AddFour(float* global, const float4& values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global),
               "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
               : "memory");
}

__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until shared memory of all but the last `kPending` groups of this thread may be
// overwritten.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all groups of this thread are complete.
__device__ __forceinline__ void BulkWaitAll() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace ringleader::kernels::sm90::ptx
