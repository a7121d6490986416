// Warpgroup matrix products: D[64, N] += A[64, 16] B[16, N] in bf16 with fp32 accumulators, A from
// shared memory or registers, B from shared memory. Asynchronous: fence, issue, commit, wait; until
// then the registers belong to the tensor cores.
//
// Shared tiles are rows of 128 bytes (64 bf16) in the 128-byte swizzle that the copy engine writes;
// a tile of 128 columns is two such tiles one after the other.
//
// Accumulator layout: thread t of a warpgroup holds rows 16 * (t / 32) + (t % 32) / 4 + {0, 8} and
// columns 8 * j + 2 * (t % 4) + {0, 1}; element index 4 * j + 2 * (row half) + (column low bit).
// Pairs of 8-column groups, packed to bf16, are the A operand of a following product.
#pragma once

#include <cstdint>

#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringleader::kernels::sm90::ptx {

enum class Major : int {
  kK = 0,
  kMn = 1
};  // which dimension of an operand is contiguous in memory

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups are in flight.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads and writes of registers across the point where their owner
// changes.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void PinRegisters(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

constexpr uint32_t kSwizzleRowBytes = 128;
constexpr uint32_t kSwizzleAtomBytes = 8 * kSwizzleRowBytes;

// Describes an operand in the 128-byte swizzle. `column_block_bytes` is the distance between
// 64-element blocks along a contiguous M or N dimension longer than 64, unused otherwise;
// `atom_bytes` that between eight rows and the next.
__device__ __forceinline__ uint64_t OperandDescriptor(const void* smem,
                                                      uint32_t column_block_bytes = 16,
                                                      uint32_t atom_bytes = kSwizzleAtomBytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  const uint64_t address = (SmemAddress(smem) & 0x3FFFF) >> 4;
  const uint64_t leading = (column_block_bytes & 0x3FFFF) >> 4;
  const uint64_t stride = atom_bytes >> 4;
  return kSwizzle128 | stride << 32 | leading << 16 | address;
}

// The same operand, `bytes` further.
__device__ __forceinline__ uint64_t DescriptorAdvance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Stores four 8 x 8 matrices of bf16, the fragments of one row block of an accumulator packed in
// pairs; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void StoreMatrices(void* row, const uint32_t* packed) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SmemAddress(row)),
      "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
      : "memory");
}

// Loads what StoreMatrices stores: the A operand of a product whose rows these are.
__device__ __forceinline__ void LoadMatrices(uint32_t* packed, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(packed[0]), "=r"(packed[1]), "=r"(packed[2]), "=r"(packed[3])
               : "r"(SmemAddress(row))
               : "memory");
}

#define RINGLEADER_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RINGLEADER_F16(d, i) \
  RINGLEADER_F4(d, i), RINGLEADER_F4(d, i + 4), RINGLEADER_F4(d, i + 8), RINGLEADER_F4(d, i + 12)

template <int kN>
struct Wgmma;

template <>
struct Wgmma<32> {
  // `accumulate` false overwrites D.
  template <Major kA = Major::kK, Major kB = Major::kK>
  static __device__ __forceinline__ void SharedShared(float (&d)[16], uint64_t a, uint64_t b,
                                                      bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, accumulate, 1, 1, %19, %20;\n"
        "}\n"
        : RINGLEADER_F16(d, 0)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int(kA)), "n"(int(kB)));
  }
};

template <>
struct Wgmma<64> {
  template <Major kA = Major::kK, Major kB = Major::kK>
  static __device__ __forceinline__ void SharedShared(float (&d)[32], uint64_t a, uint64_t b,
                                                      bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, accumulate, 1, 1, %35, %36;\n"
        "}\n"
        : RINGLEADER_F16(d, 0), RINGLEADER_F16(d, 16)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int(kA)), "n"(int(kB)));
  }

  template <Major kB = Major::kK>
  static __device__ __forceinline__ void RegisterShared(float (&d)[32], const uint32_t* a,
                                                        uint64_t b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n"
        "}\n"
        : RINGLEADER_F16(d, 0), RINGLEADER_F16(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int(kB)));
  }
};

template <>
struct Wgmma<128> {
  template <Major kA = Major::kK, Major kB = Major::kK>
  static __device__ __forceinline__ void SharedShared(float (&d)[64], uint64_t a, uint64_t b,
                                                      bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, accumulate, 1, 1, %67, %68;\n"
        "}\n"
        : RINGLEADER_F16(d, 0), RINGLEADER_F16(d, 16), RINGLEADER_F16(d, 32), RINGLEADER_F16(d, 48)
        : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int(kA)), "n"(int(kB)));
  }

  template <Major kB = Major::kK>
  static __device__ __forceinline__ void RegisterShared(float (&d)[64], const uint32_t* a,
                                                        uint64_t b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, %70;\n"
        "}\n"
        : RINGLEADER_F16(d, 0), RINGLEADER_F16(d, 16), RINGLEADER_F16(d, 32), RINGLEADER_F16(d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int(kB)));
  }
};

#undef RINGLEADER_F16
#undef RINGLEADER_F4

}  // namespace ringleader::kernels::sm90::ptx
