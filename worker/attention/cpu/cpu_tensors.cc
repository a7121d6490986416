#include "worker/attention/cpu/cpu_tensors.h"

#include <limits>

#include "worker/attention/cpu/cpu_attention.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

template <typename T>
kernels::TokenMajor<T> View(const Tensor& x) {
  return {.data = x.data_ptr<std::remove_const_t<T>>(),
          .tokens = x.size(0),
          .heads = static_cast<int32_t>(x.size(1)),
          .head_dim = static_cast<int32_t>(x.size(2)),
          .token_stride = x.stride(0),
          .head_stride = x.stride(1)};
}

// A call that keeps the tensors that it is made of.
template <typename Call>
class Keeping : public Call {
 public:
  template <typename... Args>
  explicit Keeping(std::vector<Tensor> tensors, Args&&... args)
      : Call(std::forward<Args>(args)...), tensors_(std::move(tensors)) {}

 private:
  const std::vector<Tensor> tensors_;
};

class CpuTensorDevice : public TensorDevice {
 public:
  CpuTensorDevice(comm::Communicator* communicator, int threads) : device_(communicator, threads) {}

  AttentionDevice& device() override { return device_; }

  Tensor Take(const char* name, const Tensor& x) const override {
    TORCH_CHECK(x.dim() == 3 && x.scalar_type() == torch::kFloat32 && x.is_cpu(),
                "attention: ", name,
                " must be a [tokens, heads, head_dim] float32 tensor on the CPU, got ",
                x.toString(), " ", x.sizes());
    return x.stride(2) == 1 ? x : x.contiguous();
  }

  std::unique_ptr<CallKeys> Keys(const Tensor& k, const Tensor& v) override {
    return std::make_unique<Keeping<CpuKeys>>(std::vector{k, v}, &device_, View<const float>(k),
                                              View<const float>(v));
  }

  std::unique_ptr<ForwardCall> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                       AttentionOutput* output) override {
    output->out = torch::zeros(q.sizes(), q.options());
    output->lse =
        torch::full({q.size(1), q.size(0)}, -std::numeric_limits<float>::infinity(), q.options());
    return std::make_unique<Keeping<CpuForward>>(
        std::vector{q, k, v}, &device_,
        CpuForward::Tensors{.q = View<const float>(q),
                            .k = View<const float>(k),
                            .v = View<const float>(v),
                            .out = View<float>(output->out),
                            .lse = output->lse.data_ptr<float>()});
  }

  std::unique_ptr<BackwardCall> Backward(const AttentionTensors& tensors,
                                         AttentionGradients* gradients) override {
    const auto& [q, k, v, out, lse, d_out] = tensors;
    *gradients = {.dq = torch::zeros(q.sizes(), q.options()),
                  .dk = torch::empty(k.sizes(), k.options()),
                  .dv = torch::empty(v.sizes(), v.options())};
    return std::make_unique<Keeping<CpuBackward>>(
        std::vector{q, k, v, out, lse, d_out}, &device_,
        CpuBackward::Tensors{.q = View<const float>(q),
                             .k = View<const float>(k),
                             .v = View<const float>(v),
                             .out = View<const float>(out),
                             .d_out = View<const float>(d_out),
                             .lse = lse.data_ptr<float>(),
                             .dq = View<float>(gradients->dq),
                             .dk = View<float>(gradients->dk),
                             .dv = View<float>(gradients->dv)});
  }

 private:
  CpuAttentionDevice device_;
};

}  // namespace

std::unique_ptr<TensorDevice> MakeCpuTensorDevice(comm::Communicator* communicator, int threads) {
  return std::make_unique<CpuTensorDevice>(communicator, threads);
}

}  // namespace ringleader::attention
