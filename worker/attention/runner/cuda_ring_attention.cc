#include "worker/attention/runner/cuda_ring_attention.h"

#include <utility>

#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/hopper.h"
#include "worker/attention/runner/cuda_attention_engine.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

void CheckTensor(const char* name, const Tensor& x) {
  TORCH_CHECK(x.dim() == 3 && x.scalar_type() == torch::kBFloat16 && x.is_cuda(),
              "attention: ", name,
              " must be a [tokens, heads, head_dim] bfloat16 tensor on a GPU, got ", x.toString(),
              " ", x.sizes(), "; for float32 use the CPU engine");
}

// The kernels load 16 bytes at a time.
Tensor Aligned(const Tensor& x) {
  const bool aligned = x.stride(2) == 1 && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return aligned ? x : x.contiguous();
}

class CudaRecord : public AttentionRecord {
 public:
  CudaRecord(std::shared_ptr<CudaAttentionEngine> engine,
             std::shared_ptr<const CudaLayerIndex> index)
      : engine_(std::move(engine)), index_(std::move(index)) {}

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    const torch::NoGradGuard no_grad;
    engine_->StartBackward(Aligned(k), Aligned(v));
  }

  AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Tensor& d_out) const override {
    const torch::NoGradGuard no_grad;
    CheckTensor("the gradient of out", d_out);
    return engine_->Backward(*index_, {.q = Aligned(q),
                                       .k = Aligned(k),
                                       .v = Aligned(v),
                                       .out = Aligned(out),
                                       .lse = lse,
                                       .d_out = Aligned(d_out)});
  }

 private:
  const std::shared_ptr<CudaAttentionEngine> engine_;
  const std::shared_ptr<const CudaLayerIndex> index_;
};

class CudaRingAttention : public ContextAttention {
 public:
  explicit CudaRingAttention(std::shared_ptr<CudaAttentionEngine> engine)
      : engine_(std::move(engine)) {}

  AttentionOutput ForwardRaw(int layer, const Tensor& q, const Tensor& k,
                             const Tensor& v) override {
    const torch::NoGradGuard no_grad;
    CheckTensor("q", q);
    CheckTensor("k", k);
    CheckTensor("v", v);
    TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == q.size(0) && k.size(2) == q.size(2),
                "attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(),
                " do not belong together");
    CudaAttentionEngine::Output output =
        engine_->Forward(layer, Aligned(q), Aligned(k), Aligned(v));
    return {.out = output.out,
            .lse = output.lse,
            .record = std::make_shared<CudaRecord>(engine_, std::move(output.index))};
  }

  absl::Status SetBudgets(std::span<const patterns::LayerBudget> budgets) override {
    return engine_->SetBudgets(budgets);
  }
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts) override {
    return engine_->SetDocuments(tokens, firsts);
  }
  AttentionStats TakeStats() override { return engine_->TakeStats(); }

 private:
  // Shared with the records, which may outlive this object.
  const std::shared_ptr<CudaAttentionEngine> engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ContextAttention>> CreateCudaRingAttention(
    const patterns::AttentionOptions& options, comm::DeviceCommunicator* communicator) {
  RETURN_IF_ERROR(kernels::ops::LoadTorchCuda());
  RETURN_IF_ERROR(kernels::sm90::CheckHopper());
  ASSIGN_OR_RETURN(std::shared_ptr<CudaAttentionEngine> engine,
                   CudaAttentionEngine::Create(options, communicator));
  return std::make_unique<CudaRingAttention>(std::move(engine));
}

}  // namespace ringleader::attention
