// The decoder on a GPU: parity with transformers on the golden models, and with itself on the CPU.
#include <gmock/gmock.h>

#include <algorithm>
#include <span>

#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/comm/testing/local_device_communicator.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/memory/host_activations.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/golden.h"
#include "worker/model/testing/need_gpu.h"
#include "worker/model/testing/plain_token_ops.h"
#include "worker/model/token_ops/cuda_token_ops.h"

namespace ringleader::model {
namespace {

using torch::Tensor;

constexpr Recompute kPolicies[] = {Recompute::kNone, Recompute::kAttentionOnly, Recompute::kFull};

TokenBatch OnGpu(const Tensor& tokens, const Tensor& labels) {
  const int64_t n = tokens.size(0);
  return {.tokens = tokens.to(torch::kInt64).to(torch::kCUDA),
          .positions = torch::arange(n, torch::kCUDA),
          .labels = labels.to(torch::kInt64).to(torch::kCUDA),
          .sequence_length = n};
}

class GoldenGpuTest : public GpuTest, public testing::WithParamInterface<std::string> {
 protected:
  // Largest relative errors of the logits and of a parameter's gradient.
  void ExpectParity(const TokenOps& ops, torch::ScalarType type, Recompute recompute,
                    double logits_error, double gradient_error) {
    const Golden golden = LoadGolden(GetParam());
    FlatStore store(golden.layout, golden.values, torch::kCUDA, type);
    Decoder decoder(
        golden.config, ops, store,
        {.recompute = {.recompute = recompute}, .mlp_chunk_tokens = 16, .loss_chunk_tokens = 24});
    const TokenBatch batch = OnGpu(golden.expected.at("tokens"), golden.expected.at("labels"));
    DenseContextAttention attention;
    const Tensor logits = decoder.Logits(batch, attention).to(torch::kFloat).cpu();
    EXPECT_LE(RelativeError(logits, golden.expected.at("logits")), logits_error);
    const double expected_loss = golden.expected.at("loss").item<double>();
    const double loss = decoder.ForwardBackward(batch, attention).item<double>();
    EXPECT_NEAR(loss, expected_loss, logits_error * expected_loss);
    const Tensor gradients = store.gradients().cpu();
    for (const ParameterSlot& slot : golden.layout.slots) {
      EXPECT_LE(RelativeError(gradients.narrow(0, slot.offset, slot.elements).view(slot.shape),
                              golden.expected.at("grad." + slot.name)),
                gradient_error)
          << slot.name;
    }
  }
};

TEST_P(GoldenGpuTest, Fp32IsTight) {
  for (const Recompute recompute : kPolicies) {
    ExpectParity(PlainTokenOps(), torch::kFloat, recompute, 1e-5, 1e-3);
  }
}

TEST_P(GoldenGpuTest, Bf16IsWithinItsRounding) {
  const int64_t head_dim = LoadGolden(GetParam()).config.head_dim;
  const auto fused = NewCudaTokenOps();
  const PlainTokenOps plain;
  // Heads of 8 are too small for the fused rotation.
  const TokenOps& ops = head_dim % 16 == 0 ? static_cast<const TokenOps&>(*fused) : plain;
  for (const Recompute recompute : kPolicies) {
    ExpectParity(ops, torch::kBFloat16, recompute, 2e-2, 6e-2);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenGpuTest, testing::ValuesIn(GoldenNames()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

ModelConfig SmallConfig(bool tied) {
  ModelConfig config;
  config.vocab_size = 1003;
  config.hidden_size = 512;
  config.intermediate_size = 1376;
  config.layers = 3;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.max_positions = 4096;
  config.tied_embeddings = tied;
  config.qkv_bias = true;
  config.rope = {.scaling = RopeScaling::kYarn,
                 .theta = 1e6,
                 .factor = 4.0,
                 .original_max_positions = 256,
                 .attention_factor = 1.14};
  return config;
}

class SmallModelTest : public GpuTest {
 protected:
  struct Result {
    double loss = 0;
    Tensor gradients;  // [elements] on the CPU
  };

  Result Run(const ModelConfig& config, const TokenOps& ops, torch::Device device,
             torch::ScalarType type, const RecomputePlan& plan, HostCopies* copies = nullptr,
             int64_t n = 500, Precision precision = Precision::kModelType) {
    DenseContextAttention attention;
    return Run(attention, config, ops, device, type, plan, copies, n, precision);
  }
  Result Run(attention::ContextAttention& attention, const ModelConfig& config, const TokenOps& ops,
             torch::Device device, torch::ScalarType type, const RecomputePlan& plan,
             HostCopies* copies, int64_t n, Precision precision) {
    const ParameterLayout layout = MakeParameterLayout(config);
    Tensor values = torch::zeros({layout.elements});
    InitializeParameters(config, layout, 3, 0, layout.elements, values.data_ptr<float>());
    values = values.to(torch::kBFloat16).to(torch::kFloat);  // the same model in every type
    FlatStore store(layout, values, device, type);
    Decoder decoder(config, ops, store,
                    {.recompute = plan,
                     .host_copies = copies,
                     .mlp_chunk_tokens = 192,
                     .loss_chunk_tokens = 128,
                     .precision = precision});
    torch::manual_seed(7);
    const Tensor tokens = torch::randint(config.vocab_size, {n}, torch::kInt64);
    Tensor labels = tokens.roll(-1);
    labels[n - 1] = kIgnoreLabel;
    const TokenBatch batch{.tokens = tokens.to(device),
                           .positions = torch::arange(n, device),
                           .labels = labels.to(device),
                           .sequence_length = n};
    Result result;
    result.loss = decoder.ForwardBackward(batch, attention).item<double>();
    result.gradients = store.gradients().cpu();
    return result;
  }

  void ExpectEqualBySlot(const ModelConfig& config, const Tensor& actual, const Tensor& expected,
                         double tolerance) {
    for (const ParameterSlot& slot : MakeParameterLayout(config).slots) {
      EXPECT_LE(RelativeError(actual.narrow(0, slot.offset, slot.elements),
                              expected.narrow(0, slot.offset, slot.elements)),
                tolerance)
          << slot.name;
    }
  }
};

TEST_F(SmallModelTest, GpuAgreesWithCpu) {
  for (const bool tied : {false, true}) {
    const ModelConfig config = SmallConfig(tied);
    const Result cpu = Run(config, PlainTokenOps(), torch::kCPU, torch::kFloat, {});
    const Result fp32 = Run(config, PlainTokenOps(), torch::kCUDA, torch::kFloat, {});
    EXPECT_NEAR(fp32.loss, cpu.loss, 1e-5 * cpu.loss);
    ExpectEqualBySlot(config, fp32.gradients, cpu.gradients, 1e-3);
    const Result bf16 = Run(config, *NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16, {});
    EXPECT_NEAR(bf16.loss, cpu.loss, 2e-3 * cpu.loss);
    ExpectEqualBySlot(config, bf16.gradients, cpu.gradients, 5e-2);
  }
}

// A trainer chooses by the memory it finds, which may differ from one attempt to the next.
TEST_F(SmallModelTest, RecomputingDoesNotChangeABit) {
  const ModelConfig config = SmallConfig(true);
  const auto run = [&](Recompute recompute) {
    return Run(config, *NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16,
               {.recompute = recompute});
  };
  const Result full = run(Recompute::kFull);
  for (const Recompute recompute : kPolicies) {
    const Result other = run(recompute);
    EXPECT_EQ(other.loss, full.loss);
    EXPECT_TRUE(torch::equal(other.gradients, full.gradients))
        << "policy " << static_cast<int>(recompute);
  }
}

// The same scheme on both: the CPU computes it in bf16 by LibTorch's operators, whose products are
// those of what it decodes, and in the CPU engine's fp32. What differs is where bf16 rounds, which
// now and then moves a value to the next code.
TEST_F(SmallModelTest, Fp8AgreesWithTheCpu) {
  ModelConfig config = SmallConfig(true);
  config.attention_output_bias = config.mlp_bias = true;  // whose gradients read values
  const auto run = [&](const TokenOps& ops, torch::Device device, torch::ScalarType type,
                       Precision precision) {
    return Run(config, ops, device, type, {}, nullptr, 500, precision);
  };
  const Result exact = run(PlainTokenOps(), torch::kCPU, torch::kFloat, Precision::kModelType);
  const Result plain =
      run(PlainTokenOps(), torch::kCPU, torch::kBFloat16, Precision::kFp8AllLayers);
  const Result gpu =
      run(*NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16, Precision::kFp8AllLayers);
  EXPECT_NEAR(gpu.loss, plain.loss, 1e-3 * exact.loss);
  EXPECT_NEAR(gpu.loss, exact.loss, 3e-3 * exact.loss);
  const Result bf16 =
      run(*NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16, Precision::kModelType);
  EXPECT_NE(gpu.loss, bf16.loss) << "nothing was cast";
  for (const ParameterSlot& slot : MakeParameterLayout(config).slots) {
    // A key's bias moves all logits of a query alike: its gradient is rounding, whoever computes
    // it.
    if (slot.name.find("k_proj.bias") != std::string::npos) continue;
    const auto error = [&](const Result& result, const Result& expected) {
      return RelativeError(result.gradients.narrow(0, slot.offset, slot.elements),
                           expected.gradients.narrow(0, slot.offset, slot.elements));
    };
    // Roundings that differed everywhere would put them 1.4 times one side's error apart.
    EXPECT_LE(error(gpu, plain), error(plain, exact)) << slot.name;
    EXPECT_LE(error(gpu, exact), 24 * error(bf16, exact)) << slot.name << ", as on CPUs";
  }
}

TEST_F(SmallModelTest, RecomputingFp8DoesNotChangeABit) {
  ModelConfig config = SmallConfig(true);
  config.layers = 4;
  for (const Precision precision : {Precision::kFp8, Precision::kFp8AllLayers}) {
    const auto run = [&](Recompute recompute) {
      return Run(config, *NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16,
                 {.recompute = recompute}, nullptr, 500, precision);
    };
    const Result full = run(Recompute::kFull);
    for (const Recompute recompute : kPolicies) {
      const Result other = run(recompute);
      EXPECT_EQ(other.loss, full.loss);
      EXPECT_TRUE(torch::equal(other.gradients, full.gradients))
          << "policy " << static_cast<int>(recompute);
    }
  }
}

// The ring's output as a pass of its own would cast it.
class WithoutCasts : public attention::ContextAttention {
 public:
  explicit WithoutCasts(attention::ContextAttention& of) : of_(of) {}
  attention::AttentionOutput Forward(int layer, const Tensor& q, const Tensor& k,
                                     const Tensor& v) override {
    attention::AttentionOutput output = of_.Forward(layer, q, k, v);
    EXPECT_FALSE(output.codes.defined());
    return output;
  }
  void SetDense(bool dense) override { of_.SetDense(dense); }
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding,
                            std::span<const int64_t> ends) override {
    return of_.SetDocuments(tokens, firsts, padding, ends);
  }
  absl::Status SetLayout(const ring::DocumentLayout& layout) override {
    return of_.SetLayout(layout);
  }
  void SetStep(uint64_t step) override { of_.SetStep(step); }
  void SetMove(float factor) override { of_.SetMove(factor); }
  void MarkMicroBatch() override { of_.MarkMicroBatch(); }
  attention::AttentionStats TakeStats() override { return of_.TakeStats(); }

 private:
  attention::ContextAttention& of_;
};

TEST_F(SmallModelTest, AnOutputThatTheRingCastsDoesNotChangeABit) {
  ModelConfig config = SmallConfig(true);
  config.layers = 4;
  const auto communicators = comm::testing::LocalDeviceCommunicators(1);
  const auto ring = attention::CreateCudaRingAttention({.tile = 64, .deterministic = true},
                                                       communicators[0].get());
  ASSERT_TRUE(ring.ok()) << ring.status();
  WithoutCasts hidden(**ring);
  for (const Precision precision : {Precision::kFp8, Precision::kFp8AllLayers}) {
    const auto run = [&](attention::ContextAttention& attention) {
      return Run(attention, config, *NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16, {}, nullptr,
                 500, precision);
    };
    const Result plain = run(hidden), cast = run(**ring);
    (*ring)->SetCasts(false);
    EXPECT_EQ(cast.loss, plain.loss);
    EXPECT_TRUE(torch::equal(cast.gradients, plain.gradients));
  }
}

// Every policy, with three slots on the device and with one (nothing hides the copies); twice over
// the same places in host memory.
TEST_F(SmallModelTest, HostMemoryDoesNotChangeABit) {
  ModelConfig config = SmallConfig(true);
  config.layers = 6;
  const int64_t n = 2048;
  for (const Recompute recompute : kPolicies) {
    const auto run = [&](int64_t host_layers, HostCopies* copies) {
      return Run(config, *NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16,
                 {.recompute = recompute, .host_layers = host_layers}, copies, n);
    };
    const Result expected = run(0, nullptr);
    for (const int64_t host_layers : {3, 5}) {
      SCOPED_TRACE(testing::Message()
                   << "policy " << static_cast<int>(recompute) << ", " << host_layers << " layers");
      auto copies =
          HostActivations::Create(host_layers, n * KeptBytesPerToken(config, 2, recompute));
      ASSERT_TRUE(copies.ok()) << copies.status();
      for (int repeat = 0; repeat < 2; ++repeat) {
        const Result result = run(host_layers, copies->get());
        EXPECT_EQ(result.loss, expected.loss);
        EXPECT_TRUE(torch::equal(result.gradients, expected.gradients));
      }
      EXPECT_GT((*copies)->TakeWaitSeconds().value_or(-1), 0.0);
      EXPECT_EQ((*copies)->TakeWaitSeconds().value_or(-1), 0.0) << "counted once";
    }
  }
}

TEST_F(SmallModelTest, ALayerThatOutgrowsItsPlaceIsAnError) {
  const ModelConfig config = SmallConfig(true);
  auto copies = HostActivations::Create(2, 1000);
  ASSERT_TRUE(copies.ok()) << copies.status();
  try {
    Run(config, *NewCudaTokenOps(), torch::kCUDA, torch::kBFloat16, {.host_layers = 2},
        copies->get());
    FAIL() << "accepted";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                testing::HasSubstr("keeps more than its 1000 bytes of host memory"));
  }
}

TEST_F(SmallModelTest, PinnedMemoryThatIsNotThereIsRefused) {
  const auto memory = PinnedMemory::Allocate(int64_t{1} << 50);
  ASSERT_FALSE(memory.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(memory.status())) << memory.status();
  EXPECT_THAT(std::string(memory.status().message()),
              testing::AllOf(testing::HasSubstr("1048576.0 GiB of pinned host memory"),
                             testing::HasSubstr("resources.offload: none")));
}

}  // namespace
}  // namespace ringleader::model
