// Attention whose budgets change in mid-run, from one forward to the next, before those that came
// earlier have had their backward: by factors of attention.balance, dense evaluations between
// steps, documents, and probes that heads' budgets follow. The same tests for the CPU engine and
// for GPUs.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "patterns/index/head_budgets.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/attention/testing/shard_rows.h"

namespace ringleader::attention::testing {

// Engine: SetUp(); RunRanks(ranks, body(rank, make)), where make(options) is that rank's attention;
// ToDevice(tensor).
using MakeAttention = std::function<absl::StatusOr<std::unique_ptr<ContextAttention>>(
    const patterns::AttentionOptions&)>;

struct ForwardBudget {
  uint64_t step = 1;  // 0: of an evaluation
  float move = 1.0f;
  bool dense = false;
  std::vector<int64_t> documents = {};
  std::vector<patterns::LayerBudgets> heads = {};
};

template <typename Engine>
class ChangingBudgetsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 1024;
  static constexpr int kLayers = 2;

  using Budget = ForwardBudget;
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

  // Options whose heads' budgets follow the probes of earlier steps and, last, a pattern that has
  // none, which takes no notice of them.
  static std::vector<patterns::AttentionOptions> Probed() {
    const patterns::AttentionOptions options = {
        .probe_every = 1, .sink_tokens = 4, .tile = 64, .deterministic = true};
    std::vector<patterns::AttentionOptions> all(7, options);
    all[0].pattern = patterns::Pattern::kAdaSpa;
    all[0].density = 0.3;
    all[1].pattern = patterns::Pattern::kVerticalSlash;
    all[1].select = patterns::Select::kTopK;
    all[1].budget = {.max_verticals = 40, .max_slashes = 3};
    all[2].pattern = patterns::Pattern::kMoba;
    all[2].block_size = 64;
    all[2].topk_blocks = 4;
    all[3].pattern = patterns::Pattern::kKeyGroups;
    all[3].density = 0.3;
    all[3].deterministic = false;  // which it cannot be on GPUs
    all[4].pattern = patterns::Pattern::kBlockTopK;
    all[4].block_size = 64;
    all[4].topk_blocks = 4;
    all[5].pattern = patterns::Pattern::kXAttention;
    all[5].threshold = 1.0;
    all[5].density = 0.4;
    for (int i = 0; i < 6; ++i) all[i].adapt_heads = all[i].adapt_by_probe = true;
    all[6].pattern = patterns::Pattern::kFixedBlocks;
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
      attention_->SetHeadBudgets(budget.heads);
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

    std::vector<LayerStats> TakeLayers() { return attention_->TakeStats().layers; }
    uint64_t TakeTiles() {
      uint64_t tiles = 0;
      for (const LayerStats& layer : TakeLayers()) tiles += layer.TotalTiles();
      return tiles;
    }

   private:
    torch::Tensor Again(int of) const { return rows_[of].clone(); }

    std::unique_ptr<ContextAttention> attention_;
    std::vector<torch::Tensor> rows_;  // of q, k, v, d_out
  };

  // To the bit; gradients within rounding where they are added in any order.
  static void ExpectTheSame(const Outcome& actual, const Outcome& expected,
                            bool deterministic = true) {
    ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
    for (size_t i = 0; i < actual.tensors.size(); ++i) {
      const bool is_out = i % 4 == 0;
      EXPECT_TRUE(deterministic || is_out
                      ? torch::equal(actual.tensors[i], expected.tensors[i])
                      : torch::allclose(actual.tensors[i], expected.tensors[i], 1e-2, 1e-2))
          << "tensor " << i;
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

// As trainers whose heads' budgets follow the probe run steps, with an evaluation between them.
// Heads 0 and 2 attend to the first key, 1 and 3 to all keys alike, so that the probe takes half of
// the budget from the former.
TYPED_TEST_P(ChangingBudgetsTest, HeadsHaveTheBudgetsThatTheProbeBeforeLeftThem) {
  using Run = typename TestFixture::Run;
  using Outcome = typename TestFixture::Outcome;
  using Budget = typename TestFixture::Budget;
  torch::manual_seed(13);
  std::vector<torch::Tensor> sequence = {
      torch::zeros({TestFixture::kTokens, 4, 64}), -torch::ones({TestFixture::kTokens, 2, 64}),
      torch::randn({TestFixture::kTokens, 2, 64}), torch::randn({TestFixture::kTokens, 4, 64})};
  for (const int head : {0, 2}) sequence[0].select(1, head).fill_(4);
  sequence[1].select(0, 0).fill_(1);
  for (patterns::AttentionOptions options : TestFixture::Probed()) {
    for (const int ranks : {1, 2}) {
      options.ring.inner = ranks;
      SCOPED_TRACE(::testing::Message()
                   << "pattern " << static_cast<int>(options.pattern) << ", " << ranks << " ranks");
      TypeParam::RunRanks(ranks, [&](int rank, const MakeAttention& make) {
        Run run(sequence, options, rank, make);
        std::vector<patterns::LayerBudgets> heads(TestFixture::kLayers);
        std::vector<Budget> budgets;
        std::vector<uint64_t> tiles;
        std::vector<std::vector<AttentionOutput>> forwards;
        for (const auto& [step, dense] : {std::pair{1, false}, {2, false}, {0, true}, {3, false}}) {
          budgets.push_back({.step = static_cast<uint64_t>(step), .dense = dense, .heads = heads});
          forwards.push_back(run.Forward(budgets.back()));
          tiles.push_back(0);
          const std::vector<LayerStats> layers = run.TakeLayers();
          for (int layer = 0; layer < TestFixture::kLayers; ++layer) {
            tiles.back() += layers.at(layer).TotalTiles();
            if (step == 0) continue;  // evaluations do not probe
            FollowProbe(layer, layers.at(layer).probed_visited, layers.at(layer).probed_queries,
                        /*heads_together=*/1, &heads[layer]);
            EXPECT_EQ(heads[layer].halves, std::vector<int32_t>({1, 3, 1, 3})) << "step " << step;
          }
        }
        // Each budget on an engine of its own, backward right after forward; on the first one
        // those that came first come back last.
        std::vector<Outcome> alone;
        for (size_t i = 0; i < budgets.size(); ++i) {
          Run by_itself(sequence, options, rank, make);
          alone.push_back(by_itself.Backward(by_itself.Forward(budgets[i])));
          EXPECT_EQ(by_itself.TakeTiles(), tiles[i]) << "forward " << i;
        }
        for (size_t i = budgets.size(); i-- > 0;) {
          TestFixture::ExpectTheSame(run.Backward(forwards[i]), alone[i], options.deterministic);
        }
        // What the heads that the probe gave more attend to is more.
        const auto equal = [&](int head) {
          return torch::equal(alone[0].tensors[0].select(1, head),
                              alone[1].tensors[0].select(1, head));
        };
        EXPECT_EQ(equal(1), !options.adapt_by_probe);
        EXPECT_EQ(equal(3), !options.adapt_by_probe);
        // And no more in the step after.
        TestFixture::ExpectTheSame(alone[3], alone[1], options.deterministic);
      });
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(ChangingBudgetsTest, EveryBackwardIsOfWhatItsForwardChose,
                            AFactorHoldsForItsMicroBatchAlone,
                            HeadsHaveTheBudgetsThatTheProbeBeforeLeftThem);

}  // namespace ringleader::attention::testing
