// model_bench [--csv FILE] [--commit NAME]: all work of a step but attention at the shape of
// Qwen2.5-3B with 131,072 local tokens: products, passes over memory, a layer, the loss, the
// optimizer, and the whole model forward and backward, against the GEMM rate that the same run
// measures. Attention is a stub that copies an output and computes nothing. A share counts 6
// floating-point operations a parameter and token, not what backward computes again. Peaks are
// LibTorch's, beside EstimateMemory's.
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include "absl/strings/str_format.h"
#include "kernels/bench/bench_report.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/testing/device_buffer.h"
#include "model_shape/rope_frequencies.h"
#include "worker/model/decoder/cuda_token_ops.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/decoder/layer_passes.h"
#include "worker/model/testing/flat_store.h"
#include "worker/optim/cuda_shard_device.h"
#include "worker/optim/sharded_adamw.h"

namespace ringleader::model {
namespace {

using kernels::bench::MedianMs;
using torch::Tensor;

constexpr int64_t kTokens = 131072;
constexpr int kRepeats = 5;

ModelConfig Config(int64_t layers) {
  ModelConfig config;
  config.vocab_size = 151936;
  config.hidden_size = 2048;
  config.intermediate_size = 11008;
  config.layers = layers;
  config.heads = 16;
  config.kv_heads = 2;
  config.head_dim = 128;
  config.max_positions = 1 << 20;
  config.tied_embeddings = true;
  config.qkv_bias = true;
  config.rope.theta = 1e6;
  return config;
}

Tensor Random(at::IntArrayRef sizes, double scale = 1.0) {
  return torch::randn(sizes, torch::dtype(torch::kBFloat16).device(torch::kCUDA)).mul_(scale);
}

// Takes no time.
class StubAttention : public attention::ContextAttention {
 public:
  explicit StubAttention(const ModelConfig& config)
      : out_(Random({kTokens, config.heads, config.head_dim})),
        kv_(Random({kTokens, config.kv_heads, config.head_dim})),
        lse_(torch::zeros({config.heads, kTokens}, out_.options().dtype(torch::kFloat))) {}
  attention::AttentionOutput Forward(int /*layer*/, const Tensor& /*q*/, const Tensor& /*k*/,
                                     const Tensor& /*v*/) override {
    return {.out = out_.clone(),
            .lse = torch::empty_like(lse_),
            .record = std::make_shared<Record>(*this)};
  }
  absl::Status SetBudgets(std::span<const patterns::LayerBudget> /*budgets*/) override {
    return absl::OkStatus();
  }
  absl::Status SetDocuments(int64_t /*tokens*/, std::span<const int64_t> /*firsts*/) override {
    return absl::OkStatus();
  }
  attention::AttentionStats TakeStats() override { return {}; }

 private:
  struct Record : attention::AttentionRecord {
    explicit Record(const StubAttention& stub) : stub(stub) {}
    attention::AttentionGradients Backward(const Tensor& /*q*/, const Tensor& /*k*/,
                                           const Tensor& /*v*/, const Tensor& /*out*/,
                                           const Tensor& /*lse*/,
                                           const Tensor& /*d_out*/) const override {
      return {.dq = stub.out_, .dk = stub.kv_, .dv = stub.kv_};
    }
    const StubAttention& stub;
  };
  Tensor out_, kv_, lse_;
};

// The mean of two steps, in milliseconds.
double StepMs(const std::function<void()>& step) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaEventRecord(begin, kernels::ops::Stream());
  for (int i = 0; i < 2; ++i) step();
  cudaEventRecord(end, kernels::ops::Stream());
  cudaEventSynchronize(end);
  float ms = 0;
  cudaEventElapsedTime(&ms, begin, end);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms / 2;
}

class ModelBench {
 public:
  explicit ModelBench(const kernels::bench::Flags& flags)
      : config_(Config(1)),
        layout_(MakeParameterLayout(config_)),
        store_(FlatStore(layout_, torch::randn({layout_.elements}, torch::kCUDA) * 0.02,
                         torch::kCUDA, torch::kBFloat16)),
        attention_(config_),
        report_(flags,
                {"part", "ms", "tflop_per_s", "share_of_gemm_rate", "peak_gib", "estimated_gib"}) {
    const RopeFrequencies frequencies = ComputeRopeFrequencies(config_, kTokens);
    rotary_ = {.positions = torch::arange(kTokens, torch::kCUDA),
               .inverse_frequencies = torch::tensor(frequencies.inverse).to(torch::kCUDA),
               .scale = 1.0};
  }

  void Run() {
    GemmRate();
    Products();
    Passes();
    for (const auto recompute : {Recompute::kFull, Recompute::kAttentionOnly, Recompute::kNone}) {
      Layer(recompute);
    }
    Loss();
    Optimizer();
    store_ = {};
    Model({.recompute = Recompute::kFull});
    Model({.recompute = Recompute::kAttentionOnly, .kept_layers = 6});
  }

 private:
  double Add(const std::string& part, double flop, const std::function<void()>& run) {
    const double ms = MedianMs(run, kRepeats);
    Row(part, ms, flop);
    return ms;
  }
  void Row(const std::string& part, double ms, double flop, double peak = 0, double estimate = 0) {
    const double rate = 1e-9 * flop / ms;
    const auto unless_0 = [](int digits, double value) {
      return value > 0 ? absl::StrFormat("%.*f", digits, value) : std::string();
    };
    report_.Add({part, absl::StrFormat("%.3f", ms), unless_0(0, rate),
                 unless_0(3, rate / gemm_rate_), unless_0(1, peak), unless_0(1, estimate)});
  }

  // The best of square products of random data.
  void GemmRate() {
    double best = 0;
    for (const int64_t size : {8192, 16384}) {
      const Tensor a = Random({size, size}), b = Random({size, size});
      Tensor c = torch::empty_like(a);
      const double flop = 2.0 * size * size * size;
      const double ms = MedianMs([&] { at::mm_out(c, a, b); }, kRepeats);
      best = std::max(best, 1e-9 * flop / ms);
    }
    gemm_rate_ = best;
    Row("GEMM rate: the best square product", 2e-9 * 8192 * 8192 * 8192 / best,
        2.0 * 8192 * 8192 * 8192);
    // For as long as a step takes: the clock gives way to the power limit.
    const Tensor a = Random({16384, 16384}), b = Random({16384, 16384});
    Tensor c = torch::empty_like(a);
    const double flop = 2.0 * 16384 * 16384 * 16384;
    const double ms = MedianMs([&] { at::mm_out(c, a, b); }, /*repeats=*/300);
    Row("GEMM rate over three seconds", ms, flop);
  }

  // forward, gradient of the input, gradient of the weight
  void Product(const std::string& name, int64_t in, int64_t out) {
    const double flop = 2.0 * kTokens * in * out;
    const Tensor x = Random({kTokens, in}), weight = Random({out, in}, 0.02);
    Tensor y = Random({kTokens, out}), dx = torch::empty_like(x);
    const Tensor d_weight = torch::zeros({out, in}, x.options().dtype(torch::kFloat));
    Add(name + " forward", flop, [&] { at::mm_out(y, x, weight.t()); });
    Add(name + " gradient of the input", flop, [&] { at::mm_out(dx, y, weight); });
    Add(name + " gradient of the weight", flop, [&] { ops_.AddWeightGradient(y, x, d_weight); });
  }
  void Products() {
    Product("qkv", 2048, 2560);
    Product("output", 2048, 2048);
    Product("gate and up", 2048, 22016);
    Product("down", 11008, 2048);
  }

  void Passes() {
    const Tensor x = Random({kTokens, 2048}), weight = Random({2048}), dy = Random({kTokens, 2048});
    const Tensor residual = Random({kTokens, 2048});
    const Tensor d_weight = torch::zeros({2048}, x.options().dtype(torch::kFloat));
    const auto norm = ops_.NormForward(x, {}, weight, 1e-6);
    Add("norm with residual", 0, [&] { ops_.NormForward(x, residual, weight, 1e-6); });
    Add("norm backward", 0,
        [&] { ops_.NormBackward(dy, x, norm.rstd, weight, residual, d_weight); });
    const Tensor packed = Random({kTokens, 20, 128});
    const Tensor q = packed.slice(1, 0, 16), k = packed.slice(1, 16, 18);
    Add("rotation", 0, [&] { ops_.Rotate(q, k, rotary_, false, q, k); });
    const Tensor bias = torch::zeros({2560}, x.options().dtype(torch::kFloat));
    Add("gradient of the qkv bias", 0, [&] {
      bias.add_(packed.view({kTokens, 2560}).sum(0, false, torch::kFloat));
    });
    const Tensor gate_up = Random({kTokens, 22016}), d = Random({kTokens, 11008});
    Add("swiglu", 0, [&] { ops_.SwiGlu(gate_up); });
    Add("swiglu backward", 0, [&] { ops_.SwiGluBackward(d, gate_up); });
    const Tensor table = torch::zeros({151936, 2048}, x.options().dtype(torch::kFloat));
    const Tensor tokens = torch::randint(151936, {kTokens}, torch::kCUDA).to(torch::kLong);
    Add("embedding backward", 0, [&] { ops_.AddEmbeddingGradient(dy, tokens, table); });
  }

  // Forward and backward together, with what backward computes again.
  void Layer(Recompute recompute) {
    const LayerContext context{.config = config_,
                               .ops = ops_,
                               .recompute = recompute,
                               .mlp_chunk_tokens = DecoderOptions().mlp_chunk_tokens,
                               .rotary = rotary_};
    const auto views = [&](const Tensor& flat) {
      return MakeLayerParameters(layout_, 0,
                                 [&](const SlotGroup& group) { return ViewGroup(group, flat, 0); });
    };
    const LayerParameters parameters = views(store_->parameters());
    const LayerParameters gradients = views(store_->gradients());
    const Tensor base = Random({kTokens, 2048}), pending = Random({kTokens, 2048}, 0.1);
    const Tensor dy = Random({kTokens, 2048});
    const double flop = 6.0 * kTokens * static_cast<double>(layout_.blocks[1].elements);
    Add("layer recompute " + DescribeRecompute(config_, {.recompute = recompute}), flop, [&] {
      ResidualStream stream{.base = base, .pending = pending};
      SavedLayer saved;
      ForwardLayer(context, 0, parameters, attention_, stream, &saved);
      stream = {};
      BackwardLayer(context, parameters, gradients, std::move(saved), dy);
    });
  }

  // The head with its gradients, over chunks of logits.
  void Loss() {
    const Tensor head = Random({151936, 2048}, 0.02);
    const Tensor labels = torch::randint(151936, {kTokens}, torch::kCUDA).to(torch::kLong);
    const Tensor d_head = torch::zeros({151936, 2048}, head.options().dtype(torch::kFloat));
    Tensor hidden = Random({kTokens, 2048});
    const int64_t chunk = DecoderOptions().loss_chunk_tokens;
    Add(absl::StrFormat("loss by %d tokens", chunk), 6.0 * kTokens * 151936 * 2048,
        [&] { LossPass(ops_, hidden, head, labels, d_head, chunk); });
    const Tensor logits = Random({8192, 151936}), some = labels.narrow(0, 0, 8192);
    Add("cross entropy of 8192 rows", 0, [&] { ops_.CrossEntropy(logits, some, true); });
  }

  // About what one of four ranks updates.
  void Optimizer() {
    const ParameterLayout layout = MakeParameterLayout(Config(6));
    const std::vector<float> start(layout.ShardElements(1), 0.02f);
    const auto device = optim::CudaShardDevice::Create(nullptr);
    kernels::ops::Check(device.status());
    auto adamw = optim::ShardedAdamW::Create({}, layout, **device, torch::kBFloat16, start);
    kernels::ops::Check(adamw.status());
    const Tensor loss = torch::ones({}, torch::dtype(torch::kFloat).device(torch::kCUDA));
    Add(absl::StrFormat("optimizer of %d elements", layout.elements), 0,
        [&] { kernels::ops::Check((*adamw)->Step(1e-4, loss, 1).status()); });
  }

  // 36 layers, loss and embedding, forward and backward.
  void Model(const RecomputePlan& plan) {
    const ModelConfig config = Config(36);
    const ParameterLayout layout = MakeParameterLayout(config);
    c10::cuda::CUDACachingAllocator::emptyCache();
    FlatStore store(layout, torch::zeros({layout.elements}, torch::kCUDA), torch::kCUDA,
                    torch::kBFloat16);
    store.parameters().normal_(0.0, 0.02);
    Decoder decoder(config, ops_, store, {.recompute = plan});
    const Tensor tokens = torch::randint(151936, {kTokens}, torch::kCUDA).to(torch::kLong);
    const TokenBatch batch{.tokens = tokens,
                           .positions = rotary_.positions,
                           .labels = tokens.roll(-1),
                           .sequence_length = kTokens};
    decoder.ForwardBackward(batch, attention_);
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    const double ms = StepMs([&] { decoder.ForwardBackward(batch, attention_); });
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    const TrainingMemory memory =
        EstimateMemory(config, {.ranks = 1, .tokens = kTokens}, plan, ParameterSharding::kWhole);
    // The store holds gradients alone; the stub holds what attention would need for its work.
    const int64_t estimate = memory.total() - memory.optimizer + layout.elements * 4;
    constexpr double kGiB = 1 << 30;
    Row("model recompute " + DescribeRecompute(config, plan), ms,
        6.0 * kTokens * static_cast<double>(layout.ParameterCount()),
        static_cast<double>(stats.allocated_bytes[0].peak) / kGiB,
        static_cast<double>(estimate) / kGiB);
    std::printf("%s: %.1f GiB reserved at most\n", DescribeRecompute(config, plan).c_str(),
                static_cast<double>(stats.reserved_bytes[0].peak) / kGiB);
  }

  const ModelConfig config_;
  const ParameterLayout layout_;
  const CudaTokenOps ops_;
  std::optional<FlatStore> store_;  // of one layer and the embedding
  StubAttention attention_;
  Rotary rotary_;
  kernels::bench::Report report_;
  double gemm_rate_ = 0;  // TFLOP/s, the best
};

}  // namespace
}  // namespace ringleader::model

int main(int argc, char** argv) {
  using ringleader::model::ModelBench;
  const auto flags = ringleader::kernels::bench::ParseFlags(argc, argv);
  if (!ringleader::kernels::HaveGpu()) {
    std::printf("model_bench: no GPU on this machine\n");
    return 0;
  }
  ringleader::kernels::ops::Check(ringleader::kernels::ops::LoadTorchCuda());
  const torch::NoGradGuard no_grad;
  ModelBench(flags).Run();
  return 0;
}
