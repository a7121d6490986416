#include "worker/attention/documents/chosen_document_attention.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "patterns/pattern.h"
#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/attention/documents/document_attention.h"
#include "worker/attention/documents/short_document_attention.h"
#include "worker/attention/testing/ring_settings.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

using patterns::AttentionOptions;
using patterns::Pattern;
using torch::Tensor;
using Holders = std::vector<std::optional<int>>;

constexpr int kHeads = 2, kKvHeads = 1, kHeadDim = 64, kTile = 64;

// Documents of one token to 11 tiles, and where they lie; each holder modulo the ranks there are.
struct Sequence {
  std::vector<int64_t> firsts = {0, 700, 701, 730, 930, 1290, 1354, 1480};
  Holders holders = {std::nullopt, 0, 1, 2, std::nullopt, 3, std::nullopt, 1};
  Tensor q, k, v, d_out;

  explicit Sequence(int64_t tokens = 1670) {
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
  int64_t Length(size_t document) const { return End(document) - firsts[document]; }
  Sequence Alone(size_t number) const {
    Sequence alone = *this;
    alone.firsts = {0};
    for (Tensor* const x : {&alone.q, &alone.k, &alone.v, &alone.d_out}) {
      *x = x->slice(0, firsts[number], End(number));
    }
    return alone;
  }
};

struct Result {
  Tensor out, dq, dk, dv;
  std::vector<AttentionStats> stats = {};
};

std::unique_ptr<ContextAttention> Make(const AttentionOptions& options,
                                       comm::Communicator* communicator) {
  auto attention = CreateCpuRingAttention(options, communicator);
  TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
  return *std::move(attention);
}

// The document by itself. XAttention's groups that the end of a sequence cuts short have no say, so
// that a sequence is one of whole tiles for it.
Result OfOneDocument(Sequence sequence, AttentionOptions options, int64_t step) {
  Result result;
  options.ring = {};
  const int64_t tokens = sequence.tokens();
  const int64_t filler =
      options.pattern == Pattern::kXAttention ? (kTile - tokens % kTile) % kTile : 0;
  for (Tensor* const x : {&sequence.q, &sequence.k, &sequence.v, &sequence.d_out}) {
    *x = torch::constant_pad_nd(*x, {0, 0, 0, 0, 0, filler});
  }
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    const auto attention = Make(AloneOptions(options), &communicator);
    attention->SetStep(step);
    if (filler > 0) {
      const std::vector<int64_t> firsts = {0, tokens};
      TORCH_CHECK(attention->SetDocuments(tokens + filler, firsts, filler).ok());
    }
    const AttentionOutput forward = attention->Forward(0, sequence.q, sequence.k, sequence.v);
    const AttentionGradients gradients = forward.record->Backward(
        sequence.q, sequence.k, sequence.v, forward.out, forward.lse, sequence.d_out);
    const auto rows = [&](const Tensor& x) { return x.narrow(0, 0, tokens); };
    result = {rows(forward.out),
              rows(gradients.dq),
              rows(gradients.dk),
              rows(gradients.dv),
              {attention->TakeStats()}};
  });
  return result;
}

// Two layers' forward and then both's backward on `ranks` threads, in the sequence's order; of the
// second.
Result RunOnRanks(const Sequence& sequence, AttentionOptions options, int64_t step = 0,
                  bool is_dense = false) {
  options.by_documents = true;
  const int ranks = options.ring.ranks();
  Result result{torch::zeros_like(sequence.q), torch::zeros_like(sequence.q),
                torch::zeros_like(sequence.k), torch::zeros_like(sequence.v),
                std::vector<AttentionStats>(ranks)};
  Holders holders = sequence.holders;
  for (auto& holder : holders) {
    if (holder.has_value()) holder = *holder % ranks;
  }
  const auto layout =
      ring::DocumentLayout::CreateApart(sequence.tokens(), sequence.firsts, holders, ranks, kTile);
  TORCH_CHECK(layout.ok(), std::string(layout.status().message()));
  comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    const auto alone = communicator.Split({rank});
    const AttentionOptions by_itself = AloneOptions(options);
    ChosenDocumentAttention attention(options, Make(options, &communicator),
                                      Make(by_itself, alone->get()),
                                      Make(DenseOptions(by_itself), alone->get()), rank);
    TORCH_CHECK(attention.SetLayout(*layout).ok());
    attention.SetStep(step);
    attention.SetDense(is_dense);
    const std::vector<int64_t> places = layout->Positions(rank);
    const int64_t filler = std::ranges::count_if(
        places, [&](int64_t position) { return position >= sequence.tokens(); });
    const int64_t held = layout->local_tokens() - filler;
    const Tensor positions = torch::tensor(places).narrow(0, 0, held);
    // What is filled up is noise, of which nothing is learnt.
    const auto mine = [&](const Tensor& x, bool is_gradient = false) {
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes[0] = filler;
      return torch::cat(
          {x.index_select(0, positions), is_gradient ? torch::zeros(sizes) : torch::randn(sizes)});
    };
    const Tensor q = mine(sequence.q), k = mine(sequence.k), v = mine(sequence.v);
    const AttentionOutput first = attention.Forward(0, q, k, v);
    const AttentionOutput forward = attention.Forward(1, q, k, v);
    forward.record->StartBackward(k, v);
    const Tensor d_out = mine(sequence.d_out, /*is_gradient=*/true);
    const AttentionGradients gradients =
        forward.record->Backward(q, k, v, forward.out, forward.lse, d_out);
    const AttentionGradients of_first =
        first.record->Backward(q, k, v, first.out, first.lse, d_out);
    const bool are_alike = options.dense_layers.empty();
    TORCH_CHECK(!are_alike || torch::equal(of_first.dk, gradients.dk));
    result.out.index_copy_(0, positions, forward.out.narrow(0, 0, held));
    result.dq.index_copy_(0, positions, gradients.dq.narrow(0, 0, held));
    result.dk.index_copy_(0, positions, gradients.dk.narrow(0, 0, held));
    result.dv.index_copy_(0, positions, gradients.dv.narrow(0, 0, held));
    result.stats[rank] = attention.TakeStats();
  });
  return result;
}

void ExpectNear(const Result& actual, const Result& expected, double bound) {
  for (const auto member : {&Result::out, &Result::dq, &Result::dk, &Result::dv}) {
    EXPECT_TRUE((actual.*member).isfinite().all().item<bool>());
    EXPECT_LE(((actual.*member) - (expected.*member)).abs().max().item<double>(),
              bound * (expected.*member).abs().max().item<double>());
  }
}

Result Rows(const Result& all, int64_t begin, int64_t end) {
  const auto rows = [&](const Tensor& x) { return x.slice(0, begin, end); };
  return {rows(all.out), rows(all.dq), rows(all.dk), rows(all.dv)};
}

struct Setting {
  std::string name;
  Pattern pattern;
  ring::RingShape ring;
  double density = 0;
};

class ChosenDocumentAttentionTest : public ::testing::TestWithParam<Setting> {
 protected:
  static AttentionOptions Options(int64_t dense_below = 0) {
    const Setting& setting = GetParam();
    return {.pattern = setting.pattern,
            .select = patterns::Select::kTopK,
            .budget = {.max_verticals = 24, .max_slashes = 3, .density = setting.density},
            .dense_below = dense_below,
            .estimate_queries = 16,
            .sink_tokens = 8,
            .window = 90,
            .block_size = kTile,
            .topk_blocks = 2,
            .threshold = 0.3,
            .density = setting.density,
            .sequence_length = 2048,
            .tile = kTile,
            .layout = kernels::LayoutKind::kStriped,
            .ring = setting.ring};
  }
};

TEST_P(ChosenDocumentAttentionTest, ADocumentSeesWhatItSeesAlone) {
  const Sequence sequence;
  for (const int64_t dense_below : {0, 150}) {
    const Result together = RunOnRanks(sequence, Options(dense_below));
    for (size_t i = 0; i < sequence.firsts.size(); ++i) {
      SCOPED_TRACE(i);
      AttentionOptions alone = Options();
      if (sequence.Length(i) < dense_below) alone = DenseOptions(alone);
      ExpectNear(Rows(together, sequence.firsts[i], sequence.End(i)),
                 OfOneDocument(sequence.Alone(i), alone, /*step=*/0), 1e-5);
    }
  }
}

// Whether each token's rows differ.
Tensor Differ(const Tensor& a, const Tensor& b) {
  return (a != b).flatten(1).any(1);
}

// Bit for bit: of a changed token no other document learns, forward or backward. Calls
// of_document(which tokens' outputs differ, the document's first one, the changed one, its end).
template <typename OfDocument>
void ExpectNoLeaks(const AttentionOptions& options, bool is_dense, const OfDocument& of_document) {
  const Sequence sequence;
  const Result before = RunOnRanks(sequence, options, /*step=*/0, is_dense);
  for (const size_t document : {0, 3, 4, 6}) {
    SCOPED_TRACE(::testing::Message() << "document " << document);
    Sequence changed;
    const int64_t first = sequence.firsts[document], end = sequence.End(document),
                  token = (first + end) / 2;
    for (Tensor* const x : {&changed.q, &changed.k, &changed.v, &changed.d_out}) (*x)[token] += 3;
    const Result after = RunOnRanks(changed, options, /*step=*/0, is_dense);
    const Tensor differs = Differ(before.out, after.out);
    EXPECT_TRUE(differs[token].item<bool>());
    of_document(differs, first, token, end);
    for (const auto member : {&Result::out, &Result::dq, &Result::dk, &Result::dv}) {
      const Tensor rows = Differ(before.*member, after.*member);
      EXPECT_EQ(rows.sum().item<int64_t>(), rows.slice(0, first, end).sum().item<int64_t>());
    }
  }
}

TEST_P(ChosenDocumentAttentionTest, NothingLeaksIntoOtherDocuments) {
  ExpectNoLeaks(Options(), /*is_dense=*/false, [](const Tensor&, int64_t, int64_t, int64_t) {});
}

// All layers in an evaluation, or one of a model's: every later token of the document learns of the
// change, and nobody else.
TEST_P(ChosenDocumentAttentionTest, NothingLeaksWhereAttentionIsDense) {
  AttentionOptions one_layer = Options();
  one_layer.dense_layers = {1};  // that of the results
  for (const auto& [options, is_dense] : {std::pair{Options(), true}, {one_layer, false}}) {
    SCOPED_TRACE(is_dense ? "all layers" : "one layer");
    ExpectNoLeaks(options, is_dense,
                  [](const Tensor& differs, int64_t first, int64_t token, int64_t end) {
                    EXPECT_FALSE(differs.slice(0, first, token).any().item<bool>());
                    EXPECT_TRUE(differs.slice(0, token, end).all().item<bool>());
                  });
  }
}

// Where the choice is causal, nor do earlier tokens of the document.
TEST(CausalChoiceOfDocumentsTest, NothingLeaksIntoEarlierTokensAndOtherDocuments) {
  for (const Pattern pattern : {Pattern::kMoba, Pattern::kBlockTopK}) {
    for (const ring::RingShape ring :
         {ring::RingShape{}, {ring::RingKind::kFlat, 2, 1}, {ring::RingKind::kAllGather, 3, 1}}) {
      SCOPED_TRACE(::testing::Message()
                   << patterns::DefinitionOf(pattern).name << " on " << ring.ranks() << " ranks");
      ExpectNoLeaks({.pattern = pattern,
                     .selection = patterns::Selection::kCausal,
                     .block_size = kTile,
                     .topk_blocks = 2,
                     .tile = kTile,
                     .layout = kernels::LayoutKind::kStriped,
                     .ring = ring},
                    /*is_dense=*/false,
                    [](const Tensor& differs, int64_t first, int64_t token, int64_t) {
                      EXPECT_FALSE(differs.slice(0, first, token).any().item<bool>());
                    });
    }
  }
}

// Tiles and shares are those of the documents alone, summed and averaged; what fills them up costs
// no more than its own tiles.
TEST_P(ChosenDocumentAttentionTest, WhatIsVisitedIsCounted) {
  const Sequence sequence;
  AttentionOptions options = Options();
  options.probe_every = 1;
  uint64_t alone = 0;
  bool estimates = false;
  for (size_t i = 0; i < sequence.firsts.size(); ++i) {
    const Result one = OfOneDocument(sequence.Alone(i), options, /*step=*/1);
    alone += one.stats[0].layers[0].TotalTiles();
    estimates |= one.stats[0].layers[0].recall >= 0;
  }
  const Result together = RunOnRanks(sequence, options, /*step=*/1);
  uint64_t tiles = 0, causal = 0;
  for (const AttentionStats& stats : together.stats) {
    ASSERT_EQ(stats.layers.size(), 2u);
    const LayerStats& layer = stats.layers[1];
    tiles += layer.TotalTiles();
    causal += layer.causal_tiles;
    EXPECT_EQ(layer.calls, 1);
    EXPECT_EQ(layer.tiles_per_ring_step.size(), together.stats.size());
    EXPECT_EQ(layer.recall >= 0, estimates);
    EXPECT_LE(layer.recall, 1);
    ASSERT_EQ(layer.probed_recall.size(), size_t{kHeads});
    for (const double recall : layer.probed_recall) {
      EXPECT_GT(recall, 0.1);
      EXPECT_LE(recall, 1.001);
    }
  }
  EXPECT_GE(tiles, alone);
  EXPECT_LE(tiles, alone + 60 * together.stats.size() * kHeads);
  EXPECT_NEAR(static_cast<double>(causal), 27 * 28 / 2 * kHeads, 4 * kHeads);
}

std::vector<Setting> Settings() {
  const ring::RingShape one, two = {ring::RingKind::kFlat, 2, 1},
                             three = {ring::RingKind::kAllGather, 3, 1},
                             four = {ring::RingKind::kHierarchical, 2, 2};
  return {{"VerticalSlash1", Pattern::kVerticalSlash, one},
          {"VerticalSlash2", Pattern::kVerticalSlash, two},
          {"VerticalSlashByDensity4", Pattern::kVerticalSlash, four, 0.3},
          {"KeyGroups1", Pattern::kKeyGroups, one, 0.3},
          {"KeyGroups3", Pattern::kKeyGroups, three, 0.3},
          {"KeyGroups4", Pattern::kKeyGroups, four, 0.3},
          {"BlockTopK2", Pattern::kBlockTopK, two},
          {"Moba3", Pattern::kMoba, three},
          {"XAttention4", Pattern::kXAttention, four},
          {"AdaSpa2", Pattern::kAdaSpa, two, 0.3},
          {"SlidingWindow4", Pattern::kSlidingWindow, four}};
}

INSTANTIATE_TEST_SUITE_P(Settings, ChosenDocumentAttentionTest, ::testing::ValuesIn(Settings()),
                         [](const auto& info) { return info.param.name; });

TEST(ChosenDocumentAttentionErrorTest, WhatIsNotLaidOutIsNamed) {
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) {
    AttentionOptions options = {
        .pattern = Pattern::kSlidingWindow, .window = 64, .tile = kTile, .by_documents = true};
    const AttentionOptions alone = AloneOptions(options);
    ChosenDocumentAttention attention(options, Make(options, &communicator),
                                      Make(alone, &communicator),
                                      Make(DenseOptions(alone), &communicator), 0);
    const Tensor q = torch::randn({8, kHeads, kHeadDim}), k = torch::randn({8, kKvHeads, kHeadDim});
    EXPECT_THROW(attention.Forward(0, q, k, k), c10::Error);
    EXPECT_EQ(attention.SetDocuments(8, std::vector<int64_t>{0, 4}).code(),
              absl::StatusCode::kFailedPrecondition);
    const std::vector<int64_t> firsts = {0};
    const auto in_one_ring = ring::DocumentLayout::Create(8, firsts, Holders{0}, 1, 1);
    EXPECT_EQ(attention.SetLayout(*in_one_ring).code(), absl::StatusCode::kInvalidArgument);
    const auto of_two = ring::DocumentLayout::CreateApart(8, firsts, Holders{0}, 2, kTile);
    EXPECT_EQ(attention.SetLayout(*of_two).code(), absl::StatusCode::kInvalidArgument);
    const auto longer = ring::DocumentLayout::CreateApart(9, firsts, Holders{0}, 1, 9);
    EXPECT_TRUE(attention.SetLayout(*longer).ok());
    EXPECT_THROW(attention.Forward(0, q, k, k), c10::Error);
    const auto fits = ring::DocumentLayout::CreateApart(8, firsts, Holders{0}, 1, 8);
    EXPECT_TRUE(attention.SetLayout(*fits).ok());
    EXPECT_EQ(attention.Forward(0, q, k, k).out.size(0), 8);
  });
}

}  // namespace
}  // namespace ringleader::attention
