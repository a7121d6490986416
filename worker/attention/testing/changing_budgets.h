// Attention whose budgets change in mid-run, from one forward to the next, before those that came
// earlier have had their backward: by factors of attention.balance, dense evaluations between
// steps, and documents. The same tests for the CPU engine and for GPUs.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/attention/runner/context_attention.h"
#include "worker/attention/testing/shard_rows.h"

namespace ringleader::attention::testing {

// Engine: SetUp(); RunRanks(ranks, body(rank, make)), where make(options) is that rank's attention;
// ToDevice(tensor).
using MakeAttention = std::function<absl::StatusOr<std::unique_ptr<ContextAttention>>(
    const patterns::AttentionOptions&)>;

template <typename Engine>
class ChangingBudgetsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 1024;
  static constexpr int kLayers = 2;

  struct Budget {
    uint64_t step = 1;  // 0: of an evaluation
    float move = 1.0f;
    bool dense = false;
    std::vector<int64_t> documents = {};
  };
  struct Outcome {
    std::vector<torch::Tensor> tensors;  // of all layers: out, dq, dk, dv
    uint64_t tiles = 0;                  // visited by all layers
  };

  void SetUp() override { Engine::SetUp(); }

  // Options under which a factor moves what is chosen. The order of sums is always the same.
  static std::vector<patterns::AttentionOptions> Balanced() {
    patterns::AttentionOptions options = {
        .balance = {.anchor = kernels::Anchor::kMean, .tolerance = 0.5f},
        .tile = 64,
        .deterministic = true};
    std::vector<patterns::AttentionOptions> all(3, options);
    all[0].pattern = patterns::Pattern::kVerticalSlash;
    all[0].budget = {.vertical_mass = 0.125, .slash_mass = 0.25};
    all[0].adapt_heads = true;
    all[1].pattern = patterns::Pattern::kBlockTopK;
    all[1].block_size = 64;
    all[1].topk_blocks = 5;
    all[2].pattern = patterns::Pattern::kXAttention;
    all[2].threshold = 0.5;
    return all;
  }

  // This rank's rows of one sequence on one engine.
  class Run {
   public:
    Run(const std::vector<torch::Tensor>& sequence, const patterns::AttentionOptions& options,
        int rank, const MakeAttention& make) {
      auto attention = make(options);
      TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
      attention_ = *std::move(attention);
      const torch::Tensor positions = PositionsOf(options, rank, kTokens);
      for (const torch::Tensor& whole : sequence) {
        rows_.push_back(Engine::ToDevice(whole.index_select(0, positions)));
      }
    }

    std::vector<AttentionOutput> Forward(const Budget& budget) {
      attention_->SetStep(budget.step);
      attention_->SetMove(budget.move);
      attention_->SetDense(budget.dense);
      const absl::Status status = attention_->SetDocuments(kTokens, budget.documents);
      TORCH_CHECK(status.ok(), std::string(status.message()));
      std::vector<AttentionOutput> layers;
      for (int layer = 0; layer < kLayers; ++layer) {
        // Computed again for backward: what forward was given is gone by then.
        layers.push_back(attention_->Forward(layer, Again(0), Again(1), Again(2)));
      }
      return layers;
    }

    Outcome Backward(const std::vector<AttentionOutput>& layers) {
      Outcome outcome;
      for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
        const AttentionGradients gradients =
            layer->record->Backward(Again(0), Again(1), Again(2), layer->out, layer->lse, rows_[3]);
        for (const torch::Tensor& x : {layer->out, gradients.dq, gradients.dk, gradients.dv}) {
          outcome.tensors.push_back(x.cpu());
        }
      }
      return outcome;
    }

    uint64_t TakeTiles() {
      uint64_t tiles = 0;
      for (const LayerStats& layer : attention_->TakeStats().layers) tiles += layer.TotalTiles();
      return tiles;
    }

   private:
    torch::Tensor Again(int of) const { return rows_[of].clone(); }

    std::unique_ptr<ContextAttention> attention_;
    std::vector<torch::Tensor> rows_;  // of q, k, v, d_out
  };

  static void ExpectTheSame(const Outcome& actual, const Outcome& expected) {
    ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
    for (size_t i = 0; i < actual.tensors.size(); ++i) {
      EXPECT_TRUE(torch::equal(actual.tensors[i], expected.tensors[i])) << "tensor " << i;
    }
  }
};

TYPED_TEST_SUITE_P(ChangingBudgetsTest);

TYPED_TEST_P(ChangingBudgetsTest, EveryBackwardIsOfWhatItsForwardChose) {
  using Run = typename TestFixture::Run;
  using Outcome = typename TestFixture::Outcome;
  const std::vector<typename TestFixture::Budget> budgets = {
      {.move = 0.6f},
      {.move = 1.4f},
      {.step = 0, .dense = true},
      {.move = 0.6f, .documents = {0, 300, 301, 700}},
      {.step = 2}};
  torch::manual_seed(11);
  std::vector<torch::Tensor> sequence;
  for (const int heads : {4, 2, 2, 4}) {
    sequence.push_back(torch::randn({TestFixture::kTokens, heads, 64}));
  }
  for (patterns::AttentionOptions options : TestFixture::Balanced()) {
    for (const int ranks : {1, 2}) {
      options.ring.inner = ranks;
      SCOPED_TRACE(::testing::Message()
                   << "pattern " << static_cast<int>(options.pattern) << ", " << ranks << " ranks");
      TypeParam::RunRanks(ranks, [&](int rank, const MakeAttention& make) {
        // Each budget on an engine of its own, backward right after forward.
        std::vector<Outcome> alone;
        for (const auto& budget : budgets) {
          Run run(sequence, options, rank, make);
          alone.push_back(run.Backward(run.Forward(budget)));
          alone.back().tiles = run.TakeTiles();
        }
        EXPECT_LT(alone[0].tiles, alone[4].tiles);
        EXPECT_LT(alone[4].tiles, alone[1].tiles);
        EXPECT_LT(alone[1].tiles, alone[2].tiles) << "dense";
        EXPECT_LT(alone[3].tiles, alone[0].tiles) << "documents";
        // All on one, and the first to go forward comes back last.
        Run run(sequence, options, rank, make);
        std::vector<std::vector<AttentionOutput>> forwards;
        for (size_t i = 0; i < budgets.size(); ++i) {
          forwards.push_back(run.Forward(budgets[i]));
          EXPECT_EQ(run.TakeTiles(), alone[i].tiles) << "forward " << i;
        }
        for (size_t i = budgets.size(); i-- > 0;) {
          TestFixture::ExpectTheSame(run.Backward(forwards[i]), alone[i]);
        }
      });
    }
  }
}

// As trainers run micro-batches: a factor for each, forward and backward in turn.
TYPED_TEST_P(ChangingBudgetsTest, AFactorHoldsForItsMicroBatchAlone) {
  using Run = typename TestFixture::Run;
  using Outcome = typename TestFixture::Outcome;
  torch::manual_seed(12);
  std::vector<torch::Tensor> sequence;
  for (const int heads : {4, 2, 2, 4}) {
    sequence.push_back(torch::randn({TestFixture::kTokens, heads, 64}));
  }
  for (const patterns::AttentionOptions& options : TestFixture::Balanced()) {
    SCOPED_TRACE(::testing::Message() << "pattern " << static_cast<int>(options.pattern));
    TypeParam::RunRanks(1, [&](int rank, const MakeAttention& make) {
      Run run(sequence, options, rank, make);
      std::vector<Outcome> outcomes;
      for (const float move : {1.0f, 0.6f, 1.0f, 1.4f, 1.0f}) {
        outcomes.push_back(run.Backward(run.Forward({.move = move})));
        outcomes.back().tiles = run.TakeTiles();
      }
      for (const int again : {2, 4}) {
        TestFixture::ExpectTheSame(outcomes[again], outcomes[0]);
        EXPECT_EQ(outcomes[again].tiles, outcomes[0].tiles);
      }
      EXPECT_LT(outcomes[1].tiles, outcomes[0].tiles);
      EXPECT_GT(outcomes[3].tiles, outcomes[0].tiles);
    });
  }
}

REGISTER_TYPED_TEST_SUITE_P(ChangingBudgetsTest, EveryBackwardIsOfWhatItsForwardChose,
                            AFactorHoldsForItsMicroBatchAlone);

}  // namespace ringleader::attention::testing
