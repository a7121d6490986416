// Warpgroup matrix products in e4m3, both operands from shared memory; wgmma.cuh says how such
// products are started and waited for, and where a thread's elements of the result are.
#pragma once

#include <cstdint>

#include "kernels/sm90/ptx/mbarrier.cuh"

namespace ringleader::kernels::sm90::ptx {

// Describes rows of 64 bytes in the 64-byte swizzle, which repeats every 512 bytes, where `smem` is
// aligned. The contiguous dimension is the one that is summed over, the only order of bytes.
__device__ __forceinline__ uint64_t BytesDescriptor(const void* smem) {
  constexpr uint64_t kSwizzle64 = uint64_t{2} << 62;
  constexpr uint64_t kStride = 8 * 64 >> 4, kLeading = 1;  // 8 rows; the latter is not read
  return kSwizzle64 | kStride << 32 | kLeading << 16 | (SmemAddress(smem) & 0x3FFFF) >> 4;
}

#define RINGLEADER_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RINGLEADER_F16(d, i) \
  RINGLEADER_F4(d, i), RINGLEADER_F4(d, i + 4), RINGLEADER_F4(d, i + 8), RINGLEADER_F4(d, i + 12)

// D[64, 128] += A[64, 32] B[32, 128] in e4m3; of what is summed 13 bits below the leading one of
// the largest term are kept.
__device__ __forceinline__ void WgmmaE4m3(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, accumulate, 1, 1;\n"
      "}\n"
      : RINGLEADER_F16(d, 0), RINGLEADER_F16(d, 16), RINGLEADER_F16(d, 32), RINGLEADER_F16(d, 48)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

#undef RINGLEADER_F16
#undef RINGLEADER_F4

}  // namespace ringleader::kernels::sm90::ptx
