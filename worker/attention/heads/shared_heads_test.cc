// Attention whose heads are shared out, alone and inside a ring, or attended with in groups: on any
// number of ranks the output, the gradients and what is visited are those of one rank, and what
// travels is what is predicted.
#include "worker/attention/heads/shared_heads.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "ring/head_shares.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using kernels::LayoutKind;
using patterns::AttentionOptions;
using patterns::Pattern;
using ring::HeadShares;
using torch::Tensor;

constexpr int kHeads = 8, kHeadDim = 64;

struct Sequence {
  Tensor q, k, v, d_out;

  Sequence(int64_t tokens, int kv_heads) {
    torch::manual_seed(7);
    q = torch::randn({tokens, kHeads, kHeadDim});
    k = torch::randn({tokens, kv_heads, kHeadDim});
    v = torch::randn({tokens, kv_heads, kHeadDim});
    d_out = torch::randn({tokens, kHeads, kHeadDim});
  }
  int64_t tokens() const { return q.size(0); }
};

struct Result {
  Tensor out, dq, dk, dv;
  std::vector<AttentionStats> stats = {};  // [rank]
  uint64_t bytes = 0;                      // that ranks sent each other

  uint64_t tiles() const {
    uint64_t sum = 0;
    for (const AttentionStats& of_rank : stats) sum += of_rank.TotalTiles();
    return sum;
  }
  std::vector<double> ProbedRecall() const {  // by head, of layer 0
    std::vector<double> heads(kHeads, -1.0);
    for (const AttentionStats& of_rank : stats) {
      const LayerStats& layer = of_rank.layers.at(0);
      std::copy(layer.probed_recall.begin(), layer.probed_recall.end(),
                heads.begin() + layer.first_head);
    }
    return heads;
  }
};

// One of the ranks that share a sequence.
struct Rank {
  std::unique_ptr<comm::Communicator> ring, heads;
  std::unique_ptr<ContextAttention> attention;
  Tensor positions;  // of its tokens

  Rank(const AttentionOptions& options, int64_t tokens, comm::Communicator& all) {
    const int share = options.head_ranks, member = all.rank() % share;
    std::vector<int> ring_ranks, head_ranks;
    for (int i = 0; i < options.ring.ranks(); ++i) ring_ranks.push_back(i * share + member);
    for (int i = 0; i < share; ++i) head_ranks.push_back(all.rank() - member + i);
    ring = *all.Split(ring_ranks);
    heads = *all.Split(head_ranks);
    auto created = CreateCpuRingAttention(options, ring.get(), share == 1 ? nullptr : heads.get());
    TORCH_CHECK(created.ok(), std::string(created.status().message()));
    attention = *std::move(created);
    const kernels::ShardLayout layout{.kind = options.layout,
                                      .ranks = options.ring.ranks(),
                                      .rank = all.rank() / share,
                                      .stripe = options.stripe == 0 ? options.tile : options.stripe,
                                      .tokens = tokens};
    const int64_t held = layout.local_tokens() / share;
    positions = torch::empty({held}, torch::kLong);
    for (int64_t i = 0; i < held; ++i) {
      positions.data_ptr<int64_t>()[i] = layout.Position(member * held + i);
    }
  }
};

enum class Passes { kForward, kBoth, kBothWithStart };

Result RunOnRanks(const Sequence& sequence, const AttentionOptions& options,
                  const std::vector<int64_t>& documents = {}, Passes passes = Passes::kBoth,
                  const std::vector<int64_t>& prefix_ends = {}) {
  Result result{torch::zeros_like(sequence.q), torch::zeros_like(sequence.q),
                torch::zeros_like(sequence.k), torch::zeros_like(sequence.v)};
  const int ranks = options.ring.ranks() * options.head_ranks;
  result.stats.resize(ranks);
  std::atomic<uint64_t> bytes = 0;
  comm::testing::RunRanks(
      comm::testing::CountedCommunicators(ranks, &bytes), [&](comm::Communicator& all) {
        Rank rank(options, sequence.tokens(), all);
        ContextAttention& attention = *rank.attention;
        TORCH_CHECK(attention.SetDocuments(sequence.tokens(), documents, 0, prefix_ends).ok());
        attention.SetStep(1);
        const auto mine = [&](const Tensor& x) { return x.index_select(0, rank.positions); };
        const Tensor q = mine(sequence.q), k = mine(sequence.k), v = mine(sequence.v);
        const AttentionOutput forward = attention.Forward(0, q, k, v);
        TORCH_CHECK(forward.lse.numel() == kHeads * q.size(0));
        result.out.index_copy_(0, rank.positions, forward.out);
        if (passes == Passes::kForward) {
          result.stats[all.rank()] = attention.TakeStats();
          return;
        }
        if (passes == Passes::kBothWithStart) forward.record->StartBackward(k, v);
        const AttentionGradients d =
            forward.record->Backward(q, k, v, forward.out, forward.lse, mine(sequence.d_out));
        result.dq.index_copy_(0, rank.positions, d.dq);
        result.dk.index_copy_(0, rank.positions, d.dk);
        result.dv.index_copy_(0, rank.positions, d.dv);
        result.stats[all.rank()] = attention.TakeStats();
      });
  result.bytes = bytes;
  return result;
}

double RelativeError(const Tensor& actual, const Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

void ExpectSame(const Result& actual, const Result& expected) {
  EXPECT_LT(RelativeError(actual.out, expected.out), 1e-5);
  EXPECT_LT(RelativeError(actual.dq, expected.dq), 1e-5);
  EXPECT_LT(RelativeError(actual.dk, expected.dk), 1e-5);
  EXPECT_LT(RelativeError(actual.dv, expected.dv), 1e-5);
  EXPECT_EQ(actual.tiles(), expected.tiles()) << "the same choice";
  uint64_t causal = 0;
  for (const AttentionStats& stats : actual.stats) causal += stats.layers.at(0).causal_tiles;
  EXPECT_EQ(causal, expected.stats[0].layers.at(0).causal_tiles);
}

const std::vector<int64_t> kDocuments = {0, 1, 64, 200, 201, 230, 900};

AttentionOptions OptionsOf(Pattern pattern) {
  AttentionOptions options{.pattern = pattern, .tile = 64};
  if (pattern == Pattern::kVerticalSlash) {
    options.budget = {.vertical_mass = 0.5, .slash_mass = 0.4};
    options.sink_tokens = 8;
  }
  if (pattern == Pattern::kSlidingWindow) options.window = 200;
  if (pattern == Pattern::kKeyGroups || pattern == Pattern::kAdaSpa) options.density = 0.3;
  if (pattern == Pattern::kXAttention) options.threshold = 0.5;
  options.block_size = 128;
  options.topk_blocks = 2;
  return options;
}

struct Setting {
  Pattern pattern;
  int head_ranks;
  ring::RingShape ring = {};
  LayoutKind layout = LayoutKind::kStriped;
  int head_groups = 1;
  int group_heads = 1;  // kKeyGroups
};

class SharedHeadsTest : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  static AttentionOptions Alone() {
    AttentionOptions options = OptionsOf(GetParam().pattern);
    options.group_heads = GetParam().group_heads;
    return options;
  }
  static AttentionOptions Shared() {
    AttentionOptions options = Alone();
    options.head_ranks = GetParam().head_ranks;
    options.head_groups = GetParam().head_groups;
    options.ring = GetParam().ring;
    options.layout = GetParam().layout;
    return options;
  }
  // The numbers of KV heads that the pattern goes with: as many as heads, fewer, fewer than ranks;
  // where there are groups, that divide into them.
  static std::vector<int> KvHeads() {
    std::vector<int> able;
    for (const int kv_heads : {8, 4, 2, 1}) {
      if (patterns::CheckHeads(Shared(), kHeads, kv_heads).ok()) able.push_back(kv_heads);
    }
    return able;
  }
};

TEST_P(SharedHeadsTest, AnyNumberOfRanksComputesWhatOneComputes) {
  // What one rank computes, for all settings of a pattern.
  static std::map<std::tuple<Pattern, int, int, std::vector<int64_t>>, Result> alone;
  const bool any = GetParam().pattern != Pattern::kKeyGroups && GetParam().head_groups == 1;
  ASSERT_GE(KvHeads().size(), any ? 4u : 2u);
  for (const int kv_heads : KvHeads()) {
    const Sequence sequence(1024, kv_heads);
    for (const std::vector<int64_t>& documents : {std::vector<int64_t>{}, kDocuments}) {
      const auto [found, is_new] =
          alone.try_emplace({GetParam().pattern, GetParam().group_heads, kv_heads, documents});
      if (is_new) found->second = RunOnRanks(sequence, Alone(), documents);
      ExpectSame(RunOnRanks(sequence, Shared(), documents), found->second);
    }
  }
}

// Of the bytes that ranks send each other, those of heads are predicted to the byte, and no other
// is sent where there is no ring: an index asks no other rank.
TEST_P(SharedHeadsTest, WhatTravelsIsWhatIsPredicted) {
  for (const int kv_heads : KvHeads()) {
    const Sequence sequence(1024, kv_heads);
    const Result first = RunOnRanks(sequence, Shared(), {}, Passes::kForward);
    const Result result = RunOnRanks(sequence, Shared());
    const HeadShares shares = {
        .ranks = GetParam().head_ranks, .heads = kHeads, .kv_heads = kv_heads};
    const int64_t ring = GetParam().ring.ranks(), ranks = ring * shares.ranks,
                  tokens = sequence.tokens() / ranks;
    const uint64_t forward = sizeof(float) * shares.ForwardValues(tokens, kHeadDim),
                   backward = sizeof(float) * shares.BackwardValues(tokens, kHeadDim);
    for (const AttentionStats& stats : result.stats) {
      EXPECT_EQ(stats.head_bytes, forward + backward);
    }
    if (ring == 1) {
      EXPECT_EQ(first.bytes, ranks * forward);
      EXPECT_EQ(result.bytes, ranks * (forward + backward));
    } else if (GetParam().pattern == Pattern::kDense) {
      // USP's second term (LongCA-bench's appendix): keys and values of a rank's KV heads.
      const uint64_t hops = sizeof(float) * 2 * (ring - 1) * tokens * shares.ranks *
                            shares.local_kv_heads() * kHeadDim;
      RingBytes in_ring;
      for (const AttentionStats& stats : first.stats) {
        EXPECT_EQ(stats.ring_bytes.whole, hops);
        in_ring.sent += stats.ring_bytes.sent;
      }
      EXPECT_EQ(first.bytes, ranks * forward + in_ring.sent);
    }
  }
}

// Groups of heads are the same bits as all heads at once.
TEST_P(SharedHeadsTest, GroupsAreTheSameBits) {
  if (GetParam().head_groups == 1) return;
  AttentionOptions at_once = Shared();
  at_once.head_groups = 1;
  const Sequence sequence(1024, KvHeads().back());
  const Result expected = RunOnRanks(sequence, at_once, kDocuments);
  const Result groups = RunOnRanks(sequence, Shared(), kDocuments);
  EXPECT_TRUE(torch::equal(groups.out, expected.out));
  EXPECT_TRUE(torch::equal(groups.dq, expected.dq));
  EXPECT_TRUE(torch::equal(groups.dk, expected.dk));
  EXPECT_TRUE(torch::equal(groups.dv, expected.dv));
  for (size_t rank = 0; rank < groups.stats.size(); ++rank) {
    EXPECT_EQ(groups.stats[rank].ring_bytes.sent, expected.stats[rank].ring_bytes.sent);
  }
}

TEST_P(SharedHeadsTest, ABackwardThatWasStartedIsTheSame) {
  const Sequence sequence(1024, KvHeads().back());
  const Result expected = RunOnRanks(sequence, Shared(), kDocuments);
  const Result started = RunOnRanks(sequence, Shared(), kDocuments, Passes::kBothWithStart);
  EXPECT_TRUE(torch::equal(started.dq, expected.dq));
  EXPECT_TRUE(torch::equal(started.dk, expected.dk));
  EXPECT_TRUE(torch::equal(started.dv, expected.dv));
}

constexpr ring::RingShape kRing2{ring::RingKind::kFlat, 2, 1};
constexpr ring::RingShape kRing2x2{ring::RingKind::kHierarchical, 2, 2};
constexpr ring::RingShape kGather2{ring::RingKind::kAllGather, 2, 1};
constexpr ring::RingShape kGather4{ring::RingKind::kAllGather, 4, 1};

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const Pattern pattern :
       {Pattern::kDense, Pattern::kSlidingWindow, Pattern::kVerticalSlash, Pattern::kBlockTopK,
        Pattern::kXAttention, Pattern::kMoba, Pattern::kKeyGroups, Pattern::kAdaSpa}) {
    settings.push_back({pattern, 2});
    settings.push_back({pattern, 4});
    settings.push_back({pattern, 2, kRing2});
    settings.push_back({pattern, 2, kGather2, LayoutKind::kZigzag});
    settings.push_back({pattern, 1, kGather2, LayoutKind::kStriped, 2});
  }
  settings.push_back({Pattern::kVerticalSlash, 1, kGather4, LayoutKind::kZigzag, 4});
  settings.push_back({Pattern::kDense, 2, kGather2, LayoutKind::kStriped, 2});
  for (const Pattern pattern : {Pattern::kDense, Pattern::kVerticalSlash}) {
    settings.push_back({pattern, 2, kRing2x2});
    settings.push_back({pattern, 2, kRing2, LayoutKind::kContiguous});
  }
  settings.push_back({Pattern::kDense, 8});
  settings.push_back({Pattern::kKeyGroups, 2, kRing2, LayoutKind::kStriped, 1, 2});
  settings.push_back({Pattern::kKeyGroups, 1, kGather2, LayoutKind::kStriped, 2, 2});
  return settings;
}

INSTANTIATE_TEST_SUITE_P(Settings, SharedHeadsTest, ::testing::ValuesIn(Settings()),
                         [](const auto& info) {
                           const Setting& s = info.param;
                           return std::string(patterns::DefinitionOf(s.pattern).name) + "_" +
                                  std::to_string(s.head_ranks) + "_" +
                                  testing::NameOf({s.layout, s.ring}) +
                                  (s.head_groups == 1 ? ""
                                                      : "_in_" + std::to_string(s.head_groups)) +
                                  (s.group_heads == 1 ? "" : "_of_pairs");
                         });

// Without a ring a sequence need only divide by the ranks: the last tile may be any part of one.
TEST(SharedHeadsEdgesTest, RaggedTails) {
  for (const Pattern pattern :
       {Pattern::kDense, Pattern::kVerticalSlash, Pattern::kBlockTopK, Pattern::kKeyGroups}) {
    AttentionOptions options = OptionsOf(pattern);
    const Sequence sequence(1004, 4);
    const Result expected = RunOnRanks(sequence, options);
    options.head_ranks = 4;
    ExpectSame(RunOnRanks(sequence, options), expected);
    options.head_ranks = 2;
    ExpectSame(RunOnRanks(sequence, options, {0, 700, 1003}),
               RunOnRanks(sequence, OptionsOf(pattern), {0, 700, 1003}));
  }
}

TEST(SharedHeadsEdgesTest, MasksThatSeeAhead) {
  const Sequence sequence(1024, 2);
  for (const patterns::Mask mask : {patterns::Mask::kFull, patterns::Mask::kPrefixLm}) {
    const std::vector<int64_t> documents = {0, 300, 640};
    const std::vector<int64_t> ends = mask == patterns::Mask::kPrefixLm
                                          ? std::vector<int64_t>{100, 500, 640}
                                          : std::vector<int64_t>{};
    AttentionOptions options = OptionsOf(Pattern::kDense);
    options.mask = mask;
    const Result expected = RunOnRanks(sequence, options, documents, Passes::kBoth, ends);
    options.head_ranks = 2;
    ExpectSame(RunOnRanks(sequence, options, documents, Passes::kBoth, ends), expected);
    options.ring = kRing2;
    ExpectSame(RunOnRanks(sequence, options, documents, Passes::kBoth, ends), expected);
  }
}

// Each rank probes its own heads, and says which they are.
TEST(SharedHeadsEdgesTest, ProbesAreOfTheHeadsThatARankHas) {
  AttentionOptions options = OptionsOf(Pattern::kVerticalSlash);
  options.probe_every = 1;
  const Sequence sequence(1024, 2);
  const std::vector<double> expected = RunOnRanks(sequence, options).ProbedRecall();
  options.head_ranks = 2;
  options.ring = kRing2;
  const std::vector<double> shared = RunOnRanks(sequence, options).ProbedRecall();
  options.head_ranks = 1;
  options.head_groups = 2;
  options.ring = kGather2;
  const std::vector<double> groups = RunOnRanks(sequence, options).ProbedRecall();
  for (int head = 0; head < kHeads; ++head) {
    EXPECT_GT(expected[head], 0.0);
    EXPECT_NEAR(shared[head], expected[head], 1e-5) << head;
    EXPECT_NEAR(groups[head], expected[head], 1e-5) << head;
  }
}

TEST(SharedHeadsEdgesTest, WhatDoesNotFitIsRefusedByName) {
  const auto check = [](AttentionOptions options, int64_t heads, int64_t kv_heads) {
    absl::Status status = patterns::CheckHeadRanks(options);
    if (status.ok()) status = patterns::CheckHeads(options, heads, kv_heads);
    return std::string(status.message());
  };
  AttentionOptions options = OptionsOf(Pattern::kVerticalSlash);
  options.head_ranks = 4;
  EXPECT_EQ(check(options, 8, 2), "");
  EXPECT_NE(check(options, 10, 2).find("4 trainers cannot share out 10 heads"), std::string::npos);
  EXPECT_NE(check(options, 28, 4).find("7 of 28 heads; "), std::string::npos);
  options.adapt_heads = true;
  EXPECT_NE(check(options, 8, 2).find("attention.head_budgets: by_recall"), std::string::npos);
  options.adapt_heads = false;
  options.balance.anchor = kernels::Anchor::kMean;
  EXPECT_NE(check(options, 8, 2).find("attention.balance.anchor"), std::string::npos);
  options = OptionsOf(Pattern::kDense);
  options.head_ranks = 4;
  EXPECT_EQ(check(options, 28, 4), "") << "nothing to choose";
  options.by_documents = true;
  EXPECT_NE(check(options, 28, 4).find("parallelism.layout: documents"), std::string::npos);
  options = OptionsOf(Pattern::kVerticalSlash);
  options.stripe = options.tile;
  options.head_groups = 2;
  EXPECT_EQ(check(options, 8, 2), "");
  EXPECT_NE(check(options, 8, 1).find("parallelism.head_groups: 2 does not divide the 1 KV heads"),
            std::string::npos);
  EXPECT_NE(check(options, 6, 2).find("3 of 6 heads; "), std::string::npos);
  EXPECT_NE(patterns::CheckOptions(options, 1).message().find("parallelism.ring: all_gather alone"),
            std::string::npos);
  options.adapt_heads = true;
  EXPECT_NE(check(options, 8, 2)
                .find("parallelism.head_groups: 2 does not go with "
                      "attention.head_budgets: by_recall"),
            std::string::npos);
  options = OptionsOf(Pattern::kKeyGroups);
  options.head_ranks = 4;
  EXPECT_NE(check(options, 8, 2).find("give 2 at most"), std::string::npos);
  EXPECT_EQ(check(options, 8, 4), "");
  options.group_heads = 2;
  EXPECT_NE(check(options, 8, 4).find("2 of 8 heads; "), std::string::npos);
  EXPECT_EQ(check(options, 16, 4), "");
  EXPECT_NE(check(options, 12, 4).find("attention.group_heads is 2; the model has 3 query heads"),
            std::string::npos);
  options.group_heads = 0;
  EXPECT_EQ(patterns::HeadsTogether(options, 16, 4), 2);
  EXPECT_EQ(patterns::HeadsTogether(options, 24, 8), 1);
  EXPECT_EQ(check(options, 24, 8), "") << "one head each";
  EXPECT_NE(check(options, 8, 4).find("2 of 8 heads; "), std::string::npos);
  EXPECT_NE(check(options, 8, 4).find("give fewer, or attention.group_heads: 1"),
            std::string::npos);

  comm::testing::RunRanks(2, [&](comm::Communicator& all) {
    const auto ring = all.Split({all.rank()});
    AttentionOptions dense{.tile = 64};
    dense.head_ranks = 4;
    const absl::Status status = CreateCpuRingAttention(dense, ring->get(), &all).status();
    EXPECT_EQ(status.message(), "parallelism.heads: 4, over 2 ranks");
    dense.head_ranks = 2;
    const auto attention = CreateCpuRingAttention(dense, ring->get(), &all);
    ASSERT_TRUE(attention.ok()) << attention.status();
    const Tensor odd = torch::randn({64, 3, kHeadDim});
    EXPECT_THROW((*attention)->Forward(0, odd, odd, odd), c10::Error);
    const Tensor even = torch::randn({64, 2, kHeadDim});
    const AttentionOutput forward = (*attention)->Forward(0, even, even, even);
    forward.record->StartBackward(even, even);
    EXPECT_THROW(forward.record->StartBackward(even, even), c10::Error);
    forward.record->Backward(even, even, even, forward.out, forward.lse, even);
  });
}

// A rank whose peer leaves is told why.
TEST(SharedHeadsEdgesTest, AnAbortReachesAnExchange) {
  comm::testing::RunRanks(2, [](comm::Communicator& all) {
    const auto ring = all.Split({all.rank()});
    AttentionOptions options{.tile = 64};
    options.head_ranks = 2;
    const auto attention = CreateCpuRingAttention(options, ring->get(), &all);
    ASSERT_TRUE(attention.ok()) << attention.status();
    if (all.rank() == 1) return all.Abort("rank 1 ran out of memory");
    const Tensor x = torch::randn({64, 2, kHeadDim});
    try {
      (*attention)->Forward(0, x, x, x);
      ADD_FAILURE() << "nobody answers";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 ran out of memory"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace ringleader::attention
