#include "worker/attention/documents/document_attention.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using patterns::AttentionOptions;
using torch::Tensor;
using Holders = std::vector<std::optional<int>>;

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64;
constexpr int kTile = 64;

// A sequence of documents, and where they lie; each holder modulo the ranks there are.
struct Sequence {
  std::vector<int64_t> firsts;
  Holders holders;
  Tensor q, k, v, d_out;

  Sequence(int64_t tokens, std::vector<int64_t> document_firsts, Holders document_holders)
      : firsts(std::move(document_firsts)), holders(std::move(document_holders)) {
    torch::manual_seed(7);
    q = torch::randn({tokens, kHeads, kHeadDim});
    k = torch::randn({tokens, kKvHeads, kHeadDim});
    v = torch::randn({tokens, kKvHeads, kHeadDim});
    d_out = torch::randn({tokens, kHeads, kHeadDim});
  }
  int64_t tokens() const { return q.size(0); }
  int64_t End(size_t document) const {
    return document + 1 < firsts.size() ? firsts[document + 1] : tokens();
  }
  // Document `number` as a sequence.
  Sequence Alone(size_t number) const {
    Sequence alone(1, {0}, {0});
    const auto rows = [&](const Tensor& x) { return x.slice(0, firsts[number], End(number)); };
    alone.q = rows(q);
    alone.k = rows(k);
    alone.v = rows(v);
    alone.d_out = rows(d_out);
    return alone;
  }
};

// Some long, some short, some of a single token; on four ranks each has whole ones and part of
// spread ones, and unequally much of them.
Sequence Mixed() {
  return {
      1024, {0, 1, 64, 200, 201, 230, 900}, {0, std::nullopt, 1, std::nullopt, 2, std::nullopt, 3}};
}

struct Result {
  Tensor out, dq, dk, dv;
  uint64_t bytes = 0;  // sent by all ranks
  std::vector<AttentionStats> stats = {};
};

// Forward and backward of two layers on `ranks` threads; the second layer's, in the sequence's
// order. `by_documents`: false: the engine's stripes.
Result RunOnRanks(const Sequence& sequence, AttentionOptions options, int ranks,
                  bool by_documents = true, bool start_backward = false) {
  Result result{torch::zeros_like(sequence.q), torch::zeros_like(sequence.q),
                torch::zeros_like(sequence.k), torch::zeros_like(sequence.v)};
  result.stats.resize(ranks);
  std::atomic<uint64_t> bytes = 0;
  options.by_documents = by_documents;
  auto communicators = comm::testing::CountedCommunicators(ranks, &bytes);
  comm::testing::RunRanks(std::move(communicators), [&](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    Holders holders(sequence.firsts.size());
    for (size_t i = 0; by_documents && i < holders.size(); ++i) {
      if (sequence.holders[i].has_value()) holders[i] = *sequence.holders[i] % ranks;
    }
    // All spread are the sequence's stripes.
    const auto layout = ring::DocumentLayout::Create(sequence.tokens(), sequence.firsts, holders,
                                                     ranks, ranks == 1 ? 1 : kTile);
    TORCH_CHECK(layout.ok(), std::string(layout.status().message()));
    auto ring = CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(ring.ok(), std::string(ring.status().message()));
    std::unique_ptr<ContextAttention> attention = *std::move(ring);
    const auto alone_communicator = communicator.Split({rank});
    if (by_documents) {
      auto alone = CreateCpuRingAttention(AloneOptions(options), alone_communicator->get());
      TORCH_CHECK(alone.ok(), std::string(alone.status().message()));
      attention = std::make_unique<DocumentAttention>(options, std::move(attention),
                                                      *std::move(alone), rank);
      TORCH_CHECK(attention->SetLayout(*layout).ok());
    } else {
      TORCH_CHECK(attention->SetDocuments(sequence.tokens(), sequence.firsts).ok());
    }
    const Tensor positions = torch::tensor(layout->Positions(rank));
    const auto mine = [&](const Tensor& x) { return x.index_select(0, positions); };
    const Tensor q = mine(sequence.q), k = mine(sequence.k), v = mine(sequence.v);
    for (int layer = 0; layer < 2; ++layer) {
      const AttentionOutput forward = attention->Forward(layer, q, k, v);
      if (start_backward) forward.record->StartBackward(k, v);
      const AttentionGradients gradients =
          forward.record->Backward(q, k, v, forward.out, forward.lse, mine(sequence.d_out));
      if (layer == 0) continue;
      result.out.index_copy_(0, positions, forward.out);
      result.dq.index_copy_(0, positions, gradients.dq);
      result.dk.index_copy_(0, positions, gradients.dk);
      result.dv.index_copy_(0, positions, gradients.dv);
    }
    result.stats[rank] = attention->TakeStats();
  });
  result.bytes = bytes;
  return result;
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

AttentionOptions Dense(const ring::RingShape& ring = {}) {
  return {.tile = kTile, .layout = kernels::LayoutKind::kStriped, .ring = ring};
}

class DocumentAttentionTest : public ::testing::TestWithParam<testing::RingSetting> {};

TEST_P(DocumentAttentionTest, ADocumentSeesWhatItSeesAlone) {
  const Sequence sequence = Mixed();
  const ring::RingShape& ring = GetParam().ring;
  for (const bool start_backward : {false, true}) {
    const Result together = RunOnRanks(sequence, Dense(ring), ring.ranks(), true, start_backward);
    for (size_t i = 0; i < sequence.firsts.size(); ++i) {
      const auto rows = [&](const Tensor& x) {
        return x.slice(0, sequence.firsts[i], sequence.End(i));
      };
      ExpectNear({rows(together.out), rows(together.dq), rows(together.dk), rows(together.dv)},
                 RunOnRanks(sequence.Alone(i), Dense(), 1, /*by_documents=*/false));
    }
  }
}

// Bit for bit: of a changed token no other document learns, forward or backward.
TEST_P(DocumentAttentionTest, NothingLeaksIntoOtherDocuments) {
  const Sequence sequence = Mixed();
  const ring::RingShape& ring = GetParam().ring;
  const Result before = RunOnRanks(sequence, Dense(ring), ring.ranks());
  for (size_t document = 0; document < sequence.firsts.size(); ++document) {
    Sequence changed = Mixed();
    const int64_t first = sequence.firsts[document], end = sequence.End(document);
    for (Tensor* const x : {&changed.q, &changed.k, &changed.v, &changed.d_out}) {
      (*x)[(first + end) / 2] += 3;
    }
    const Result after = RunOnRanks(changed, Dense(ring), ring.ranks());
    const auto changed_outside = [&](const Tensor& a, const Tensor& b) {
      const Tensor differs = (a != b).flatten(1).any(1);
      return differs.sum().item<int64_t>() - differs.slice(0, first, end).sum().item<int64_t>();
    };
    EXPECT_FALSE(torch::equal(before.out, after.out));
    EXPECT_EQ(changed_outside(before.out, after.out), 0);
    EXPECT_EQ(changed_outside(before.dq, after.dq), 0);
    EXPECT_EQ(changed_outside(before.dk, after.dk), 0);
    EXPECT_EQ(changed_outside(before.dv, after.dv), 0);
  }
}

// Every rank's share of what documents visit, and no more than stripes send.
TEST_P(DocumentAttentionTest, KeysOfWholeDocumentsDoNotTravel) {
  const ring::RingShape& ring = GetParam().ring;
  const int ranks = ring.ranks();
  const Sequence mixed = Mixed();
  const Result together = RunOnRanks(mixed, Dense(ring), ranks);
  const Result stripes = RunOnRanks(mixed, Dense(ring), ranks, /*by_documents=*/false);
  ExpectNear(together, stripes);
  if (ranks == 1) {
    EXPECT_EQ(together.bytes, 0u);
  } else {
    EXPECT_LT(together.bytes, stripes.bytes);
    EXPECT_GT(together.bytes, 0u);
  }
  // What fills the ranks by itself sends nothing.
  std::vector<int64_t> firsts;
  Holders holders;
  for (int i = 0; i < 16; ++i) {
    firsts.push_back(i * 64);
    holders.emplace_back(i);
  }
  const Sequence whole(1024, firsts, holders);
  const Result apart = RunOnRanks(whole, Dense(ring), ranks);
  EXPECT_EQ(apart.bytes, 0u);
  ExpectNear(apart, RunOnRanks(whole, Dense(ring), ranks, /*by_documents=*/false));
  // Each document is one tile.
  uint64_t tiles = 0;
  for (const AttentionStats& stats : apart.stats) {
    ASSERT_EQ(stats.layers.size(), 2u);
    EXPECT_EQ(stats.layers[1].calls, 1);
    EXPECT_EQ(stats.layers[1].tiles_per_ring_step.size(), static_cast<size_t>(ranks));
    EXPECT_EQ(stats.layers[1].tiles_per_ring_step[0], 16u / ranks * kHeads);
    tiles += stats.layers[1].causal_tiles;
  }
  EXPECT_EQ(tiles, 16u * 17 / 2 * kHeads);
}

std::vector<testing::RingSetting> StripedSettings() {
  std::vector<testing::RingSetting> settings;
  for (const testing::RingSetting& setting : testing::AllRingSettings()) {
    if (setting.layout == kernels::LayoutKind::kStriped) settings.push_back(setting);
  }
  return settings;
}

INSTANTIATE_TEST_SUITE_P(Settings, DocumentAttentionTest, ::testing::ValuesIn(StripedSettings()),
                         [](const auto& info) { return testing::NameOf(info.param); });

TEST(DocumentAttentionRandomTest, AnyLengthsEqualStripes) {
  std::mt19937 random(3);
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  for (int trial = 0; trial < 12; ++trial) {
    const int ranks = 2 + trial % 3;
    const int64_t share = kTile * (1 + below(6)), tokens = share * ranks;
    std::vector<int64_t> firsts = {0};
    for (int64_t next = 1 + below(share); next < tokens; next += 1 + below(share)) {
      firsts.push_back(next);
    }
    Holders holders;
    std::vector<int64_t> room(ranks, share - 1);
    for (size_t i = 0; i < firsts.size(); ++i) {
      const int64_t length = (i + 1 < firsts.size() ? firsts[i + 1] : tokens) - firsts[i];
      const auto rank = static_cast<int>(below(ranks));
      const bool is_whole = below(4) > 0 && room[rank] >= length;
      if (is_whole) room[rank] -= length;
      holders.push_back(is_whole ? std::optional<int>(rank) : std::nullopt);
    }
    const Sequence sequence(tokens, firsts, holders);
    const AttentionOptions options = Dense({ring::RingKind::kFlat, ranks, 1});
    ExpectNear(RunOnRanks(sequence, options, ranks),
               RunOnRanks(sequence, options, ranks, /*by_documents=*/false));
  }
}

TEST(DocumentAttentionErrorTest, WhatIsNotLaidOutIsNamed) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    AttentionOptions options = Dense();
    options.by_documents = true;
    DocumentAttention attention(options, *CreateCpuRingAttention(options, &communicator),
                                *CreateCpuRingAttention(AloneOptions(options), &communicator), 0);
    const Tensor q = torch::randn({8, kHeads, kHeadDim}), k = torch::randn({8, kKvHeads, kHeadDim});
    EXPECT_THROW(attention.Forward(0, q, k, k), c10::Error);
    EXPECT_EQ(attention.SetDocuments(8, std::vector<int64_t>{0, 4}).code(),
              absl::StatusCode::kFailedPrecondition);
    const auto layout = [](int64_t tokens, int ranks) {
      return *ring::DocumentLayout::Create(tokens, std::vector<int64_t>{0}, Holders{0}, ranks, 1);
    };
    EXPECT_TRUE(attention.SetLayout(layout(9, 1)).ok());
    EXPECT_THROW(attention.Forward(0, q, k, k), c10::Error);
    EXPECT_TRUE(attention.SetLayout(layout(8, 1)).ok());
    EXPECT_EQ(attention.Forward(0, q, k, k).out.size(0), 8);
    const auto two = ring::DocumentLayout::Create(8, std::vector<int64_t>{0}, Holders(1), 2, 1);
    EXPECT_EQ(attention.SetLayout(*two).code(), absl::StatusCode::kInvalidArgument);
    // A pattern that cannot lie so is refused by name.
    for (const patterns::Pattern pattern :
         {patterns::Pattern::kSlidingWindow, patterns::Pattern::kVerticalSlash,
          patterns::Pattern::kBlockTopK, patterns::Pattern::kMoba,
          patterns::Pattern::kXAttention}) {
      options.pattern = pattern;
      options.window = 64;
      const auto ring = CreateCpuRingAttention(options, &communicator);
      ASSERT_TRUE(ring.ok()) << ring.status();
      const absl::Status refused = (*ring)->SetLayout(layout(64, 1));
      EXPECT_NE(std::string(refused.message()).find("goes with attention.pattern: dense alone"),
                std::string::npos)
          << refused;
    }
  });
}

}  // namespace
}  // namespace ringleader::attention
