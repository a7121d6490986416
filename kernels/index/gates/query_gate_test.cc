// MoBA's gate by query on the device against the fp64 oracle, and on several ranks against one.
#include "kernels/index/gates/query_gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/index/gates/blocks.h"
#include "kernels/index/testing/gate_rows.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/query_gate_oracle.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;

// Scores are sums of 128 products; of the means 16 bits are kept.
constexpr double kTolerance = 1e-3;

struct Choice {
  std::vector<uint32_t> queries, chosen;
};

class QueryGateTest : public GpuTest {
 protected:
  Rows Random(int64_t tokens, int heads, int head_dim) {
    return RandomRows(tokens, heads, head_dim, random_);
  }

  // From 1 - spread to 1 + spread, of head_dim 64.
  Rows SmallIntegers(int64_t tokens, int heads, int spread) {
    Rows rows{.floats = {}, .bf16 = {}, .tokens = tokens, .heads = heads, .head_dim = 64};
    for (int64_t i = 0; i < tokens * rows.width(); ++i) {
      const auto above = static_cast<int>(random_() % static_cast<uint32_t>(2 * spread + 1));
      rows.floats.push_back(static_cast<float>(1 - spread + above));
      rows.bf16.push_back(__float2bfloat16_rn(rows.floats.back()));
    }
    return rows;
  }

  // Where the documents of tokens start. Some blocks hold the beginning of one, and then a power of
  // two of its tokens, so that means of small integers are exact.
  std::vector<int32_t> DocumentsOfExactMeans(int64_t tokens, int block_size) {
    const int most = std::bit_width(static_cast<uint32_t>(block_size)) - 1;
    std::vector<int64_t> firsts = {0};
    for (int64_t end = 2 * block_size; end <= tokens; end += block_size) {
      if (random_() % 4 != 0) continue;
      firsts.push_back(end - (int64_t{1} << random_() % static_cast<uint32_t>(most + 1)));
    }
    return reference::testing::DocumentStarts(tokens, firsts);
  }

  // What the rank of `layout` chooses; the step's head_halves are in the host's memory.
  Choice Choose(const Rows& q, const Rows& k, QueryGateStep step, const ShardLayout& layout,
                const std::vector<int32_t>& starts) {
    const int64_t n = layout.local_tokens(), tiles = (n + step.tile - 1) / step.tile;
    const int64_t blocks = (layout.tokens + step.block_size - 1) / step.block_size;
    const DeviceBuffer<Bf16> queries(q.Shard(layout)), keys(k.bf16);
    DeviceBuffer<float> sums((layout.tokens + step.tile - 1) / step.tile * k.width());
    const DeviceBuffer<int32_t> key_starts(reference::testing::KeyStarts(starts));
    if (!starts.empty()) step.counted.starts = key_starts.data();
    EXPECT_EQ(
        TileKeySums(k.ViewOf(keys, k.tokens),
                    {.counted = step.counted, .tile = step.tile, .sums = sums.data()}, nullptr),
        absl::OkStatus());
    const DeviceBuffer<int32_t> head_halves =
        step.head_halves == nullptr
            ? DeviceBuffer<int32_t>()
            : DeviceBuffer<int32_t>(std::span(step.head_halves, static_cast<size_t>(q.heads)));
    step.head_halves = head_halves.data();
    const LocalStarts local_starts(starts, layout);
    const DeviceBuffer<uint32_t> chosen_queries(q.heads * blocks * QueryWords(n)),
        chosen(q.heads * tiles * BlockWords(static_cast<int32_t>(blocks)));
    step.key_sums = sums.data();
    step.query_layout = layout;
    step.document_starts = local_starts.data();
    step.queries = chosen_queries.data();
    step.chosen = chosen.data();
    const TokenMajor<const Bf16> view = q.ViewOf(queries, n);
    const DeviceBuffer<char> workspace(
        static_cast<int64_t>(QueryGateWorkspaceBytes(view, k.heads, step)));
    EXPECT_EQ(ChooseByQuery(view, k.heads, step, workspace.data(), nullptr), absl::OkStatus());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return {chosen_queries.Read(), chosen.Read()};
  }

  // What the CPU engine chooses on one rank; starts: by position, empty: the sequence is one
  // document.
  static Choice OnCpu(const Rows& q, const Rows& k, QueryGateStep step,
                      const std::vector<int32_t>& starts) {
    reference::Engine engine(2);
    const int64_t tiles = (q.tokens + step.tile - 1) / step.tile,
                  blocks = (q.tokens + step.block_size - 1) / step.block_size;
    std::vector<float> sums(tiles * k.width());
    const std::vector<int32_t> key_starts = reference::testing::KeyStarts(starts);
    if (!starts.empty()) step.counted.starts = key_starts.data();
    reference::TileKeySums(engine, k.View(),
                           {.counted = step.counted, .tile = step.tile, .sums = sums.data()});
    Choice choice = {
        std::vector<uint32_t>(q.heads * blocks * QueryWords(q.tokens)),
        std::vector<uint32_t>(q.heads * tiles * BlockWords(static_cast<int32_t>(blocks)))};
    step.key_sums = sums.data();
    step.query_layout = {.tokens = q.tokens};
    step.document_starts = starts.empty() ? nullptr : starts.data();
    step.queries = choice.queries.data();
    step.chosen = choice.chosen.data();
    reference::ChooseByQuery(engine, q.View(), k.heads, step);
    return choice;
  }

  static void ExpectRowsOf(const Choice& one, const Choice& of_rank, const QueryGateStep& step,
                           const ShardLayout& layout) {
    const int64_t n = layout.local_tokens();
    const int64_t blocks = (layout.tokens + step.block_size - 1) / step.block_size;
    for (int64_t row = 0; row < 4 * blocks; ++row) {
      for (int64_t i = 0; i < n; i += 32) {
        ASSERT_EQ(of_rank.queries[row * QueryWords(n) + i / 32],
                  one.queries[row * QueryWords(layout.tokens) + layout.Position(i) / 32])
            << "row " << row << ", query " << i;
      }
    }
  }

  std::mt19937 random_{13};
};

TEST_F(QueryGateTest, IsTheOraclesAndOnRanksThatOfOne) {
  for (const auto& [tokens, head_dim, tile, block_size] : {std::tuple{1000, 64, 64, 64},
                                                           {1024, 128, 128, 256},
                                                           {8192, 128, 64, 64},
                                                           {16384, 64, 128, 128},
                                                           {16384, 128, 64, 64},
                                                           {40960, 64, 128, 128},
                                                           {40960, 64, 64, 64},
                                                           {50, 64, 64, 64}}) {
    if (SmallShapes() && tokens > 1024) continue;
    const Rows q = Random(tokens, 4, head_dim), k = Random(tokens, 2, head_dim);
    const auto documents = reference::testing::DocumentStarts(
        tokens, reference::testing::RandomDocuments(tokens, tile, random_));
    for (const bool packed : {false, true}) {
      const auto starts = packed ? documents : std::vector<int32_t>();
      for (const auto& [topk, density] :
           {std::pair{1, 0.0f}, {5, 0.0f}, {12, 0.0f}, {1000, 0.0f}, {1, 0.05f}}) {
        const QueryGateStep step = {
            .tile = tile, .block_size = block_size, .topk_blocks = topk, .density = density};
        std::vector<ShardLayout> layouts = {{.tokens = tokens}};
        for (int rank = 0; tokens % (4 * tile) == 0 && rank < 4; ++rank) {
          layouts.push_back({.kind = LayoutKind::kStriped,
                             .ranks = 4,
                             .rank = rank,
                             .stripe = tile,
                             .tokens = tokens});
        }
        Choice one;
        for (const ShardLayout& layout : layouts) {
          SCOPED_TRACE(::testing::Message() << tokens << " tokens, rank " << layout.rank << " of "
                                            << layout.ranks << ", topk " << topk << ", density "
                                            << density << (packed ? ", documents" : ""));
          const Choice choice = Choose(q, k, step, layout, starts);
          EXPECT_EQ(reference::testing::ChosenByTileComplaint(step, 4, layout, choice.queries,
                                                              choice.chosen),
                    "");
          if (layout.ranks == 1) {
            EXPECT_EQ(reference::testing::QueryGateComplaint(q.View(), k.View(), step, starts,
                                                             layout, choice.queries, kTolerance),
                      "");
            one = choice;
            continue;
          }
          ExpectRowsOf(one, choice, step, layout);
        }
      }
    }
  }
}

// Heads have budgets of their own: the one with the most keeps as many as the lists of few blocks
// hold, short ones and long ones, or one more, which is the other kernel's.
TEST_F(QueryGateTest, HeadsKeepTheirHalvesOfTheBudget) {
  const std::vector<int32_t> halves = {3, 1, 2, 3};
  for (const auto& [tokens, head_dim] : {std::pair{8192, 128}, {4000, 64}, {16384, 64}}) {
    if (SmallShapes() && tokens > 4000) continue;
    const Rows q = Random(tokens, 4, head_dim), k = Random(tokens, 2, head_dim);
    const auto documents = reference::testing::DocumentStarts(
        tokens, reference::testing::RandomDocuments(tokens, 64, random_));
    for (const std::vector<int32_t>& starts : {std::vector<int32_t>(), documents}) {
      for (const auto& [topk, density] : {std::pair{1, 0.0f},
                                          {2, 0.0f},
                                          {6, 0.0f},
                                          {7, 0.0f},
                                          {12, 0.0f},
                                          {13, 0.0f},
                                          {1, 0.6f}}) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens, topk " << topk << ", density "
                                          << density << (starts.empty() ? "" : ", documents"));
        const QueryGateStep step = {.tile = 64,
                                    .block_size = 64,
                                    .topk_blocks = topk,
                                    .density = density,
                                    .head_halves = halves.data()};
        const ShardLayout layout = {.tokens = tokens};
        const Choice choice = Choose(q, k, step, layout, starts);
        EXPECT_EQ(reference::testing::QueryGateComplaint(q.View(), k.View(), step, starts, layout,
                                                         choice.queries, kTolerance),
                  "");
        EXPECT_EQ(reference::testing::ChosenByTileComplaint(step, 4, layout, choice.queries,
                                                            choice.chosen),
                  "");
      }
    }
  }
}

// Bit for bit what the CPU engine keeps where the scores of all blocks are equal and where many
// are: small integers, whose sums and means are exact.
TEST_F(QueryGateTest, TiesGoWhereTheHeadSays) {
  for (const auto& [tokens, block_size] : {std::pair{int64_t{4096}, 64},
                                           {int64_t{8192}, 64},
                                           {int64_t{16384}, 64},
                                           {int64_t{32768}, 64},
                                           {int64_t{131072}, 1024}}) {
    if (SmallShapes() && tokens > 4096) continue;
    const std::vector<int32_t> documents = DocumentsOfExactMeans(tokens, block_size);
    for (const bool are_alike : {true, false}) {
      const Rows q = SmallIntegers(tokens, 4, 1), k = SmallIntegers(tokens, 2, are_alike ? 0 : 1);
      // Short lists, long ones, and the other kernel.
      for (const int topk : {5, 9, 14, 40}) {
        if (tokens > 16384 && topk != 9 && topk != 40) continue;  // the CPU's time
        const std::vector<int32_t> starts = topk == 9 ? documents : std::vector<int32_t>();
        const QueryGateStep step = {.tile = 64, .block_size = block_size, .topk_blocks = topk};
        SCOPED_TRACE(::testing::Message() << tokens << " tokens, topk " << topk
                                          << (are_alike ? ", keys are alike" : ""));
        const Choice one = Choose(q, k, step, {.tokens = tokens}, starts),
                     cpu = OnCpu(q, k, step, starts);
        ASSERT_TRUE(one.queries == cpu.queries);
        ASSERT_TRUE(one.chosen == cpu.chosen);
        for (int rank = 0; rank < 4; ++rank) {
          const ShardLayout layout = {.kind = LayoutKind::kStriped,
                                      .ranks = 4,
                                      .rank = rank,
                                      .stripe = 64,
                                      .tokens = tokens};
          ExpectRowsOf(one, Choose(q, k, step, layout, starts), step, layout);
        }
      }
    }
  }
}

// A query whose scores are not numbers keeps no more than the others, however many blocks there
// are, and leaves the others what they keep: lists of chosen queries have no room for more.
TEST_F(QueryGateTest, QueriesThatAreNoNumbersKeepNoMoreThanOthers) {
  const int64_t tokens = SmallShapes() ? 4096 : 8192, blocks = tokens / 64;
  const int64_t words = QueryWords(tokens);
  Rows q = Random(tokens, 4, 64);
  const Rows k = Random(tokens, 2, 64);
  for (const int topk : {5, 14, 40}) {  // short lists, long ones, and the other kernel
    const QueryGateStep step = {.tile = 64, .block_size = 64, .topk_blocks = topk};
    const Choice numbers = Choose(q, k, step, {.tokens = tokens}, {});
    Rows broken = q;
    const auto is_broken = [](int64_t query) { return query % 3 == 1; };
    for (int64_t i = 0; i < tokens; ++i) {
      if (!is_broken(i)) continue;
      for (int64_t d = 0; d < q.width(); d += 64) {
        broken.bf16[i * q.width() + d + i % 64] = __float2bfloat16_rn(NAN);
      }
    }
    const Choice choice = Choose(broken, k, step, {.tokens = tokens}, {});
    for (int64_t head = 0; head < 4; ++head) {
      for (int64_t i = 0; i < tokens; ++i) {
        int64_t kept = 0;
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t word = (head * blocks + block) * words + i / 32;
          const uint32_t bit = choice.queries[word] >> i % 32 & 1;
          kept += bit;
          if (!is_broken(i) || block >= i / 64) {
            ASSERT_EQ(bit, numbers.queries[word] >> i % 32 & 1)
                << "head " << head << ", block " << block << ", query " << i << ", topk " << topk;
          }
        }
        ASSERT_LE(kept, topk) << "head " << head << ", query " << i;
      }
    }
  }
}

// Moved choices hold the best, as many as the CPU engine keeps: ties of rounding apart.
TEST_F(QueryGateTest, MovesAreTheCpuEngines) {
  const int64_t tokens = 4096;
  const Rows q = Random(tokens, 4, 128), k = Random(tokens, 2, 128);
  const ShardLayout layout = {.tokens = tokens};
  for (const float factor : {0.5f, 0.8f, 1.0f, 1.4f}) {
    for (const float tolerance : {0.5f, 0.02f}) {
      const DeviceBuffer<float> device_factor(std::vector<float>{factor});
      QueryGateStep step = {.tile = 64,
                            .block_size = 64,
                            .topk_blocks = 12,
                            .scale = 0.0884f,
                            .move = {.factor = device_factor.data(), .tolerance = tolerance}};
      const Choice moved = Choose(q, k, step, layout, {});
      step.move.factor = &factor;
      const Choice expected = OnCpu(q, k, step, {});
      int64_t kept = 0, apart = 0;
      for (size_t i = 0; i < expected.queries.size(); ++i) {
        kept += std::popcount(expected.queries[i]);
        apart += std::popcount(expected.queries[i] ^ moved.queries[i]);
      }
      EXPECT_LT(static_cast<double>(apart), 1e-3 * static_cast<double>(kept))
          << factor << ", " << tolerance;
    }
  }
}

TEST(QueryGateArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  const auto message = [](QueryGateStep step, int64_t tokens, int head_dim) {
    step.query_layout.tokens = tokens;
    return std::string(
        ChooseByQuery({nullptr, tokens, 1, head_dim, head_dim, head_dim}, 1, step, nullptr, nullptr)
            .message());
  };
  EXPECT_THAT(message({}, 1024, 80), HasSubstr("head_dim is 80; 64 and 128 are supported"));
  EXPECT_THAT(message({.block_size = 100}, 1024, 64), HasSubstr("block_size is 100"));
  EXPECT_THAT(
      message({.block_size = 128}, 131072, 64),
      HasSubstr("blocks of the sequence is 1024; allowed are multiples of 1 from 1 to 640"));
}

}  // namespace
}  // namespace ringleader::kernels::index
