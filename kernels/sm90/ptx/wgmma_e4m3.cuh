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

#define RINGLEADER_R4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define RINGLEADER_R16(d, i) \
  RINGLEADER_R4(d, i), RINGLEADER_R4(d, i + 4), RINGLEADER_R4(d, i + 8), RINGLEADER_R4(d, i + 12)

// D[64, 128] += A[64, 32] B[32, 128] in e4m3, D in half precision: two neighbours of a row in a
// register, elsewhere as in wgmma.cuh. Of what is summed 13 bits below the leading one of the
// largest term are kept, and the sum is rounded.
__device__ __forceinline__ void WgmmaE4m3(uint32_t (&d)[32], uint64_t a, uint64_t b,
                                          bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, accumulate, 1, 1;\n"
      "}\n"
      : RINGLEADER_R16(d, 0), RINGLEADER_R16(d, 16)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

#undef RINGLEADER_R16
#undef RINGLEADER_R4

}  // namespace ringleader::kernels::sm90::ptx
