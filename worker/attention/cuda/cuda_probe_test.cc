// What a probe on a GPU says of a pattern, against attention in double precision to what the index
// holds.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "patterns/index/sequence_documents.h"
#include "patterns/pattern.h"
#include "patterns/probe.h"
#include "worker/attention/testing/gpu_attention.h"
#include "worker/attention/testing/gpu_rings.h"
#include "worker/attention/testing/ring_settings.h"

namespace ringleader::attention {
namespace {

using patterns::AttentionOptions;
using patterns::Pattern;
using testing::Gpus;
using testing::Result;
using testing::RunOnGpu;
using testing::Sequence;

// How far a share may be off: the exponential of the difference of two logarithms of sums, each as
// wrong as the largest of its logits. These are fp32 sums of 64 exact products below 32, of the
// largest of which the tensor cores keep 2^-22 in each addition, over the root of 64:
// 64 * 32 * 2^-22 / 8 = 6e-5 at worst. Exponentials, logarithms and the fixed point that shares
// are rounded to add 1e-6 each.
constexpr double kShareTolerance = 2e-4;
constexpr int64_t kTokens = 1024;
constexpr int kHeads = 4;
constexpr uint64_t kStep = 1;  // RunOnGpu's

std::vector<std::pair<std::string, AttentionOptions>> Patterns() {
  return {{"vertical-slash, top-p", testing::TopP()},
          {"vertical-slash of a share, spread",
           {.pattern = Pattern::kVerticalSlash,
            .budget = {.density = 0.3},
            .estimate_at = patterns::EstimateAt::kSpread,
            .tile = 64}},
          {"block top-k",
           {.pattern = Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2, .tile = 64}},
          {"moba", testing::Moba()},
          {"moba of a share",
           {.pattern = Pattern::kMoba, .block_size = 64, .density = 0.3, .tile = 64}},
          {"xattention", testing::XAttention()},
          {"adaspa", testing::AdaSpa()},
          {"key groups", {.pattern = Pattern::kKeyGroups, .density = 0.3, .tile = 64}},
          {"key groups of pairs",
           {.pattern = Pattern::kKeyGroups, .density = 0.3, .group_heads = 2, .tile = 64}}};
}

class CudaProbeTest : public testing::CudaAttentionTest,
                      public ::testing::WithParamInterface<testing::RingSetting> {
 protected:
  static const Sequence& Small() {
    static const Sequence sequence(kTokens, kHeads, 2, 64);
    return sequence;
  }

  struct Shares {
    std::vector<double> probed;  // by head
    std::optional<double> heard =
        std::nullopt;  // their mean, of the queries that chose, where these are asked
  };
  // Of one rank, whose index is that of any.
  static const Shares& Expected(const std::string& name, const AttentionOptions& options,
                                const std::vector<int64_t>& documents) {
    static auto* const known = new std::map<std::string, Shares>;
    if (const auto found = known->find(name); found != known->end()) return found->second;
    const auto of_sequence = patterns::MakeDocuments({.tokens = kTokens}, documents);
    EXPECT_TRUE(of_sequence.ok()) << of_sequence.status();
    const Result one = RunOnGpu(Small(), options, Gpus::kShared, documents);
    const auto shares_of = [&](const patterns::EstimateQueries& queries) {
      return testing::VisitedShares(Small(), one.index.at(0), queries.positions);
    };
    Shares shares = {.probed = shares_of(patterns::ChooseProbeQueries(options, kTokens, kStep,
                                                                      of_sequence->get()))};
    const patterns::EstimateQueries heard =
        patterns::ChooseHeardQueries(options, kTokens, kStep, of_sequence->get());
    if (!heard.positions.empty()) {
      const std::vector<double> by_head = shares_of(heard);
      shares.heard = std::accumulate(by_head.begin(), by_head.end(), 0.0) / kHeads;
    }
    return known->emplace(name, std::move(shares)).first->second;
  }
};

TEST_P(CudaProbeTest, IsTheExactShareOfWhatWasVisited) {
  for (auto [name, options] : Patterns()) {
    options.probe_every = 1;
    for (const std::vector<int64_t>& documents :
         {std::vector<int64_t>{}, {0, 1, 64, 200, 201, 230, 700}}) {
      const std::string with = name + (documents.empty() ? "" : ", documents");
      SCOPED_TRACE(with);
      const Shares& expected = Expected(with, options, documents);
      AttentionOptions dealt = options;
      dealt.layout = GetParam().layout;
      dealt.ring = GetParam().ring;
      const Result actual = RunOnGpu(Small(), dealt, Gpus::kShared, documents);
      for (const AttentionStats& rank : actual.stats) {
        for (const LayerStats& layer : rank.layers) {  // all three are of the same tensors
          ASSERT_EQ(layer.probed_recall.size(), size_t{kHeads});
          for (int head = 0; head < kHeads; ++head) {
            EXPECT_NEAR(layer.probed_recall[head], expected.probed[head], kShareTolerance)
                << "head " << head;
            EXPECT_LT(expected.probed[head], 0.99);  // there is something to see
          }
          if (expected.heard.has_value()) {
            EXPECT_NEAR(layer.recall, *expected.heard, kShareTolerance);
          }
        }
      }
    }
  }
}

// The output of all other queries is the same, whatever the probed ones ask; in a step without a
// probe, where these choose with the others, it is not. What is left of a row of a head's output
// are the same sums over the same keys, but for the order of those over groups and owners.
TEST_P(CudaProbeTest, WhatProbedQueriesAskChoosesNothing) {
  for (auto [name, options] : Patterns()) {
    const std::optional<float> silence = patterns::SilenceOf(options);
    if (!silence.has_value()) continue;
    SCOPED_TRACE(name);
    options.layout = GetParam().layout;
    options.ring = GetParam().ring;
    const std::vector<int64_t> positions =
        patterns::ChooseProbeQueries(options, kTokens, kStep, nullptr).positions;
    const torch::Tensor probed = torch::tensor(positions, torch::kLong);
    Sequence changed = Small();
    changed.q = changed.q.index_copy(0, probed, -30 * changed.q.index_select(0, probed));
    const auto error_of_others = [&] {
      const torch::Tensor before = RunOnGpu(Small(), options, Gpus::kShared).out;
      const torch::Tensor after = RunOnGpu(changed, options, Gpus::kShared).out;
      return testing::RelativeError(after.index_fill(0, probed, 0),
                                    before.index_fill(0, probed, 0));
    };
    options.probe_every = 1;
    EXPECT_LT(error_of_others(), testing::kTolerance);
    options.probe_every = 0;
    EXPECT_GT(error_of_others(), 10 * testing::kTolerance);
  }
}

std::vector<testing::RingSetting> Settings() {
  return {{kernels::LayoutKind::kStriped, {ring::RingKind::kFlat, 1, 1}},
          {kernels::LayoutKind::kStriped, {ring::RingKind::kFlat, 2, 1}},
          {kernels::LayoutKind::kZigzag, {ring::RingKind::kHierarchical, 2, 2}},
          {kernels::LayoutKind::kContiguous, {ring::RingKind::kAllGather, 4, 1}}};
}

INSTANTIATE_TEST_SUITE_P(Settings, CudaProbeTest, ::testing::ValuesIn(Settings()),
                         [](const auto& info) { return testing::NameOf(info.param); });

}  // namespace
}  // namespace ringleader::attention
