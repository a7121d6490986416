// model_bench [--csv FILE] [--commit NAME]: one layer's work without attention, the loss and the
// optimizer at the shape of Qwen2.5-3B with 131,072 local tokens, against the GEMM rate that the
// same run measures. Attention is a stub that hands out tensors it holds. Ends with the model that
// these parts make up: 6 floating-point operations a parameter and token over all the time, without
// counting what backward computes again.
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdio>
#include <functional>
#include <string>

#include "absl/strings/str_format.h"
#include "kernels/bench/bench_report.h"
#include "kernels/fused/device_buffer.h"
#include "kernels/ops/cuda_call.h"
#include "worker/model/cuda_token_ops.h"
#include "worker/model/layer_passes.h"
#include "worker/model/rope.h"
#include "worker/model/sharded_decoder.h"
#include "worker/model/testing/flat_store.h"
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
        kv_(Random({kTokens, config.kv_heads, config.head_dim})) {}
  attention::AttentionOutput ForwardRaw(int layer, const Tensor& q, const Tensor& k,
                                        const Tensor& v) override {
    return {.out = out_, .lse = out_, .record = std::make_shared<Record>(*this)};
  }
  absl::Status SetBudgets(std::span<const attention::LayerBudget> budgets) override {
    return absl::OkStatus();
  }
  attention::AttentionStats TakeStats() override { return {}; }

 private:
  struct Record : attention::AttentionRecord {
    explicit Record(const StubAttention& stub) : stub(stub) {}
    attention::AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& out, const Tensor& lse,
                                           const Tensor& d_out) const override {
      return {.dq = stub.out_, .dk = stub.kv_, .dv = stub.kv_};
    }
    const StubAttention& stub;
  };
  Tensor out_, kv_;
};

class ModelBench {
 public:
  explicit ModelBench(std::string commit)
      : config_(Config(1)),
        layout_(MakeParameterLayout(config_)),
        store_(layout_, torch::randn({layout_.elements}) * 0.02, torch::kCUDA, torch::kBFloat16),
        attention_(config_),
        report_(std::move(commit), {"part", "ms", "tflop_per_s", "share_of_gemm_rate"}) {
    const RopeFrequencies frequencies = ComputeRopeFrequencies(config_, kTokens);
    rotary_ = {.positions = torch::arange(kTokens, torch::kCUDA),
               .inverse_frequencies = torch::tensor(frequencies.inverse).to(torch::kCUDA),
               .scale = 1.0};
  }

  void Run() {
    GemmRate();
    Products();
    Passes();
    const double layer = Layer(Recompute::kFull, 32768);
    for (const int64_t chunk : {16384, 65536, 131072}) Layer(Recompute::kFull, chunk);
    Layer(Recompute::kAttentionOnly, 32768);
    Layer(Recompute::kNone, 32768);
    const double loss = Loss();
    const double optimizer = Optimizer();
    Model(layer, loss, optimizer);
  }

  kernels::bench::Report& report() { return report_; }

 private:
  double Add(const std::string& part, double flop, const std::function<void()>& run) {
    const double ms = MedianMs(run, kRepeats);
    Row(part, ms, flop);
    return ms;
  }
  void Row(const std::string& part, double ms, double flop) {
    const double rate = 1e-9 * flop / ms;
    report_.Add({part, absl::StrFormat("%.3f", ms), flop > 0 ? absl::StrFormat("%.0f", rate) : "",
                 flop > 0 ? absl::StrFormat("%.3f", rate / gemm_rate_) : ""});
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
    Row("GEMM rate: square products", 2e-9 * 8192 * 8192 * 8192 / best, 2.0 * 8192 * 8192 * 8192);
  }

  // forward, gradient of the input, gradient of the weight
  void Product(const std::string& name, int64_t in, int64_t out) {
    const double flop = 2.0 * kTokens * in * out;
    const Tensor x = Random({kTokens, in}), weight = Random({out, in}, 0.02);
    Tensor y = Random({kTokens, out}), dx = torch::empty_like(x);
    const Tensor d_weight = torch::zeros({out, in}, x.options().dtype(torch::kFloat));
    Add(name + ", forward", flop, [&] { at::mm_out(y, x, weight.t()); });
    Add(name + ", gradient of the input", flop, [&] { at::mm_out(dx, y, weight); });
    Add(name + ", gradient of the weight", flop, [&] { ops_.AddWeightGradient(y, x, d_weight); });
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
    Add("norm, backward", 0,
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
    Add("swiglu, backward", 0, [&] { ops_.SwiGluBackward(d, gate_up); });
    const Tensor table = torch::zeros({151936, 2048}, x.options().dtype(torch::kFloat));
    const Tensor tokens = torch::randint(151936, {kTokens}, torch::kCUDA).to(torch::kLong);
    embedding_ =
        Add("embedding, backward", 0, [&] { ops_.AddEmbeddingGradient(dy, tokens, table); });
  }

  // Forward and backward together, with what backward computes again.
  double Layer(Recompute recompute, int64_t chunk) {
    const LayerContext context{.config = config_,
                               .ops = ops_,
                               .recompute = recompute,
                               .mlp_chunk_tokens = chunk,
                               .rotary = rotary_};
    const auto views = [&](const Tensor& flat) {
      return MakeLayerParameters(layout_, 0,
                                 [&](const SlotGroup& group) { return ViewGroup(group, flat, 0); });
    };
    const LayerParameters parameters = views(store_.parameters());
    const LayerParameters gradients = views(store_.gradients());
    const Tensor base = Random({kTokens, 2048}), pending = Random({kTokens, 2048}, 0.1);
    const Tensor dy = Random({kTokens, 2048});
    const double flop = 6.0 * kTokens * static_cast<double>(layout_.blocks[1].elements);
    const char* names[] = {"none", "attention_only", "full"};
    c10::cuda::CUDACachingAllocator::emptyCache();
    return Add(absl::StrFormat("layer, recompute %s, MLP by %d tokens",
                               names[static_cast<int>(recompute)], chunk),
               flop, [&] {
                 ResidualStream stream{.base = base, .pending = pending};
                 SavedLayer saved;
                 ForwardLayer(context, 0, parameters, attention_, stream, &saved);
                 stream = {};
                 BackwardLayer(context, parameters, gradients, std::move(saved), dy);
               });
  }

  // The head with its gradients, over chunks of logits.
  double Loss() {
    const Tensor head = Random({151936, 2048}, 0.02);
    const Tensor labels = torch::randint(151936, {kTokens}, torch::kCUDA).to(torch::kLong);
    const Tensor d_head = torch::zeros({151936, 2048}, head.options().dtype(torch::kFloat));
    const double flop = 6.0 * kTokens * 151936 * 2048;
    double best = 0;
    for (const int64_t chunk : {4096, 8192, 16384}) {
      Tensor hidden = Random({kTokens, 2048});
      const double ms = Add(absl::StrFormat("loss by %d tokens", chunk), flop,
                            [&] { LossPass(ops_, hidden, head, labels, d_head, chunk); });
      if (chunk == 8192) best = ms;
    }
    const Tensor logits = Random({8192, 151936}), some = labels.narrow(0, 0, 8192);
    Add("cross entropy of 8192 rows", 0, [&] { ops_.CrossEntropy(logits, some, true); });
    return best;
  }

  // A quarter of 36 layers: what one of four ranks updates.
  double Optimizer() {
    const ParameterLayout layout = MakeParameterLayout(Config(9));
    const std::vector<float> start(layout.ShardElements(1), 0.02f);
    auto adamw = optim::ShardedAdamW::Create({}, layout, nullptr, torch::kBFloat16, start);
    kernels::ops::Check(adamw.status());
    const Tensor loss = torch::ones({}, torch::dtype(torch::kFloat).device(torch::kCUDA));
    const double ms = Add(absl::StrFormat("optimizer, %d elements", layout.elements), 0,
                          [&] { kernels::ops::Check((*adamw)->Step(1e-4, loss, 1).status()); });
    constexpr double kShare = 0.25;
    return ms * kShare * static_cast<double>(MakeParameterLayout(Config(36)).elements) /
           layout.elements;
  }

  void Model(double layer, double loss, double optimizer) {
    const ModelConfig whole = Config(36);
    const double flop =
        6.0 * kTokens * static_cast<double>(MakeParameterLayout(whole).ParameterCount());
    Row("36 layers, loss, embedding, a quarter of the optimizer",
        36 * layer + loss + embedding_ + optimizer, flop);
  }

  const ModelConfig config_;
  const ParameterLayout layout_;
  const CudaTokenOps ops_;
  FlatStore store_;
  StubAttention attention_;
  Rotary rotary_;
  kernels::bench::Report report_;
  double gemm_rate_ = 0;  // TFLOP/s
  double embedding_ = 0;  // ms
};

}  // namespace
}  // namespace ringleader::model

int main(int argc, char** argv) {
  using ringleader::model::ModelBench;
  std::string csv, commit = "unknown";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--csv") csv = argv[i + 1];
    if (std::string(argv[i]) == "--commit") commit = argv[i + 1];
  }
  if (!ringleader::kernels::fused::HaveGpu()) {
    std::printf("model_bench: no GPU on this machine\n");
    return 0;
  }
  ringleader::kernels::ops::Check(ringleader::kernels::ops::LoadTorchCuda());
  const torch::NoGradGuard no_grad;
  ModelBench bench(commit);
  bench.Run();
  bench.report().PrintTable();
  return csv.empty() || bench.report().WriteCsv(csv) ? 0 : 1;
}
