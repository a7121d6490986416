// What the benches of attention kernels share: one rank's tensors, runs over tiles, and cuDNN's
// attention through LibTorch beside them.
#pragma once

#include <torch/types.h>

#include <limits>
#include <utility>
#include <vector>

#include "kernels/bench/bench_report.h"
#include "kernels/ops/token_view.h"
#include "kernels/sm90/attention.h"

namespace ringleader::kernels::bench {

struct Shape {
  int64_t tokens;
  int heads, kv_heads, head_dim;
  bool deterministic = false;  // backward is measured in this mode as well
};

struct Milliseconds {
  double forward = 0, backward = 0;
  double deterministic = 0;  // backward; 0: not asked for
};

inline at::TensorOptions OnGpu(at::ScalarType type) {
  return at::TensorOptions().device(at::kCUDA).dtype(type);
}

template <typename T>
TokenMajor<T> View(const at::Tensor& tensor) {
  return ops::TokenView(tensor, static_cast<T*>(tensor.data_ptr()));
}

// Random inputs, and what a call writes.
struct Tensors {
  at::Tensor q, k, v, d_out, out, lse, delta, dq, dk, dv, workspace;

  explicit Tensors(const Shape& s);
  float* f(const at::Tensor& tensor) const { return tensor.data_ptr<float>(); }
  sm90::Workspace scratch() const { return {workspace.data_ptr(), workspace.numel()}; }
  void Reset() const { lse.fill_(-std::numeric_limits<float>::infinity()); }
  void ComputeDelta() const { delta.copy_((out * d_out.to(at::kFloat)).sum(-1).transpose(0, 1)); }
};

// backward(deterministic), by default and, where the shape asks for it, deterministic.
template <typename Backward>
void MeasureBackward(const Shape& s, int repeats, Milliseconds& ms, const Backward& backward) {
  ms.backward = MedianMs([&] { backward(false); }, repeats);
  if (s.deterministic) ms.deterministic = MedianMs([&] { backward(true); }, repeats);
}

// Queries and keys of each step, one after the other.
using Steps = std::vector<std::pair<ShardLayout, ShardLayout>>;
Milliseconds MeasureTiles(const Tensors& t, const Shape& s, const TileSelection& tiles,
                          const Steps& steps, int repeats);

Milliseconds MeasureCudnn(const Shape& s, bool causal, int repeats);

// Loads LibTorch's CUDA half, without which the programs are linked; false, and says so, where
// there is none or no GPU.
bool FindGpu(const char* program);

}  // namespace ringleader::kernels::bench
