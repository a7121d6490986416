#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/masks/masks.h"
#include "patterns/carried/carried_rows.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/testing/changing_budgets.h"
#include "worker/attention/testing/differentiable_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/attention/testing/shard_rows.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using torch::Tensor;

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64;

// One sequence, and what its attention and gradients are.
struct Sequence {
  Tensor q, k, v, d_out;

  explicit Sequence(int64_t tokens) {
    torch::manual_seed(7);
    q = torch::randn({tokens, kHeads, kHeadDim});
    k = torch::randn({tokens, kKvHeads, kHeadDim});
    v = torch::randn({tokens, kKvHeads, kHeadDim});
    d_out = torch::randn({tokens, kHeads, kHeadDim});
  }
};

struct Result {
  Tensor out, dq, dk, dv;
  uint64_t bytes = 0;         // that ranks sent each other
  RingBytes ring_bytes = {};  // that they say they did in rings
};

// Runs the sequence over `ranks` threads and puts the shards together again.
Result RunOnRanks(const Sequence& sequence, patterns::AttentionOptions options, int ranks,
                  const std::vector<int64_t>& documents = {},
                  const std::vector<kernels::KeyIntervals>& visible = {}) {
  Result result{torch::zeros_like(sequence.q), torch::zeros_like(sequence.q),
                torch::zeros_like(sequence.k), torch::zeros_like(sequence.v)};
  std::atomic<uint64_t> bytes = 0, sent = 0, whole = 0;
  auto communicators = comm::testing::CountedCommunicators(ranks, &bytes);
  comm::testing::RunRanks(std::move(communicators), [&](comm::Communicator& communicator) {
    auto attention = CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    TORCH_CHECK((*attention)->SetDocuments(sequence.q.size(0), documents).ok());
    if (!visible.empty()) TORCH_CHECK((*attention)->SetVisible(visible).ok());
    const Tensor positions = testing::PositionsOf(options, communicator.rank(), sequence.q.size(0));
    const Tensor q = sequence.q.index_select(0, positions).requires_grad_();
    const Tensor k = sequence.k.index_select(0, positions).requires_grad_();
    const Tensor v = sequence.v.index_select(0, positions).requires_grad_();
    const Tensor out = testing::DifferentiableAttention(**attention, 0, q, k, v);
    // Backward is of what forward saw, whatever comes next.
    TORCH_CHECK((*attention)->SetDocuments(sequence.q.size(0), {}).ok());
    out.backward(sequence.d_out.index_select(0, positions));
    result.out.index_copy_(0, positions, out.detach());
    result.dq.index_copy_(0, positions, q.grad());
    result.dk.index_copy_(0, positions, k.grad());
    result.dv.index_copy_(0, positions, v.grad());
    const RingBytes of_rank = (*attention)->TakeStats().ring_bytes;
    sent += of_rank.sent;
    whole += of_rank.whole;
  });
  result.bytes = bytes;
  result.ring_bytes = {.sent = sent, .whole = whole};
  return result;
}

patterns::AttentionOptions FixedBlocks() {
  return {.pattern = patterns::Pattern::kFixedBlocks,
          .local_blocks = 1,
          .sink_blocks = 1,
          .stride_blocks = 5,
          .tile = 64};
}

double RelativeError(const Tensor& actual, const Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

void ExpectNear(const Result& actual, const Result& expected) {
  EXPECT_LT(RelativeError(actual.out, expected.out), 1e-5);
  EXPECT_LT(RelativeError(actual.dq, expected.dq), 1e-5);
  EXPECT_LT(RelativeError(actual.dk, expected.dk), 1e-5);
  EXPECT_LT(RelativeError(actual.dv, expected.dv), 1e-5);
}

// LibTorch's own attention, dense causal, in fp64.
Result Dense(const Sequence& sequence) {
  const auto heads_first = [](const Tensor& x) {
    return x.to(torch::kFloat64).transpose(0, 1).unsqueeze(0).detach();
  };
  const Tensor q = heads_first(sequence.q).requires_grad_();
  const Tensor k = heads_first(sequence.k).requires_grad_();
  const Tensor v = heads_first(sequence.v).requires_grad_();
  const Tensor out =
      at::scaled_dot_product_attention(q, k.repeat_interleave(kHeads / kKvHeads, 1),
                                       v.repeat_interleave(kHeads / kKvHeads, 1), {}, 0.0, true);
  out.backward(heads_first(sequence.d_out));
  const auto back = [](const Tensor& x) {
    return x.detach().squeeze(0).transpose(0, 1).to(torch::kFloat32);
  };
  return {back(out), back(q.grad()), back(k.grad()), back(v.grad())};
}

TEST(RingAttentionTest, DenseOnOneRankEqualsLibTorch) {
  const Sequence sequence(777);
  ExpectNear(RunOnRanks(sequence, {}, 1), Dense(sequence));
}

TEST(RingAttentionTest, PackedDocumentsEqualTheDocumentsAlone) {
  const Sequence packed(777);
  const std::vector<int64_t> firsts = {0, 100, 101, 128, 500};
  for (const patterns::AttentionOptions& options :
       {patterns::AttentionOptions{.tile = 64},
        patterns::AttentionOptions{
            .pattern = patterns::Pattern::kSlidingWindow, .window = 90, .tile = 64}}) {
    const Result together = RunOnRanks(packed, options, 1, firsts);
    for (size_t i = 0; i < firsts.size(); ++i) {
      const int64_t first = firsts[i], end = i + 1 < firsts.size() ? firsts[i + 1] : 777;
      const auto rows = [&](const Tensor& x) { return x.slice(0, first, end); };
      Sequence alone(1);
      alone.q = rows(packed.q);
      alone.k = rows(packed.k);
      alone.v = rows(packed.v);
      alone.d_out = rows(packed.d_out);
      ExpectNear({rows(together.out), rows(together.dq), rows(together.dk), rows(together.dv)},
                 RunOnRanks(alone, options, 1));
    }
  }
}

class ManyRanksTest : public ::testing::TestWithParam<testing::RingSetting> {
 protected:
  // The same result on this setting's ranks as on one, which the first setting of a test computes
  // for all: call by call they ask for the same.
  void ExpectSameAsOneRank(patterns::AttentionOptions options,
                           const std::vector<int64_t>& documents = {}) {
    static std::map<std::pair<std::string, int>, Result> on_one_rank;  // by test and call
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    const Sequence sequence(1024);
    const auto [found, is_new] =
        on_one_rank.try_emplace({name.substr(0, name.find('/')), calls_++});
    if (is_new) found->second = RunOnRanks(sequence, options, 1, documents);
    const Result& expected = found->second;
    options.layout = GetParam().layout;
    options.ring = GetParam().ring;
    ExpectNear(RunOnRanks(sequence, options, options.ring.inner * options.ring.outer, documents),
               expected);
  }

 private:
  int calls_ = 0;
};

TEST_P(ManyRanksTest, Dense) {
  ExpectSameAsOneRank({.tile = 64});
}

TEST_P(ManyRanksTest, SlidingWindow) {
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kSlidingWindow, .window = 200, .tile = 64});
}

TEST_P(ManyRanksTest, VerticalSlash) {
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kVerticalSlash,
                       .budget = {.vertical_mass = 0.5, .slash_mass = 0.4},
                       .sink_tokens = 8,
                       .tile = 64});
}

TEST_P(ManyRanksTest, VerticalSlashTopK) {
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kVerticalSlash,
                       .select = patterns::Select::kTopK,
                       .budget = {.max_verticals = 100, .max_slashes = 4},
                       .estimate_queries = 100,
                       .tile = 64});
}

TEST_P(ManyRanksTest, BlockTopK) {
  ExpectSameAsOneRank(
      {.pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2, .tile = 64});
}

TEST_P(ManyRanksTest, XAttention) {
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kXAttention, .threshold = 0.5, .tile = 64});
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kXAttention,
                       .stride = 8,
                       .threshold = 1.0,
                       .density = 0.3,
                       .tile = 64});
}

TEST_P(ManyRanksTest, KeyGroups) {
  for (const double density : {0.1, 0.4}) {
    for (const auto& [queries, heads] : {std::pair(64, 1), {16, 1}, {64, 2}, {16, 2}}) {
      ExpectSameAsOneRank({.pattern = patterns::Pattern::kKeyGroups,
                           .density = density,
                           .group_queries = queries,
                           .group_heads = heads,
                           .tile = 64});
    }
  }
}

TEST_P(ManyRanksTest, AdaSpa) {
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kAdaSpa, .density = 0.3, .tile = 64});
  ExpectSameAsOneRank(
      {.pattern = patterns::Pattern::kAdaSpa, .adapt_heads = true, .density = 0.3, .tile = 64});
}

TEST_P(ManyRanksTest, Moba) {
  ExpectSameAsOneRank(
      {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 2, .tile = 64});
}

// Backward whose ring was started ahead of it (StartBackward), of two layers in turn, as a model
// calls.
TEST_P(ManyRanksTest, ABackwardThatWasStartedIsTheSame) {
  const Sequence sequence(1024);
  patterns::AttentionOptions options{.tile = 64};
  options.layout = GetParam().layout;
  options.ring = GetParam().ring;
  const int ranks = options.ring.inner * options.ring.outer;
  comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
    auto attention = CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    const Tensor positions = testing::PositionsOf(options, communicator.rank(), sequence.q.size(0));
    const Tensor q = sequence.q.index_select(0, positions);
    const Tensor k = sequence.k.index_select(0, positions);
    const Tensor v = sequence.v.index_select(0, positions);
    const Tensor d_out = sequence.d_out.index_select(0, positions);
    for (int layer = 0; layer < 2; ++layer) {
      const AttentionOutput forward = (*attention)->Forward(layer, q, k, v);
      const auto backward = [&] {
        return forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
      };
      const AttentionGradients expected = backward();
      forward.record->StartBackward(k, v);
      EXPECT_THROW((*attention)->Forward(layer, q, k, v), c10::Error);
      EXPECT_THROW(forward.record->StartBackward(k, v), c10::Error);
      const AttentionGradients started = backward();
      EXPECT_TRUE(torch::equal(started.dq, expected.dq));
      EXPECT_TRUE(torch::equal(started.dk, expected.dk));
      EXPECT_TRUE(torch::equal(started.dv, expected.dv));
    }
  });
}

TEST_P(ManyRanksTest, Documents) {
  const std::vector<int64_t> documents = {0, 1, 64, 200, 201, 230, 900};
  ExpectSameAsOneRank({.tile = 64}, documents);
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kSlidingWindow, .window = 200, .tile = 64},
                      documents);
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kVerticalSlash,
                       .budget = {.vertical_mass = 0.5, .slash_mass = 0.4},
                       .sink_tokens = 8,
                       .tile = 64},
                      documents);
  ExpectSameAsOneRank(
      {.pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2, .tile = 64},
      documents);
  ExpectSameAsOneRank({.pattern = patterns::Pattern::kXAttention, .threshold = 0.5, .tile = 64},
                      documents);
  ExpectSameAsOneRank(
      {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 2, .tile = 64},
      documents);
  for (const auto& [queries, heads] : {std::pair(64, 1), {16, 1}, {64, 2}, {16, 2}}) {
    ExpectSameAsOneRank({.pattern = patterns::Pattern::kKeyGroups,
                         .density = 0.4,
                         .group_queries = queries,
                         .group_heads = heads,
                         .tile = 64},
                        documents);
  }
  ExpectSameAsOneRank(
      {.pattern = patterns::Pattern::kAdaSpa, .adapt_heads = true, .density = 0.4, .tile = 64},
      documents);
  ExpectSameAsOneRank(FixedBlocks(), documents);
}

TEST_P(ManyRanksTest, FixedBlocks) {
  ExpectSameAsOneRank(FixedBlocks());
}

TEST_P(ManyRanksTest, MasksUnderChosenBlocks) {
  for (const patterns::Mask mask : {patterns::Mask::kFull, patterns::Mask::kBlockCausal}) {
    for (patterns::AttentionOptions options :
         {patterns::AttentionOptions{
              .pattern = patterns::Pattern::kBlockTopK, .block_size = 128, .topk_blocks = 2},
          {.pattern = patterns::Pattern::kXAttention, .threshold = 0.5},
          {.pattern = patterns::Pattern::kAdaSpa, .adapt_heads = true, .density = 0.3},
          FixedBlocks()}) {
      options.tile = 64;
      options.mask = mask;
      options.mask_block = 300;
      ExpectSameAsOneRank(options);
      ExpectSameAsOneRank(options, {0, 1, 64, 200, 201, 230, 900});
    }
  }
}

// What the planner counts of the same rings, forward and backward.
uint64_t CountedBytes(patterns::AttentionOptions options, int64_t tokens,
                      const std::vector<int64_t>& firsts) {
  if (options.stripe == 0) options.stripe = options.tile;
  int64_t rows = 0;
  for (const bool is_backward : {false, true}) {
    const ring::HopCounts counts = patterns::CountCarriedRows(
        options, options.ring, is_backward, {.tokens = tokens, .firsts = firsts},
        *patterns::KnownKeysOf(options, false), /*most_packed=*/1.0);
    for (const auto* hops : {&counts.keys, &counts.gradients}) {
      for (const std::vector<int64_t>& hop : *hops) {
        for (const int64_t of_rank : hop) rows += of_rank;
      }
    }
  }
  return static_cast<uint64_t>(rows * 2 * kKvHeads * kHeadDim * 4);
}

// Where positions alone say what a rank attends to, a ring carries no more than that, and what is
// reported is what the transport carried.
TEST_P(ManyRanksTest, RingsCarryWhatIsAttendedTo) {
  const Sequence sequence(1024);
  const std::vector<int64_t> documents = {0, 250, 500, 700, 1000};
  patterns::AttentionOptions options{.tile = 64};
  options.layout = GetParam().layout;
  options.ring = GetParam().ring;
  const int ranks = options.ring.ranks();
  const bool gathers = options.ring.kind == ring::RingKind::kAllGather;
  const bool is_contiguous = options.layout == kernels::LayoutKind::kContiguous;
  const auto run = [&](const patterns::AttentionOptions& of, const std::vector<int64_t>& firsts) {
    const Result result = RunOnRanks(sequence, of, ranks, firsts);
    EXPECT_EQ(result.bytes, result.ring_bytes.sent) << "nothing else travels";
    if (patterns::CarriesRows(of.ring)) {
      EXPECT_EQ(result.ring_bytes.sent, CountedBytes(of, 1024, firsts)) << "as plans have it";
    }
    return result.ring_bytes;
  };
  const RingBytes causal = run(options, {}), apart = run(options, documents);
  options.pattern = patterns::Pattern::kSlidingWindow;
  options.window = 100;
  const RingBytes window = run(options, {});
  options = FixedBlocks();
  options.layout = GetParam().layout;
  options.ring = GetParam().ring;
  const RingBytes fixed = run(options, {}), fixed_apart = run(options, documents);
  EXPECT_EQ(causal.whole > 0, ranks > 1);
  EXPECT_EQ(apart.whole, causal.whole);
  EXPECT_EQ(window.whole, causal.whole);
  if (ranks == 1 || gathers) {
    EXPECT_EQ(window.sent, window.whole);
    return;
  }
  EXPECT_LE(apart.sent, causal.sent);
  EXPECT_LE(window.sent, causal.sent);
  EXPECT_LE(fixed.sent, causal.sent);
  EXPECT_LE(fixed_apart.sent, apart.sent);
  options.pattern = patterns::Pattern::kDense;
  options.mask = patterns::Mask::kFull;
  EXPECT_EQ(run(options, {}).sent, causal.whole);
  const RingBytes full = run(options, documents);
  EXPECT_GE(full.sent, apart.sent);
  options.mask = patterns::Mask::kBlockCausal;
  options.mask_block = 300;
  const RingBytes blocks = run(options, documents);
  EXPECT_GE(full.sent, blocks.sent);
  EXPECT_GE(blocks.sent, apart.sent);
  if (!is_contiguous) return;
  EXPECT_LT(full.sent, full.whole) << "documents are apart";
  EXPECT_GT(full.sent, apart.sent) << "keys ahead travel, too";
  EXPECT_LT(causal.sent, causal.whole) << "nobody asks for what comes after it";
  EXPECT_LT(apart.sent, causal.sent);
  EXPECT_LT(fixed.sent, causal.sent) << "a part of what lies before";
  if (options.ring.kind != ring::RingKind::kFlat) return;
  // Two tiles of each owner but the last, one hop in forward, one in backward, whose gradients come
  // home all around the ring.
  const int64_t hops = 2 * (ranks - 1) + (ranks - 1) * (ranks - 1);
  EXPECT_EQ(window.sent, static_cast<uint64_t>(hops * 2 * 64 * 2 * kKvHeads * kHeadDim * 4));
}

// What queries see, listed one by one, travels as what a rule says does.
TEST_P(ManyRanksTest, RingsCarryWhatListsShow) {
  const Sequence sequence(1024);
  const std::vector<int32_t> firsts = {0, 250, 500, 700, 1000};
  patterns::AttentionOptions options{.tile = 64};
  options.layout = GetParam().layout;
  options.ring = GetParam().ring;
  const int ranks = options.ring.ranks();
  const Result by_rule = RunOnRanks(sequence, options, ranks, {firsts.begin(), firsts.end()});
  options.mask = patterns::Mask::kFull;
  const auto run = [&](const kernels::Mask& mask) {
    const auto listed = kernels::IntervalsOf(mask, 1024, firsts);
    TORCH_CHECK(listed.ok());
    const Result result = RunOnRanks(sequence, options, ranks, {}, *listed);
    EXPECT_EQ(result.bytes, result.ring_bytes.sent) << "nothing else travels";
    EXPECT_EQ(result.ring_bytes.whole, by_rule.ring_bytes.whole);
    return result;
  };
  const Result listed = run({.kind = kernels::MaskKind::kCausalDocuments});
  ExpectNear(listed, by_rule);
  EXPECT_EQ(listed.ring_bytes.sent, by_rule.ring_bytes.sent);
  // The question travels, too; and to all who see the last document's, all before it.
  const uint64_t question = run({.kind = kernels::MaskKind::kSharedQuestion}).ring_bytes.sent,
                 blockwise = run({.kind = kernels::MaskKind::kCausalBlockwise}).ring_bytes.sent;
  EXPECT_GE(question, listed.ring_bytes.sent);
  EXPECT_GE(blockwise, listed.ring_bytes.sent);
  if (ranks == 1 || !patterns::CarriesRows(options.ring)) return;
  if (options.layout != kernels::LayoutKind::kContiguous) return;
  EXPECT_GT(question, listed.ring_bytes.sent);
  EXPECT_LT(question, by_rule.ring_bytes.whole);
  EXPECT_GT(blockwise, listed.ring_bytes.sent);
  EXPECT_LT(blockwise, by_rule.ring_bytes.whole);
}

INSTANTIATE_TEST_SUITE_P(Settings, ManyRanksTest, ::testing::ValuesIn(testing::AllRingSettings()),
                         [](const auto& info) { return testing::NameOf(info.param); });

struct CpuEngine {
  static void SetUp() {}
  template <typename Body>
  static void RunRanks(int ranks, const Body& body) {
    comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
      body(communicator.rank(), [&](const patterns::AttentionOptions& options) {
        return CreateCpuRingAttention(options, &communicator);
      });
    });
  }
  static Tensor ToDevice(const Tensor& x) { return x; }
};

}  // namespace

namespace testing {
INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, ChangingBudgetsTest, CpuEngine);
}  // namespace testing
}  // namespace ringleader::attention
