// Kept activations that leave and come back, on the CPU: the host's memory is played by tensors,
// and the copies happen as late as HostCopies' contract allows.
#include "worker/model/memory/saved_layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <limits>
#include <map>

#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/golden_batch.h"
#include "worker/model/token_ops/cpu_token_ops.h"

namespace ringleader::model {
namespace {

using testing::HasSubstr;
using torch::Tensor;

// Copies when it is waited for, not before; spoils what it copies back into until then.
class LateCopies : public HostCopies {
 public:
  void StartOut(int layer, std::span<const Tensor> tensors) override {
    ++outs_[layer];
    Queue(layer, [this, layer, held = Hold(tensors)] {
      places_[layer].clear();
      for (const Tensor& tensor : held) places_[layer].push_back(tensor.clone());
    });
  }
  void StartIn(int layer, std::span<const Tensor> tensors) override {
    ++ins_[layer];
    for (const Tensor& tensor : tensors) tensor.fill_(std::numeric_limits<float>::quiet_NaN());
    Queue(layer, [this, layer, held = Hold(tensors)] {
      ASSERT_EQ(held.size(), places_[layer].size());
      for (size_t i = 0; i < held.size(); ++i) held[i].copy_(places_[layer][i]);
    });
  }
  void Await(int layer) override {
    while (!queue_.empty() && pending_[layer] > 0) RunNext();
  }
  void Drain() override {
    drained_ = true;
    while (!queue_.empty()) RunNext();
  }

  const std::map<int, int>& outs() const { return outs_; }
  const std::map<int, int>& ins() const { return ins_; }
  bool idle() const { return queue_.empty(); }
  bool drained() const { return drained_; }

 private:
  static std::vector<Tensor> Hold(std::span<const Tensor> tensors) {
    return {tensors.begin(), tensors.end()};
  }
  void Queue(int layer, std::function<void()> copy) {
    ++pending_[layer];
    queue_.emplace_back(layer, std::move(copy));
  }
  void RunNext() {
    queue_.front().second();
    --pending_[queue_.front().first];
    queue_.pop_front();
  }

  std::deque<std::pair<int, std::function<void()>>> queue_;  // in the order of their start
  std::map<int, int> pending_, outs_, ins_;
  std::map<int, std::vector<Tensor>> places_;
  bool drained_ = false;
};

SavedLayer Layer(double value) {
  SavedLayer saved;
  saved.input = torch::full({4, 3}, value);
  saved.attended = torch::full({4, 2, 2}, value + 0.5);
  saved.lse = torch::full({2, 4}, -value);
  return saved;
}

TEST(SavedLayersTest, WhatIsTakenIsWhatWasKept) {
  for (const int slots : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(slots);
    LateCopies copies;
    SavedLayers layers(5, slots, &copies);
    for (int i = 0; i < 5; ++i) {
      layers.MakeRoom(i);
      layers.Keep(i, Layer(i));
    }
    for (int i = 4; i >= 0; --i) {
      {
        const SavedLayer taken = layers.Take(i);
        const SavedLayer expected = Layer(i);
        EXPECT_TRUE(torch::equal(taken.input, expected.input));
        EXPECT_TRUE(torch::equal(taken.attended, expected.attended));
        EXPECT_TRUE(torch::equal(taken.lse, expected.lse));
        EXPECT_FALSE(taken.packed.defined());
      }
      layers.Return(i);
    }
    EXPECT_EQ(copies.outs().size(), static_cast<size_t>(std::max(0, 5 - slots)));
    EXPECT_EQ(copies.ins(), copies.outs());
    EXPECT_TRUE(copies.idle());
  }
}

TEST(SavedLayersTest, APassThatEndsEarlyWaitsForItsCopies) {
  LateCopies copies;
  {
    SavedLayers layers(3, 1, &copies);
    layers.MakeRoom(0);
    layers.Keep(0, Layer(0));
  }
  EXPECT_TRUE(copies.drained());
  EXPECT_TRUE(copies.idle());
}

TEST(SavedLayersTest, NothingLeavesWithoutCopies) {
  SavedLayers all_fit(2, 2, nullptr);
  all_fit.MakeRoom(0);
  all_fit.Keep(0, Layer(0));
  EXPECT_THROW(SavedLayers(3, 2, nullptr), c10::Error);
}

class OffloadedDecoderTest : public testing::Test {
 protected:
  struct Result {
    double loss = 0;
    Tensor gradients;
  };
  Result Run(Recompute recompute, int64_t host_layers, HostCopies* copies) {
    Golden golden = LoadGolden("qwen2");
    const auto ops = NewCpuTokenOps(/*threads=*/1);
    FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
    Decoder decoder(
        golden.config, *ops, store,
        {.recompute = {.recompute = recompute, .host_layers = host_layers}, .host_copies = copies});
    const TokenBatch batch = BatchOf(golden);
    DenseContextAttention attention;
    Result result;
    // Micro-batches use the same places again.
    for (int i = 0; i < 2; ++i) {
      result.loss += decoder.ForwardBackward(batch, attention).item<double>();
    }
    result.loss += decoder.Score(batch, attention).losses.sum(torch::kDouble).item<double>();
    result.gradients = store.gradients().clone();
    return result;
  }
};

TEST_F(OffloadedDecoderTest, ChangesNoBit) {
  const int64_t layers = LoadGolden("qwen2").config.layers;
  ASSERT_GE(layers, 2);
  for (const auto recompute : {Recompute::kNone, Recompute::kAttentionOnly, Recompute::kFull}) {
    const Result expected = Run(recompute, 0, nullptr);
    for (int64_t host_layers = 1; host_layers < layers; ++host_layers) {
      LateCopies copies;
      const Result result = Run(recompute, host_layers, &copies);
      EXPECT_EQ(result.loss, expected.loss);
      EXPECT_TRUE(torch::equal(result.gradients, expected.gradients));
      EXPECT_EQ(copies.ins().size(), static_cast<size_t>(host_layers));
      EXPECT_TRUE(copies.idle());
    }
  }
}

TEST_F(OffloadedDecoderTest, RefusesPlansThatItCannotFollow) {
  LateCopies copies;
  EXPECT_THROW(Run(Recompute::kFull, 100, &copies), c10::Error);
  EXPECT_THROW(Run(Recompute::kFull, 1, nullptr), c10::Error);
}

}  // namespace
}  // namespace ringleader::model
