// fused_bench [--csv FILE] [--commit NAME]: the memory-bound kernels of a training step against the
// copy bandwidth that the same run measures. Bytes count once: every input read, every output
// written.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "absl/strings/str_format.h"
#include "kernels/bench/bench_report.h"
#include "kernels/bench/random_tensor.h"
#include "kernels/fused/adamw_update.h"
#include "kernels/fused/cast.h"
#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/rms_norm.h"
#include "kernels/fused/rotate.h"
#include "kernels/fused/swiglu.h"
#include "kernels/testing/device_buffer.h"

namespace ringleader::kernels::bench {
namespace {

using Bf16 = __nv_bfloat16;

DeviceBuffer<float> RandomFloat(int64_t count) {
  // Two bf16 in a float: an arbitrary, finite, normal value.
  DeviceBuffer<Bf16> source = RandomTensor(2 * count);
  DeviceBuffer<float> out(count);
  CheckCuda(cudaMemcpy(out.data(), source.data(), out.Bytes(), cudaMemcpyDeviceToDevice), "fill");
  return out;
}

class FusedBench {
 public:
  explicit FusedBench(const Flags& flags)
      : report_(flags, {"kernel", "direction", "rows", "dim", "ms", "gb_per_s", "copy_gb_per_s",
                        "ratio"}) {
    DeviceBuffer<char> a(int64_t{2} << 30), b(int64_t{2} << 30);
    const double ms = MedianMs([&] {
      CheckCuda(cudaMemcpyAsync(a.data(), b.data(), a.Bytes(), cudaMemcpyDeviceToDevice), "copy");
    });
    copy_ = 2e-6 * static_cast<double>(a.Bytes()) / ms;
  }

  void Run() {
    for (const int64_t dim : {2048, 3584, 8192}) RmsNorm(131072, dim);
    for (const int64_t dim : {2048, 2560, 11008}) Cast(131072, dim);
    TurnCodes(32768, 22016);
    TurnCodes(22016, 2048);
    Rope(131072, 16, 2, 128);
    Rope(131072, 32, 8, 64);
    Swiglu(131072, 11008);
    Entropy(8192, 151936);
    Entropy(8192, 128256);
    Entropy(8192, 32000);
    Adamw(int64_t{768} << 20);
  }

 private:
  void Add(const char* kernel, const char* direction, int64_t rows, int64_t dim, double bytes,
           const std::function<absl::Status()>& run) {
    const double ms = MedianMs([&] { Check(run()); });
    const double rate = 1e-6 * bytes / ms;
    report_.Add({kernel, direction, absl::StrFormat("%d", rows), absl::StrFormat("%d", dim),
                 absl::StrFormat("%.4f", ms), absl::StrFormat("%.0f", rate),
                 absl::StrFormat("%.0f", copy_), absl::StrFormat("%.3f", rate / copy_)});
  }

  void RmsNorm(int64_t rows, int64_t dim) {
    const double tensor = 2.0 * rows * dim;
    auto x = RandomTensor(rows * dim), residual = RandomTensor(rows * dim),
         weight = RandomTensor(dim), dy = RandomTensor(rows * dim);
    DeviceBuffer<Bf16> sum(rows * dim), y(rows * dim);
    DeviceBuffer<float> rstd(rows), d_weight(dim);
    DeviceBuffer<char> workspace(static_cast<int64_t>(fused::RmsNormWorkspaceBytes(dim)));
    fused::RmsNormForwardArgs forward = {.x = x.data(),
                                         .weight = weight.data(),
                                         .y = y.data(),
                                         .rstd = rstd.data(),
                                         .rows = rows,
                                         .dim = dim};
    Add("rms_norm", "forward", rows, dim, 2 * tensor,
        [&] { return fused::RmsNormForward(forward, nullptr); });
    forward.residual = residual.data();
    forward.sum = sum.data();
    Add("add_rms_norm", "forward", rows, dim, 4 * tensor,
        [&] { return fused::RmsNormForward(forward, nullptr); });
    DeviceBuffer<uint8_t> codes(rows * dim);
    DeviceBuffer<float> scales(rows);
    forward.cast = {codes.data(), scales.data()};
    forward.y = nullptr;
    Add("add_rms_norm_cast", "forward", rows, dim, 3.5 * tensor,
        [&] { return fused::RmsNormForward(forward, nullptr); });
    fused::RmsNormBackwardArgs backward = {.h = sum.data(),
                                           .weight = weight.data(),
                                           .rstd = rstd.data(),
                                           .dy = dy.data(),
                                           .dx = y.data(),
                                           .d_weight = d_weight.data(),
                                           .workspace = workspace.data(),
                                           .rows = rows,
                                           .dim = dim};
    Add("rms_norm", "backward", rows, dim, 3 * tensor,
        [&] { return fused::RmsNormBackward(backward, nullptr); });
    backward.d_sum = residual.data();
    Add("add_rms_norm", "backward", rows, dim, 4 * tensor,
        [&] { return fused::RmsNormBackward(backward, nullptr); });
    backward.cast = forward.cast;
    Add("add_rms_norm_cast", "backward", rows, dim, 4.5 * tensor,
        [&] { return fused::RmsNormBackward(backward, nullptr); });
  }

  // A byte written for two that are read; and a scale a row.
  void Cast(int64_t rows, int64_t dim) {
    auto x = RandomTensor(rows * dim);
    DeviceBuffer<uint8_t> codes(rows * dim);
    DeviceBuffer<float> scales(rows);
    const fused::CastRowsArgs args = {.x = x.data(),
                                      .cast = {codes.data(), scales.data()},
                                      .stride = dim,
                                      .rows = rows,
                                      .dim = dim};
    Add("cast_rows", "forward", rows, dim, 3.0 * rows * dim,
        [&] { return fused::CastRows(args, nullptr); });
  }

  // A byte read and one written.
  void TurnCodes(int64_t rows, int64_t dim) {
    DeviceBuffer<uint8_t> codes(rows * dim), turned(rows * dim);
    DeviceBuffer<float> scales(std::vector<float>(rows, 1.0f)), scale(1);
    const fused::TurnCodesArgs args = {.codes = codes.data(),
                                       .scales = scales.data(),
                                       .turned = turned.data(),
                                       .scale = scale.data(),
                                       .rows = rows,
                                       .dim = dim};
    Add("turn_codes", "forward", rows, dim, 2.0 * rows * dim,
        [&] { return fused::TurnCodes(args, nullptr); });
  }

  void Rope(int64_t tokens, int32_t heads, int32_t kv_heads, int32_t dim) {
    const int64_t q_size = tokens * heads * dim, k_size = tokens * kv_heads * dim;
    auto q = RandomTensor(q_size), k = RandomTensor(k_size);
    DeviceBuffer<Bf16> q_out(q_size), k_out(k_size);
    std::vector<int64_t> positions(tokens);
    for (int64_t t = 0; t < tokens; ++t) positions[t] = 4 * t;
    std::vector<float> inv_freq(dim / 2);
    for (int i = 0; i < dim / 2; ++i) inv_freq[i] = std::pow(1e6f, -2.0f * i / dim);
    DeviceBuffer<int64_t> gpu_positions(positions);
    DeviceBuffer<float> gpu_freq(inv_freq);
    fused::RopeArgs args = {
        .q = {q.data(), tokens, heads, dim, int64_t{heads} * dim, dim},
        .k = {k.data(), tokens, kv_heads, dim, int64_t{kv_heads} * dim, dim},
        .q_out = {q_out.data(), tokens, heads, dim, int64_t{heads} * dim, dim},
        .k_out = {k_out.data(), tokens, kv_heads, dim, int64_t{kv_heads} * dim, dim},
        .positions = gpu_positions.data(),
        .inv_freq = gpu_freq.data()};
    for (const bool inverse : {false, true}) {
      args.inverse = inverse;
      Add("rope", inverse ? "backward" : "forward", tokens, int64_t{heads + kv_heads} * dim,
          4.0 * (q_size + k_size), [&] { return fused::Rope(args, nullptr); });
    }
  }

  void Swiglu(int64_t rows, int64_t dim) {
    const double tensor = 2.0 * rows * dim;
    auto gate_up = RandomTensor(rows * 2 * dim), d_out = RandomTensor(rows * dim);
    DeviceBuffer<Bf16> out(rows * dim), d_gate_up(rows * 2 * dim);
    const fused::SwigluForwardArgs forward = {.gate = {gate_up.data(), 2 * dim},
                                              .up = {gate_up.data() + dim, 2 * dim},
                                              .out = {out.data(), dim},
                                              .rows = rows,
                                              .dim = dim};
    Add("swiglu", "forward", rows, dim, 3 * tensor,
        [&] { return fused::SwigluForward(forward, nullptr); });
    const fused::SwigluBackwardArgs backward = {.gate = forward.gate,
                                                .up = forward.up,
                                                .d_out = {d_out.data(), dim},
                                                .d_gate = {d_gate_up.data(), 2 * dim},
                                                .d_up = {d_gate_up.data() + dim, 2 * dim},
                                                .out = {out.data(), dim},
                                                .rows = rows,
                                                .dim = dim};
    Add("swiglu", "backward+out", rows, dim, 6 * tensor,
        [&] { return fused::SwigluBackward(backward, nullptr); });
    DeviceBuffer<uint8_t> codes(rows * 2 * dim), out_codes(rows * dim);
    DeviceBuffer<float> scales(rows), out_scales(rows);
    fused::SwigluForwardArgs forward_cast = forward;
    forward_cast.out = {};
    forward_cast.cast = {codes.data(), scales.data()};
    Add("swiglu_cast", "forward", rows, dim, 2.5 * tensor,
        [&] { return fused::SwigluForward(forward_cast, nullptr); });
    fused::SwigluBackwardArgs backward_cast = backward;
    backward_cast.cast = forward_cast.cast;
    backward_cast.out_cast = {out_codes.data(), out_scales.data()};
    Add("swiglu_cast", "backward+out", rows, dim, 7.5 * tensor,
        [&] { return fused::SwigluBackward(backward_cast, nullptr); });
  }

  void Entropy(int64_t rows, int64_t vocabulary) {
    // The gradient replaces the logits. From the second run on they are small numbers, which cost
    // as much to read as any.
    auto logits = RandomTensor(rows * vocabulary);
    std::vector<int64_t> labels(rows);
    for (int64_t r = 0; r < rows; ++r) labels[r] = r * 7919 % vocabulary;
    DeviceBuffer<int64_t> gpu_labels(labels);
    DeviceBuffer<float> loss(rows), scale(std::vector<float>{1.0f});
    fused::CrossEntropyArgs args = {.logits = logits.data(),
                                    .stride = vocabulary,
                                    .labels = gpu_labels.data(),
                                    .loss = loss.data(),
                                    .rows = rows,
                                    .vocabulary = vocabulary,
                                    .gradient = false,
                                    .gradient_scale = scale.data()};
    Add("cross_entropy", "forward", rows, vocabulary, 2.0 * rows * vocabulary,
        [&] { return fused::CrossEntropy(args, nullptr); });
    args.gradient = true;
    Add("cross_entropy", "forward+backward", rows, vocabulary, 4.0 * rows * vocabulary,
        [&] { return fused::CrossEntropy(args, nullptr); });
  }

  void Adamw(int64_t count) {
    auto master = RandomFloat(count), gradient = RandomFloat(count);
    DeviceBuffer<float> m(count), v(count), scale(std::vector<float>{1.0f}), norm(1);
    m.Zero();
    v.Zero();
    DeviceBuffer<Bf16> parameter(count);
    DeviceBuffer<char> workspace(static_cast<int64_t>(fused::SquaredNormWorkspaceBytes()));
    Add("adamw", "step", 1, count, 30.0 * count, [&] {
      return fused::AdamwStep({.master = master.data(),
                               .m = m.data(),
                               .v = v.data(),
                               .gradient = gradient.data(),
                               .parameter = parameter.data(),
                               .gradient_scale = scale.data(),
                               .count = count,
                               .learning_rate = 1e-4f},
                              nullptr);
    });
    Add("squared_norm", "step", 1, count, 4.0 * count, [&] {
      return fused::SquaredNorm(gradient.data(), count, norm.data(), workspace.data(), nullptr);
    });
  }

  Report report_;
  double copy_ = 0;  // GB/s, read and written bytes of a device-to-device copy
};

}  // namespace
}  // namespace ringleader::kernels::bench

int main(int argc, char** argv) {
  const auto flags = ringleader::kernels::bench::ParseFlags(argc, argv);
  if (!ringleader::kernels::HaveGpu()) {
    std::printf("fused_bench: SKIPPED, no GPU on this machine\n");
    return 0;
  }
  ringleader::kernels::bench::FusedBench(flags).Run();
  return 0;
}
