// The decoder with FP8 products on the CPU: how far a layer's outputs and gradients are from fp64,
// beside bf16's; that backward repeats what forward computed; and that no cast of a weight is
// stale.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/plain_token_ops.h"
#include "worker/model/token_ops/cpu_token_ops.h"

namespace ringleader::model {
namespace {

using torch::Tensor;

ModelConfig Config() {
  ModelConfig config;
  config.vocab_size = 253;
  config.hidden_size = 128;
  config.intermediate_size = 352;
  config.layers = 4;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 16;
  config.max_positions = 4096;
  config.tied_embeddings = true;
  config.qkv_bias = true;
  return config;
}

Tensor Values(const ModelConfig& config) {
  const ParameterLayout layout = MakeParameterLayout(config);
  Tensor values = torch::zeros({layout.elements});
  InitializeParameters(config, layout, 3, 0, layout.elements, values.data_ptr<float>());
  return values.to(torch::kBFloat16).to(torch::kFloat);  // the same model in every type
}

TokenBatch Batch(int64_t n) {
  torch::manual_seed(7);
  const Tensor tokens = torch::randint(253, {n}, torch::kInt64);
  Tensor labels = tokens.roll(-1);
  labels[n - 1] = kIgnoreLabel;
  return {.tokens = tokens, .positions = torch::arange(n), .labels = labels, .sequence_length = n};
}

DecoderOptions Options(Precision precision, const RecomputePlan& recompute = {}) {
  return {.recompute = recompute,
          .mlp_chunk_tokens = 96,
          .loss_chunk_tokens = 64,
          .precision = precision};
}

struct Result {
  double loss = 0;
  Tensor logits, gradients;
};

Result Train(const TokenOps& ops, torch::ScalarType type, const DecoderOptions& options,
             const ModelConfig& config = Config()) {
  FlatStore store(MakeParameterLayout(config), Values(config), torch::kCPU, type);
  Decoder decoder(config, ops, store, options);
  DenseContextAttention attention;
  const TokenBatch batch = Batch(250);
  Result result;
  result.logits = decoder.Logits(batch, attention);
  result.loss = decoder.ForwardBackward(batch, attention).item<double>();
  result.gradients = store.gradients();
  return result;
}

double Error(const Tensor& got, const Tensor& want) {
  const Tensor wide = want.to(torch::kDouble);
  return ((got.to(torch::kDouble) - wide).norm() / wide.norm().clamp_min(1e-12)).item<double>();
}

// e4m3 keeps 4 bits of a value where bf16 keeps 8, so that errors are some 16 times bf16's: a few
// percent a product, whose sums run over roundings that are independent. What is wrong in a scale
// or a transposed copy moves results by as much as they are large. The figures are in
// docs/precision.md.
TEST(Fp8DecoderTest, ErrorsByLayerBesideThoseOfBf16) {
  const ModelConfig config = Config();
  const PlainTokenOps plain;
  const auto cpu = NewCpuTokenOps(/*threads=*/2);
  // PlainTokenOps computes at least in fp32; gradients are collected in fp32.
  const Result exact = Train(plain, torch::kDouble, Options(Precision::kModelType));
  const Result fp8 = Train(*cpu, torch::kFloat, Options(Precision::kFp8AllLayers));
  const Result bf16 = Train(plain, torch::kBFloat16, Options(Precision::kModelType));
  const Result bf16_fp8 = Train(plain, torch::kBFloat16, Options(Precision::kFp8AllLayers));
  EXPECT_NEAR(fp8.loss, exact.loss, 1e-3 * exact.loss);
  EXPECT_NEAR(bf16_fp8.loss, exact.loss, 1e-3 * exact.loss);
  EXPECT_GT(Error(fp8.logits, exact.logits), 1e-3) << "nothing was cast";
  EXPECT_LT(Error(fp8.logits, exact.logits), 24 * Error(bf16.logits, exact.logits));
  // bench/fp8.sh reads these lines.
  std::printf("%-45s %9s %9s %9s\n", "relative L2", "bf16", "fp8, fp32", "fp8, bf16");
  std::printf("%-45s %9.5f %9.5f %9.5f\n", "logits", Error(bf16.logits, exact.logits),
              Error(fp8.logits, exact.logits), Error(bf16_fp8.logits, exact.logits));
  for (const ParameterSlot& slot : MakeParameterLayout(config).slots) {
    const auto error = [&](const Result& result) {
      return Error(result.gradients.narrow(0, slot.offset, slot.elements),
                   exact.gradients.narrow(0, slot.offset, slot.elements));
    };
    std::printf("%-45s %9.5f %9.5f %9.5f\n", slot.name.c_str(), error(bf16), error(fp8),
                error(bf16_fp8));
    // A key's bias moves all logits of a query alike: its gradient is rounding, whatever computes
    // it.
    if (slot.name.find("k_proj.bias") != std::string::npos) continue;
    EXPECT_LT(error(fp8), 24 * error(bf16)) << slot.name;
    EXPECT_LT(error(bf16_fp8), 24 * error(bf16)) << slot.name;
  }
}

// Their gradients read values that no product does.
TEST(Fp8DecoderTest, BiasesLearnToo) {
  ModelConfig config = Config();
  config.attention_output_bias = config.mlp_bias = true;
  const auto cpu = NewCpuTokenOps(/*threads=*/2);
  const auto train = [&](torch::ScalarType type, const TokenOps& ops, Precision precision) {
    return Train(ops, type, Options(precision), config);
  };
  const Result exact = train(torch::kDouble, PlainTokenOps(), Precision::kModelType);
  const Result fp8 = train(torch::kFloat, *cpu, Precision::kFp8AllLayers);
  int biases = 0;
  for (const ParameterSlot& slot : MakeParameterLayout(config).slots) {
    if (!slot.name.ends_with("proj.bias") || slot.name.ends_with("k_proj.bias")) continue;
    ++biases;
    const Tensor want = exact.gradients.narrow(0, slot.offset, slot.elements);
    EXPECT_GT(want.abs().max().item<double>(), 0) << slot.name;
    EXPECT_LT(Error(fp8.gradients.narrow(0, slot.offset, slot.elements), want), 0.25) << slot.name;
  }
  EXPECT_EQ(biases, 4 * 6) << "of q, v, the output, gate, up and down";
}

TEST(Fp8DecoderTest, RecomputingDoesNotChangeABit) {
  const auto ops = NewCpuTokenOps(/*threads=*/2);
  for (const Precision precision : {Precision::kFp8, Precision::kFp8AllLayers}) {
    const Result full = Train(*ops, torch::kFloat, Options(precision));
    for (const Recompute recompute : {Recompute::kNone, Recompute::kAttentionOnly}) {
      const Result other = Train(*ops, torch::kFloat, Options(precision, {.recompute = recompute}));
      EXPECT_EQ(other.loss, full.loss);
      EXPECT_TRUE(torch::equal(other.gradients, full.gradients)) << static_cast<int>(recompute);
    }
  }
}

// What the layers around it hand to a layer that is cast, and take from it, is in both forms where
// it has to be. Where there is no layer between the first and the last, nothing is cast.
TEST(Fp8DecoderTest, FirstAndLastLayerReadTheModelsType) {
  const auto ops = NewCpuTokenOps(/*threads=*/2);
  ModelConfig config = Config();
  const auto train = [&](Precision precision) {
    return Train(*ops, torch::kFloat, Options(precision), config);
  };
  const Result exact = train(Precision::kModelType), inner = train(Precision::kFp8),
               all = train(Precision::kFp8AllLayers);
  EXPECT_LT(1e-3, Error(inner.logits, exact.logits));
  EXPECT_LT(Error(inner.logits, exact.logits), 0.8 * Error(all.logits, exact.logits));
  EXPECT_LT(Error(inner.gradients, exact.gradients), 0.8 * Error(all.gradients, exact.gradients));
  config.layers = 2;
  const Result two = train(Precision::kFp8), plain = train(Precision::kModelType);
  EXPECT_TRUE(torch::equal(two.logits, plain.logits));
  EXPECT_TRUE(torch::equal(two.gradients, plain.gradients));
}

// Counts casts of weights, and those that were turned and that somebody still has.
class CountingOps : public PlainTokenOps {
 public:
  // Of the sizes in the model those alone that are weights' have so many rows.
  ScaledRows CastRows(const Tensor& x) const override {
    if (x.size(0) > kTokens) ++casts;
    return PlainTokenOps::CastRows(x);
  }
  ScaledRows TurnRows(const ScaledRows& rows) const override {
    const ScaledRows turned = PlainTokenOps::TurnRows(rows);
    if (rows.codes.size(0) > kTokens) {
      ++turns;
      turned_.push_back(turned.codes.storage().getWeakStorageImpl());
    }
    return turned;
  }
  int64_t Alive() const {
    return std::ranges::count_if(turned_, [](const auto& codes) { return !codes.expired(); });
  }

  static constexpr int64_t kTokens = 64;
  mutable int casts = 0, turns = 0;

 private:
  mutable std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> turned_;
};

// Calls `when` before it attends, forward and backward.
class WatchedAttention : public DenseContextAttention {
 public:
  explicit WatchedAttention(std::function<void()> when) : when_(std::move(when)) {}
  attention::AttentionOutput Forward(int layer, const Tensor& q, const Tensor& k,
                                     const Tensor& v) override {
    when_();
    attention::AttentionOutput output = DenseContextAttention::Forward(layer, q, k, v);
    output.record = std::make_shared<Record>(std::move(output.record), when_);
    return output;
  }

 private:
  struct Record : attention::AttentionRecord {
    Record(std::shared_ptr<const attention::AttentionRecord> of, std::function<void()> then)
        : record(std::move(of)), when(std::move(then)) {}
    attention::AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& out, const Tensor& lse,
                                           const Tensor& d_out) const override {
      when();
      return record->Backward(q, k, v, out, lse, d_out);
    }
    const std::shared_ptr<const attention::AttentionRecord> record;
    const std::function<void()> when;
  };
  const std::function<void()> when_;
};

// Beside attention no weight is there turned.
TEST(Fp8DecoderTest, AttentionHasTheMemoryOfCastsToItself) {
  const ModelConfig config = Config();
  for (const Precision precision : {Precision::kFp8, Precision::kFp8AllLayers}) {
    const int64_t layers = CastLayersOf(config.layers, precision).count();
    for (const Recompute recompute :
         {Recompute::kFull, Recompute::kAttentionOnly, Recompute::kNone}) {
      const CountingOps ops;
      FlatStore store(MakeParameterLayout(config), Values(config), torch::kCPU, torch::kFloat);
      Decoder decoder(config, ops, store, Options(precision, {.recompute = recompute}));
      int calls = 0;
      int64_t most = 0;
      WatchedAttention attention([&] {
        ++calls;
        most = std::max(most, ops.Alive());
      });
      decoder.ForwardBackward(Batch(CountingOps::kTokens), attention);
      EXPECT_EQ(calls, 2 * config.layers);
      EXPECT_EQ(most, 0);
      EXPECT_EQ(ops.Alive(), 0);
      EXPECT_EQ(ops.turns, 4 * layers) << "for backward alone";
    }
  }
}

// A step reads what the store has of its parameters, and casts no weight by itself.
TEST(Fp8DecoderTest, CastsFollowTheirWeights) {
  const ModelConfig config = Config();
  for (const Precision precision : {Precision::kFp8AllLayers, Precision::kFp8}) {
    const int64_t layers = CastLayersOf(config.layers, precision).count();
    const CountingOps ops;
    FlatStore store(MakeParameterLayout(config), Values(config), torch::kCPU, torch::kFloat);
    Decoder decoder(config, ops, store, Options(precision));
    DenseContextAttention attention;
    const TokenBatch batch = Batch(CountingOps::kTokens);
    const double before = decoder.ForwardBackward(batch, attention).item<double>();
    const int casts = ops.casts;
    EXPECT_GE(casts, 4 * layers) << "the store's";
    EXPECT_EQ(decoder.ForwardBackward(batch, attention).item<double>(), before);
    EXPECT_EQ(ops.casts, casts);

    store.parameters().mul_(0.5);
    const double after = decoder.ForwardBackward(batch, attention).item<double>();
    FlatStore fresh(MakeParameterLayout(config), store.parameters(), torch::kCPU, torch::kFloat);
    Decoder other(config, ops, fresh, Options(precision));
    EXPECT_EQ(other.ForwardBackward(batch, attention).item<double>(), after);
    EXPECT_NE(after, before);
  }
}

// As in bf16, where an infinite weight spreads: the gradient says which parameter it was.
TEST(Fp8DecoderTest, WeightsThatAreNotFiniteShowInLossAndGradients) {
  const ModelConfig config = Config();
  const ParameterLayout layout = MakeParameterLayout(config);
  const auto ops = NewCpuTokenOps(/*threads=*/2);
  for (const char* name :
       {"model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"}) {
    for (const float bad : {INFINITY, NAN}) {
      FlatStore store(layout, Values(config), torch::kCPU, torch::kFloat);
      store.parameters()[layout.Find(name)->offset + 17] = bad;
      Decoder decoder(config, *ops, store, Options(Precision::kFp8AllLayers));
      DenseContextAttention attention;
      const double loss = decoder.ForwardBackward(Batch(64), attention).item<double>();
      EXPECT_FALSE(std::isfinite(loss)) << name;
      const ParameterSlot& slot = *layout.Find(name);
      EXPECT_FALSE(
          store.gradients().narrow(0, slot.offset, slot.elements).isfinite().all().item<bool>())
          << name;
    }
  }
}

}  // namespace
}  // namespace ringleader::model
