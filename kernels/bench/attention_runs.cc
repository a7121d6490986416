#include "kernels/bench/attention_runs.h"

#include <dlfcn.h>
#include <torch/autograd.h>
#include <torch/cuda.h>

#include <cmath>
#include <cstdio>

namespace ringleader::kernels::bench {

Tensors::Tensors(const Shape& s) {
  const auto bf16 = OnGpu(at::kBFloat16), fp32 = OnGpu(at::kFloat);
  q = at::randn({s.tokens, s.heads, s.head_dim}, bf16);
  k = at::randn({s.tokens, s.kv_heads, s.head_dim}, bf16);
  v = at::randn_like(k);
  d_out = at::randn_like(q);
  out = at::zeros({s.tokens, s.heads, s.head_dim}, fp32);
  dq = at::zeros_like(out);
  dk = at::zeros({s.tokens, s.kv_heads, s.head_dim}, fp32);
  dv = at::zeros_like(dk);
  lse = at::empty({s.heads, s.tokens}, fp32);
  delta = at::empty_like(lse);
  workspace = at::empty({1 << 28}, OnGpu(at::kByte));
}

Milliseconds MeasureTiles(const Tensors& t, const Shape& s, const TileSelection& tiles,
                          const Steps& steps, int repeats) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  Milliseconds ms;
  ms.forward = MedianMs(
      [&] {
        t.Reset();
        for (const auto& [query, key] : steps) {
          Check(sm90::AttentionForward({.q = View<const __nv_bfloat16>(t.q),
                                        .k = View<const __nv_bfloat16>(t.k),
                                        .v = View<const __nv_bfloat16>(t.v),
                                        .out = View<float>(t.out),
                                        .lse = t.f(t.lse),
                                        .query_layout = query,
                                        .key_layout = key,
                                        .tiles = tiles,
                                        .scale = scale},
                                       t.scratch(), nullptr));
        }
      },
      repeats);
  t.ComputeDelta();
  MeasureBackward(s, repeats, ms, [&](bool deterministic) {
    for (const auto& [query, key] : steps) {
      Check(sm90::AttentionBackward({.q = View<const __nv_bfloat16>(t.q),
                                     .k = View<const __nv_bfloat16>(t.k),
                                     .v = View<const __nv_bfloat16>(t.v),
                                     .d_out = View<const __nv_bfloat16>(t.d_out),
                                     .lse = t.f(t.lse),
                                     .delta = t.f(t.delta),
                                     .dq = View<float>(t.dq),
                                     .dk = View<float>(t.dk),
                                     .dv = View<float>(t.dv),
                                     .query_layout = query,
                                     .key_layout = key,
                                     .tiles = tiles,
                                     .scale = scale,
                                     .deterministic = deterministic},
                                    t.scratch(), nullptr));
    }
  });
  return ms;
}

Milliseconds MeasureCudnn(const Shape& s, bool causal, int repeats) {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseMath(false);
  at::globalContext().setSDPUseCuDNN(true);
  const auto input = [&](int heads) {
    return at::randn({1, heads, s.tokens, s.head_dim}, OnGpu(at::kBFloat16)).requires_grad_();
  };
  const at::Tensor q = input(s.heads), k = input(s.kv_heads), v = input(s.kv_heads);
  const auto attention = [&] {
    return at::scaled_dot_product_attention(q, k, v, {}, 0.0, causal, {}, /*enable_gqa=*/true);
  };
  Milliseconds ms;
  {
    const at::NoGradGuard no_grad;
    ms.forward = MedianMs([&] { attention(); }, repeats);
  }
  const at::Tensor out = attention(), d_out = at::randn_like(out);
  ms.backward = MedianMs(
      [&] {
        torch::autograd::grad({out}, {q, k, v}, {d_out}, /*retain_graph=*/true);
      },
      repeats);
  return ms;
}

bool FindGpu(const char* program) {
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr &&
      torch::cuda::is_available()) {
    return true;
  }
  std::printf("%s: SKIPPED, no GPU or no LibTorch with CUDA\n", program);
  return false;
}

}  // namespace ringleader::kernels::bench
