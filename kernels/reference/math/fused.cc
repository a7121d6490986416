#include "kernels/reference/math/fused.h"

#include "kernels/reference/math/row_math.h"
#include "kernels/reference/math/tile_math.h"

namespace ringleader::kernels::reference {

const RowMath& BestRowMath() {
#if defined(__x86_64__)
  if (&BestTileMath() == &internal::Avx512TileMath()) return internal::Avx512RowMath();
  if (&BestTileMath() == &internal::Avx2TileMath()) return internal::Avx2RowMath();
#endif
  return internal::GenericRowMath();
}

void RmsNormForward(const RmsNormForwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    args.rstd[row] = math.rms_norm(args.dim, args.x + row * args.dim, args.weight, args.epsilon,
                                   args.y + row * args.dim);
  }
}

void RmsNormBackward(const RmsNormBackwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t begin = row * args.dim;
    math.rms_norm_backward(args.dim, args.x + begin, args.weight, args.rstd[row], args.dy + begin,
                           args.dx + begin, args.d_weight);
  }
}

void Rope(const RopeArgs& args) {
  const RowMath& math = BestRowMath();
  const int64_t half = args.x.head_dim / 2;
  for (int64_t t = 0; t < args.x.tokens; ++t) {
    for (int head = 0; head < args.x.heads; ++head) {
      math.rotate(half, args.inverse ? -1.0f : 1.0f,
                  args.x.data + t * args.x.token_stride + head * args.x.head_stride,
                  args.cos + t * half, args.sin + t * half,
                  args.out.data + t * args.out.token_stride + head * args.out.head_stride);
    }
  }
}

void SwigluForward(const SwigluForwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    math.swiglu(args.dim, args.gate + row * args.stride, args.up + row * args.stride,
                args.out + row * args.dim);
  }
}

void SwigluBackward(const SwigluBackwardArgs& args) {
  const RowMath& math = BestRowMath();
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t wide = row * args.stride, dense = row * args.dim;
    math.swiglu_backward(args.dim, args.gate + wide, args.up + wide, args.d_out + dense,
                         args.d_gate + wide, args.d_up + wide,
                         args.out == nullptr ? nullptr : args.out + dense);
  }
}

void EmbeddingBackward(const EmbeddingBackwardArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* const from = args.dx + row * args.stride;
    float* const to = args.table + args.tokens[row] * args.stride;
    for (int64_t i = 0; i < args.dim; ++i) to[i] += from[i];
  }
}

}  // namespace ringleader::kernels::reference
