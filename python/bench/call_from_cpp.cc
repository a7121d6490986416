// The seconds that calls of the operator take from C++, for bench/python_kernels.py to compare with
// those from Python: torch.ops.ringleader_bench.call_seconds.
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/types.h>

#include <chrono>
#include <optional>
#include <tuple>

namespace {

using torch::Tensor;

// Returns the seconds that `calls` forwards take the host, each with a backward if asked for.
double CallSeconds(const Tensor& q, const Tensor& k, const Tensor& v, int64_t pattern,
                   at::TensorList lists, int64_t tile, int64_t size, double scale, int64_t calls,
                   bool backward) {
  // The operator is in a library that Python has loaded.
  static const auto attention =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ringleader::attention", "")
          .typed<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t,
                                            at::TensorList, const std::optional<Tensor>&,
                                            const std::optional<Tensor>&, int64_t, int64_t, double,
                                            bool)>();
  const Tensor d_out = torch::ones_like(q);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    const auto [out, lse] =
        attention.call(q, k, v, pattern, lists, /*documents=*/std::nullopt,
                       /*intervals=*/std::nullopt, tile, size, scale, /*deterministic=*/false);
    if (backward) torch::autograd::grad({out}, {q, k, v}, {d_out});
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TORCH_LIBRARY(ringleader_bench, m) {
  m.def(
      "call_seconds(Tensor q, Tensor k, Tensor v, int pattern, Tensor[] lists, int tile, int size, "
      "float scale, int calls, bool backward) -> float",
      CallSeconds);
}
