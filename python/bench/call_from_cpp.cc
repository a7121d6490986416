// The seconds that calls take from C++, for bench/python_kernels.py to compare with those from
// Python: torch.ops.ringleader_bench.call_seconds, sdpa_seconds and grad_seconds.
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/types.h>

#include <chrono>
#include <optional>
#include <tuple>

namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns the seconds that `calls` chains of `layers` forwards, each of the one before it, take the
// host, each with a backward through it if asked for, and with the end of what they made.
template <typename Attention>
double ChainSeconds(const Attention& attention, const Tensor& q, const Tensor& k, const Tensor& v,
                    int64_t calls, int64_t layers, bool backward) {
  const Tensor d_out = torch::ones_like(q);
  const auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    Tensor x = q;
    for (int64_t layer = 0; layer < layers; ++layer) x = attention(x);
    if (backward) torch::autograd::grad({x}, {q, k, v}, {d_out});
  }
  return SecondsSince(start);
}

double CallSeconds(const Tensor& q, const Tensor& k, const Tensor& v, int64_t pattern,
                   at::TensorList lists, int64_t calls, int64_t layers, bool backward) {
  // The operator is in a library that Python has loaded.
  static const auto operation =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ringleader::attention", "")
          .typed<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t,
                                            at::TensorList, const std::optional<Tensor>&,
                                            const std::optional<Tensor>&, int64_t, int64_t, int64_t,
                                            double, std::optional<double>, std::optional<bool>)>();
  const auto attention = [&](const Tensor& x) {
    return std::get<0>(operation.call(x, k, v, pattern, lists, /*documents=*/std::nullopt,
                                      /*intervals=*/std::nullopt, /*tile=*/128, /*size=*/0,
                                      /*topk_blocks=*/0,
                                      /*density=*/0, /*scale=*/std::nullopt,
                                      /*deterministic=*/std::nullopt));
  };
  return ChainSeconds(attention, q, k, v, calls, layers, backward);
}

// The same of PyTorch's own attention.
double SdpaSeconds(const Tensor& q, const Tensor& k, const Tensor& v, int64_t calls, int64_t layers,
                   bool backward) {
  const auto attention = [&](const Tensor& x) {
    return at::scaled_dot_product_attention(x, k, v, /*attn_mask=*/{}, /*dropout_p=*/0,
                                            /*is_causal=*/true, /*scale=*/std::nullopt,
                                            /*enable_gqa=*/true);
  };
  return ChainSeconds(attention, q, k, v, calls, layers, backward);
}

// Returns the seconds that `calls` backwards of `out` take the host.
double GradSeconds(const Tensor& out, const Tensor& input, int64_t calls) {
  const Tensor d_out = torch::ones_like(out);
  const auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    torch::autograd::grad({out}, {input}, {d_out}, /*retain_graph=*/true);
  }
  return SecondsSince(start);
}

}  // namespace

TORCH_LIBRARY(ringleader_bench, m) {
  m.def(
      "call_seconds(Tensor q, Tensor k, Tensor v, int pattern, Tensor[] lists, int calls, "
      "int layers, bool backward) -> float",
      CallSeconds);
  m.def("sdpa_seconds(Tensor q, Tensor k, Tensor v, int calls, int layers, bool backward) -> float",
        SdpaSeconds);
  m.def("grad_seconds(Tensor out, Tensor input, int calls) -> float", GradSeconds);
}
