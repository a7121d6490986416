#include "worker/attention/documents/short_document_attention.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "patterns/pattern.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using patterns::AttentionOptions;
using patterns::Pattern;
using torch::Tensor;

constexpr int kHeads = 2, kKvHeads = 1, kHeadDim = 64;
constexpr int kTile = 64;
constexpr int64_t kTokens = 512, kDenseBelow = 80;

struct Sequence {
  std::vector<int64_t> firsts;
  Tensor q, k, v, d_out;

  int64_t tokens() const { return q.size(0); }
  int64_t End(size_t document) const {
    return document + 1 < firsts.size() ? firsts[document + 1] : tokens();
  }
  bool IsShort(size_t document) const { return End(document) - firsts[document] < kDenseBelow; }
  Sequence Alone(size_t number) const {
    const auto rows = [&](const Tensor& x) { return x.slice(0, firsts[number], End(number)); };
    return {{0}, rows(q), rows(k), rows(v), rows(d_out)};
  }
};

Sequence Draw(std::vector<int64_t> firsts) {
  torch::manual_seed(7);
  return {std::move(firsts), torch::randn({kTokens, kHeads, kHeadDim}),
          torch::randn({kTokens, kKvHeads, kHeadDim}), torch::randn({kTokens, kKvHeads, kHeadDim}),
          torch::randn({kTokens, kHeads, kHeadDim})};
}
// Short and long ones in turn, one of a single token, one that ends within the last tile.
Sequence Mixed() {
  return Draw({0, 40, 110, 260, 261, 490});
}

struct Result {
  Tensor out, dq, dk, dv;
  std::vector<AttentionStats> stats;
};

// Forward and backward of a layer on `ranks` threads, in the sequence's order.
Result RunOnRanks(const Sequence& sequence, const AttentionOptions& options, int64_t padding = 0,
                  bool is_dense = false) {
  const int ranks = options.ring.ranks();
  Result result{torch::zeros_like(sequence.q), torch::zeros_like(sequence.q),
                torch::zeros_like(sequence.k), torch::zeros_like(sequence.v),
                std::vector<AttentionStats>(ranks)};
  comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    auto ring = CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(ring.ok(), std::string(ring.status().message()));
    std::unique_ptr<ContextAttention> attention = *std::move(ring);
    if (options.dense_below > 0) {
      auto dense = CreateCpuRingAttention(DenseOptions(options), &communicator);
      TORCH_CHECK(dense.ok(), std::string(dense.status().message()));
      attention = std::make_unique<ShortDocumentAttention>(options, std::move(attention),
                                                           *std::move(dense), rank);
    }
    attention->SetDense(is_dense);
    TORCH_CHECK(attention->SetDocuments(sequence.tokens(), sequence.firsts, padding).ok());
    const kernels::ShardLayout layout =
        patterns::LayoutOf(options, ranks, rank, sequence.tokens() / ranks);
    std::vector<int64_t> places;
    for (int64_t i = 0; i < layout.local_tokens(); ++i) places.push_back(layout.Position(i));
    const Tensor positions = torch::tensor(places);
    const auto mine = [&](const Tensor& x) { return x.index_select(0, positions); };
    const Tensor q = mine(sequence.q), k = mine(sequence.k), v = mine(sequence.v);
    attention->StartForward(0, k, v);
    const AttentionOutput forward = attention->Forward(0, q, k, v);
    forward.record->StartBackward(k, v);
    const AttentionGradients gradients =
        forward.record->Backward(q, k, v, forward.out, forward.lse, mine(sequence.d_out));
    result.out.index_copy_(0, positions, forward.out);
    result.dq.index_copy_(0, positions, gradients.dq);
    result.dk.index_copy_(0, positions, gradients.dk);
    result.dv.index_copy_(0, positions, gradients.dv);
    result.stats[rank] = attention->TakeStats();
  });
  return result;
}

Result Rows(const Result& all, int64_t begin, int64_t end) {
  const auto rows = [&](const Tensor& x) { return x.slice(0, begin, end); };
  return {rows(all.out), rows(all.dq), rows(all.dk), rows(all.dv), {}};
}

void ExpectNear(const Result& actual, const Result& expected, double bound) {
  for (const auto member : {&Result::out, &Result::dq, &Result::dk, &Result::dv}) {
    EXPECT_TRUE((actual.*member).isfinite().all().item<bool>());
    EXPECT_LE(((actual.*member) - (expected.*member)).abs().max().item<double>(),
              bound * (expected.*member).abs().max().item<double>());
  }
}

uint64_t Tiles(const Result& result) {
  uint64_t tiles = 0;
  for (const AttentionStats& stats : result.stats) tiles += stats.TotalTiles();
  return tiles;
}

using Setting = std::tuple<Pattern, testing::RingSetting>;

class ShortDocumentAttentionTest : public ::testing::TestWithParam<Setting> {
 protected:
  AttentionOptions Options(int64_t dense_below) const {
    const auto& [pattern, setting] = GetParam();
    return {.pattern = pattern,
            .select = patterns::Select::kTopK,
            .budget = {.max_verticals = 64, .max_slashes = 2},
            .dense_below = dense_below,
            .sink_tokens = 0,
            .window = 64,
            .block_size = kTile,
            .topk_blocks = 2,
            .threshold = 0.3,
            .density = pattern == Pattern::kKeyGroups || pattern == Pattern::kAdaSpa ? 0.2 : 0.0,
            .tile = kTile,
            .layout = setting.layout,
            .stripe = setting.layout == kernels::LayoutKind::kStriped ? kTile : 0,
            .ring = setting.ring};
  }
};

TEST_P(ShortDocumentAttentionTest, ShortOnesSeeWhatTheySeeAloneAndLongOnesWhatIsChosen) {
  const Sequence sequence = Mixed();
  const Result together = RunOnRanks(sequence, Options(kDenseBelow));
  const Result sparse = RunOnRanks(sequence, Options(0));
  EXPECT_GT(Tiles(together), Tiles(sparse));
  for (size_t i = 0; i < sequence.firsts.size(); ++i) {
    SCOPED_TRACE(i);
    const Result rows = Rows(together, sequence.firsts[i], sequence.End(i));
    if (!sequence.IsShort(i)) {
      ExpectNear(rows, Rows(sparse, sequence.firsts[i], sequence.End(i)), 1e-6);
      continue;
    }
    ExpectNear(rows, RunOnRanks(sequence.Alone(i), {.tile = kTile}), 1e-5);
  }
}

// Bit for bit: of a token that is changed no short document learns but its own.
TEST_P(ShortDocumentAttentionTest, NothingLeaksIntoShortDocuments) {
  const Sequence sequence = Mixed();
  const Result before = RunOnRanks(sequence, Options(kDenseBelow));
  for (const size_t document : {1, 2, 3}) {  // short, long, of one token
    Sequence changed = Mixed();
    for (Tensor* const x : {&changed.q, &changed.k, &changed.v, &changed.d_out}) {
      (*x)[(sequence.firsts[document] + sequence.End(document)) / 2] += 3;
    }
    const Result after = RunOnRanks(changed, Options(kDenseBelow));
    EXPECT_FALSE(torch::equal(before.out, after.out));
    for (size_t i = 0; i < sequence.firsts.size(); ++i) {
      if (i == document || !sequence.IsShort(i)) continue;
      ExpectNear(Rows(after, sequence.firsts[i], sequence.End(i)),
                 Rows(before, sequence.firsts[i], sequence.End(i)), 0);
    }
  }
}

// Where all is dense, as in evaluations, no long document learns of it either.
TEST_P(ShortDocumentAttentionTest, NothingLeaksIntoAnyDocumentWhereAllIsDense) {
  for (const int64_t dense_below : {int64_t{0}, kDenseBelow}) {
    const auto run = [&](const Sequence& sequence) {
      return RunOnRanks(sequence, Options(dense_below), /*padding=*/0, /*is_dense=*/true);
    };
    const Sequence sequence = Mixed();
    const Result before = run(sequence);
    for (const size_t document : {1, 2, 3}) {
      Sequence changed = Mixed();
      const int64_t first = sequence.firsts[document], end = sequence.End(document),
                    token = (first + end) / 2;
      for (Tensor* const x : {&changed.q, &changed.k, &changed.v, &changed.d_out}) {
        (*x)[token] += 3;
      }
      const Result after = run(changed);
      const Tensor differs = (before.out != after.out).flatten(1).any(1);
      EXPECT_TRUE(differs.slice(0, token, end).all().item<bool>()) << "it is dense";
      for (size_t i = 0; i < sequence.firsts.size(); ++i) {
        if (i == document) continue;
        ExpectNear(Rows(after, sequence.firsts[i], sequence.End(i)),
                   Rows(before, sequence.firsts[i], sequence.End(i)), 0);
      }
    }
  }
}

// Where all are of one kind, one of the two computes.
TEST_P(ShortDocumentAttentionTest, DocumentsOfOneKindAreComputedOnce) {
  const Sequence long_ones = Draw({0, 250});
  const Result sparse = RunOnRanks(long_ones, Options(0));
  const Result still_sparse = RunOnRanks(long_ones, Options(kDenseBelow));
  ExpectNear(still_sparse, sparse, 0);
  EXPECT_EQ(Tiles(still_sparse), Tiles(sparse));

  std::vector<int64_t> firsts;
  for (int64_t first = 0; first < kTokens; first += kTile) firsts.push_back(first);
  const Sequence short_ones = Draw(firsts);
  AttentionOptions dense = Options(0);
  dense.pattern = Pattern::kDense;
  const Result all_dense = RunOnRanks(short_ones, dense);
  const Result short_dense = RunOnRanks(short_ones, Options(kDenseBelow));
  ExpectNear(short_dense, all_dense, 0);
  EXPECT_EQ(Tiles(short_dense), Tiles(all_dense));
  for (const Result* const result : {&still_sparse, &short_dense}) {
    for (size_t rank = 0; rank < result->stats.size(); ++rank) {
      const LayerStats& layer = result->stats[rank].layers.at(0);
      EXPECT_EQ(layer.calls, 1);
      EXPECT_EQ(layer.causal_tiles, sparse.stats[rank].layers.at(0).causal_tiles);
    }
  }
  // What fills a micro-batch up is no long document.
  const Sequence filled = Draw({0, 40, 100});
  EXPECT_EQ(Tiles(RunOnRanks(filled, Options(kDenseBelow), /*padding=*/412)),
            Tiles(RunOnRanks(Draw([] {
                               std::vector<int64_t> cut = {0, 40, 100};
                               for (int64_t at = 128; at < kTokens; at += kTile) cut.push_back(at);
                               return cut;
                             }()),
                             dense)));
}

// The default pattern on every ring, each other on two, each ring under at least three.
std::vector<Setting> Settings() {
  const testing::RingSetting one = {kernels::LayoutKind::kContiguous,
                                    {ring::RingKind::kFlat, 1, 1}},
                             two = {kernels::LayoutKind::kStriped, {ring::RingKind::kFlat, 2, 1}},
                             gathered = {kernels::LayoutKind::kZigzag,
                                         {ring::RingKind::kAllGather, 2, 1}},
                             four = {kernels::LayoutKind::kStriped,
                                     {ring::RingKind::kHierarchical, 2, 2}};
  return {{Pattern::kVerticalSlash, one},
          {Pattern::kVerticalSlash, two},
          {Pattern::kVerticalSlash, gathered},
          {Pattern::kVerticalSlash, four},
          {Pattern::kSlidingWindow, gathered},
          {Pattern::kSlidingWindow, four},
          {Pattern::kBlockTopK, one},
          {Pattern::kBlockTopK, two},
          {Pattern::kMoba, two},
          {Pattern::kMoba, gathered},
          {Pattern::kXAttention, one},
          {Pattern::kXAttention, four},
          {Pattern::kKeyGroups, two},
          {Pattern::kKeyGroups, four},
          {Pattern::kAdaSpa, gathered},
          {Pattern::kAdaSpa, one}};
}

INSTANTIATE_TEST_SUITE_P(Patterns, ShortDocumentAttentionTest, ::testing::ValuesIn(Settings()),
                         [](const auto& info) {
                           return std::string(
                                      patterns::DefinitionOf(std::get<0>(info.param)).name) +
                                  "_" + testing::NameOf(std::get<1>(info.param));
                         });

// A micro-batch has the causal tiles of its layers, whichever of the two computed them.
TEST(ShortDocumentAttentionStatsTest, MicroBatchesCountEachLayerOnce) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    const AttentionOptions options = {.pattern = Pattern::kSlidingWindow,
                                      .dense_layers = {1},
                                      .dense_below = kDenseBelow,
                                      .window = 64,
                                      .tile = kTile};
    ShortDocumentAttention attention(options, *CreateCpuRingAttention(options, &communicator),
                                     *CreateCpuRingAttention(DenseOptions(options), &communicator),
                                     0);
    std::vector<int64_t> short_ones;
    for (int64_t first = 0; first < kTokens; first += kTile) short_ones.push_back(first);
    for (const Sequence& sequence : {Draw(short_ones), Mixed(), Draw({0, 250})}) {
      ASSERT_TRUE(attention.SetDocuments(kTokens, sequence.firsts, 0).ok());
      for (const int layer : {0, 1}) attention.Forward(layer, sequence.q, sequence.k, sequence.v);
      attention.MarkMicroBatch();
    }
    const AttentionStats stats = attention.TakeStats();
    constexpr int64_t kTiles = kTokens / kTile;
    ASSERT_EQ(stats.micro_batches.size(), 3u);
    for (const VisitedTiles& batch : stats.micro_batches) {
      EXPECT_EQ(batch.causal, 2 * kHeads * kTiles * (kTiles + 1) / 2);
      EXPECT_LE(batch.visited, batch.causal);
    }
  });
}

TEST(ShortDocumentAttentionErrorTest, DocumentsThatLieByThemselvesAreRefused) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    const AttentionOptions options = {.pattern = Pattern::kSlidingWindow,
                                      .dense_below = kDenseBelow,
                                      .window = 64,
                                      .tile = kTile,
                                      .stripe = kTile};
    ShortDocumentAttention attention(options, *CreateCpuRingAttention(options, &communicator),
                                     *CreateCpuRingAttention(DenseOptions(options), &communicator),
                                     0);
    const std::vector<std::optional<int>> holders = {0};
    const auto layout = ring::DocumentLayout::Create(8, std::vector<int64_t>{0}, holders,
                                                     /*ranks=*/1, /*stripe=*/1);
    EXPECT_EQ(attention.SetLayout(*layout).code(), absl::StatusCode::kFailedPrecondition);
  });
}

}  // namespace
}  // namespace ringleader::attention
