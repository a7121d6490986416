// Named barriers, register reallocation between warpgroups, and the fence between ordinary stores
// and the asynchronous units (copy engine, tensor cores).
#pragma once

#include <cstdint>

namespace ringleader::kernels::sm90::ptx {

constexpr int kWarpgroupThreads = 128;

__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void RegistersGrow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void RegistersShrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// What this thread stored to shared memory becomes visible to wgmma and to the copy engine (a
// barrier must follow).
__device__ __forceinline__ void FenceAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ringleader::kernels::sm90::ptx
