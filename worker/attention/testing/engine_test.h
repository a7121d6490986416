// Attention of the CPU engine on ranks of this process: what its tests share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/reference/testing/masked_attention.h"
#include "patterns/attention_options.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/attention/testing/forward_on_ranks.h"
#include "worker/attention/testing/index_oracle.h"

namespace ringleader::attention::testing {

// What one rank was left with by one Forward of layer 1.
struct RankResult {
  HostIndex index;
  AttentionStats stats;
  std::vector<float> out = {};
};

class AttentionEngineTest : public ::testing::Test {
 protected:
  using Tensor = kernels::reference::testing::Tensor;
  static constexpr int64_t kTokens = 2048;
  static constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;

  // Computes on as many ranks as `options.ring` has. prefix_ends: MaskRule's.
  std::vector<RankResult> Run(const patterns::AttentionOptions& options,
                              const std::vector<int64_t>& documents = {}, bool dense = false,
                              const std::vector<int64_t>& prefix_ends = {}) {
    std::vector<RankResult> results(options.ring.ranks());
    ForwardOnRanks(
        options, /*layer=*/1, q_, k_, v_,
        [&](RingRunner& runner) {
          runner.SetDense(dense);
          ASSERT_TRUE(runner.SetDocuments(kTokens, documents, /*padding=*/0, prefix_ends).ok());
        },
        [&](const auto& rank) {
          results[rank.rank] = {ToHost(*rank.index), rank.runner.TakeStats(), rank.out.data};
        });
    return results;
  }

  // Causal attention to what is `visible`, in fp64.
  std::vector<double> Masked(const kernels::reference::testing::Visible& visible) const {
    const Tensor none(0, kHeads, kHeadDim);
    return kernels::reference::testing::ComputeMaskedAttention(
               q_, k_, v_, none, 1.0f / std::sqrt(static_cast<float>(kHeadDim)),
               [&](int head, int64_t i, int64_t j) { return j <= i && visible(head, i, j); })
        .out;
  }

  static patterns::AttentionOptions VerticalSlash() {
    return {.pattern = patterns::Pattern::kVerticalSlash,
            .budget = {.vertical_mass = 0.6, .slash_mass = 0.5},
            .estimate_queries = 100,
            .sink_tokens = 4,
            .tile = kTile};
  }

  std::mt19937 random_{3};
  Tensor q_ = kernels::reference::testing::RandomTensor(kTokens, kHeads, kHeadDim, random_);
  Tensor k_ = kernels::reference::testing::RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
  const Tensor v_ = kernels::reference::testing::RandomTensor(kTokens, kKvHeads, kHeadDim, random_);
};

}  // namespace ringleader::attention::testing
