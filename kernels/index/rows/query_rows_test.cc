// Gathered queries against the definition of their rows, on ranks of every layout.
#include "kernels/index/rows/query_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"
#include "ringleader/kernels/earlier_blocks.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Case {
  ShardLayout queries, keys;
  int32_t tile = 64, block_size = 128, head_dim = 64;
};

// What QueryRowsArgs points into.
class Lists {
 public:
  Lists(const Case& c, int32_t heads, const DeviceBuffer<uint32_t>& chosen, int64_t capacity) {
    args = {.chosen = chosen.data(),
            .query_layout = c.queries,
            .key_layout = c.keys,
            .heads = heads,
            .tile = c.tile,
            .block_size = c.block_size,
            .capacity = capacity};
    const auto buffer = [&](int64_t size) {
      buffers_.emplace_back(heads * size);
      return buffers_.back().data();
    };
    args.before = buffer(args.blocks() * QueryWords(c.queries.local_tokens()));
    args.counts = buffer(args.blocks());
    args.first_rows = buffer(args.blocks() + 1);
    args.row_offsets = buffer(args.tiles() + 1);
    args.columns = buffer(args.entries());
    args.column_offsets = buffer(args.key_tiles() + 1);
    args.rows = buffer(args.entries());
  }
  // first_rows, row_offsets, columns, column_offsets, rows.
  std::vector<int32_t> Read(int buffer) const { return buffers_[buffer].Read(); }
  enum { kFirstRows = 2, kRowOffsets, kColumns, kColumnOffsets, kRows };

  QueryRowsArgs args;

 private:
  std::vector<DeviceBuffer<int32_t>> buffers_;
};

// A head's rows by the definition: the query of each, -1 for padding.
struct HeadRows {
  std::vector<int64_t> queries;
  std::vector<std::vector<int32_t>> columns;  // of each tile of rows
};

class QueryRowsTest : public GpuTest {
 protected:
  static constexpr int32_t kHeads = 3;
  static constexpr int64_t kTokens = 2048;

  // Queries choose a third of the blocks before their own, and their own; block 1 has few rows and
  // block 2 none.
  std::vector<uint32_t> Choose(const Case& c) {
    const int64_t blocks = kTokens / c.block_size, n = c.queries.local_tokens();
    std::vector<uint32_t> chosen(kHeads * blocks * QueryWords(n));
    for (int64_t row = 0; row < kHeads * blocks; ++row) {
      const int64_t block = row % blocks;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t own = c.queries.Position(i) / c.block_size;
        const bool drawn = block == 1 ? random_() % 97 == 0 : block != 2 && random_() % 3 == 0;
        if (block == own || (block < own && drawn)) {
          chosen[row * QueryWords(n) + i / 32] |= 1u << i % 32;
        }
      }
    }
    return chosen;
  }

  static HeadRows RowsOf(const Case& c, const std::vector<uint32_t>& chosen, int head) {
    const int64_t blocks = kTokens / c.block_size, n = c.queries.local_tokens();
    HeadRows rows;
    for (int64_t block = 0; block < blocks; ++block) {
      std::vector<int32_t> columns;
      for (int64_t b = 0; b < c.keys.local_tokens() / c.tile; ++b) {
        if (c.keys.Position(b * c.tile) / c.block_size == block) {
          columns.push_back(static_cast<int32_t>(b));
        }
      }
      if (columns.empty()) continue;
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t word = chosen[(head * blocks + block) * QueryWords(n) + i / 32];
        if (c.queries.Position(i) / c.block_size > block && (word >> i % 32 & 1) != 0) {
          rows.queries.push_back(i);
        }
      }
      while (std::ssize(rows.queries) % c.tile != 0) rows.queries.push_back(-1);
      rows.columns.resize(rows.queries.size() / c.tile, columns);
    }
    return rows;
  }

  void ExpectRows(const Case& c);
};

void QueryRowsTest::ExpectRows(const Case& c) {
  const int64_t n = c.queries.local_tokens();
  const std::vector<uint32_t> host = Choose(c);
  const DeviceBuffer<uint32_t> chosen(host);
  const int64_t capacity = n * (kTokens / c.block_size);
  const Lists lists(c, kHeads, chosen, capacity);
  ASSERT_EQ(ListQueryRows(lists.args, nullptr), absl::OkStatus());
  const auto offsets = lists.Read(Lists::kRowOffsets), columns = lists.Read(Lists::kColumns),
             column_offsets = lists.Read(Lists::kColumnOffsets), rows = lists.Read(Lists::kRows);
  int64_t listed = 0;
  for (int head = 0; head < kHeads; ++head) {
    const HeadRows expected = RowsOf(c, host, head);
    const int32_t* const of_head = offsets.data() + head * (lists.args.tiles() + 1);
    std::vector<std::vector<int32_t>> by_column(lists.args.key_tiles());
    for (int64_t tile = 0; tile < lists.args.tiles(); ++tile) {
      const std::vector<int32_t> found(columns.begin() + of_head[tile],
                                       columns.begin() + of_head[tile + 1]);
      ASSERT_EQ(found, tile < std::ssize(expected.columns) ? expected.columns[tile]
                                                           : std::vector<int32_t>{})
          << "head " << head << ", tile " << tile;
      for (const int32_t column : found) by_column[column].push_back(static_cast<int32_t>(tile));
      listed += std::ssize(found);
    }
    const int32_t* const of_columns = column_offsets.data() + head * (lists.args.key_tiles() + 1);
    for (size_t column = 0; column < by_column.size(); ++column) {
      ASSERT_EQ(std::vector<int32_t>(rows.begin() + of_columns[column],
                                     rows.begin() + of_columns[column + 1]),
                by_column[column])
          << "head " << head << ", column " << column;
    }
  }
  DeviceBuffer<int64_t> counted(std::vector<int64_t>{5});
  ASSERT_EQ(CountQueryRowTiles(lists.args, counted.data(), nullptr), absl::OkStatus());
  EXPECT_EQ(counted.Read()[0], 5 + listed);

  // Heads 1 and 2 of the three.
  const HeadRange range = {.first = 1, .count = 2};
  const int32_t d = c.head_dim;
  const auto dense = [&](auto* data) {
    return TokenMajor<std::remove_pointer_t<decltype(data)>>{data, n, kHeads, d, kHeads * d, d};
  };
  const std::vector<Bf16> q = Normal(n * kHeads * d), d_out = Normal(n * kHeads * d);
  const std::vector<float> lse = NormalFloat(kHeads * n), delta = NormalFloat(kHeads * n);
  std::vector<int32_t> starts(n);
  for (int64_t i = 0; i < n; ++i) starts[i] = static_cast<int32_t>(i / 7);
  const DeviceBuffer<Bf16> device_q(q), device_d_out(d_out), rows_q(2 * capacity * d),
      rows_d_out(2 * capacity * d);
  const DeviceBuffer<float> device_lse(lse), device_delta(delta), rows_lse(2 * capacity),
      rows_delta(2 * capacity);
  const DeviceBuffer<int32_t> device_starts(starts), rows_starts(capacity);
  ASSERT_EQ(GatherQueries(lists.args, range,
                          {.q = dense(static_cast<const Bf16*>(device_q.data())),
                           .d_out = dense(static_cast<const Bf16*>(device_d_out.data())),
                           .lse = device_lse.data(),
                           .delta = device_delta.data(),
                           .rows_q = rows_q.data(),
                           .rows_d_out = rows_d_out.data(),
                           .rows_lse = rows_lse.data(),
                           .rows_delta = rows_delta.data()},
                          nullptr),
            absl::OkStatus());
  const std::vector<Bf16> found_q = rows_q.Read(), found_d_out = rows_d_out.Read();
  const std::vector<float> found_lse = rows_lse.Read(), found_delta = rows_delta.Read();
  for (int head = 1; head < kHeads; ++head) {
    const HeadRows expected = RowsOf(c, host, head);
    for (int64_t row = 0; row < std::ssize(expected.queries); ++row) {
      const int64_t query = expected.queries[row], at = (head - 1) * capacity + row;
      ASSERT_EQ(found_lse[at], query < 0 ? kNothing : lse[head * n + query]) << row;
      ASSERT_EQ(found_delta[at], query < 0 ? 0.0f : delta[head * n + query]) << row;
      for (int j = 0; j < d; ++j) {
        const int64_t from = (query * kHeads + head) * d + j;
        ASSERT_EQ(__bfloat162float(found_q[at * d + j]),
                  query < 0 ? 0.0f : __bfloat162float(q[from]));
        ASSERT_EQ(__bfloat162float(found_d_out[at * d + j]),
                  query < 0 ? 0.0f : __bfloat162float(d_out[from]));
      }
    }
  }
  // As forward wants it, one head's with documents.
  ASSERT_EQ(GatherQueries(lists.args, {.first = 2, .count = 1},
                          {.q = dense(static_cast<const Bf16*>(device_q.data())),
                           .document_starts = device_starts.data(),
                           .rows_q = rows_q.data(),
                           .rows_lse = rows_lse.data(),
                           .rows_starts = rows_starts.data()},
                          nullptr),
            absl::OkStatus());
  const std::vector<float> empty_lse = rows_lse.Read();
  const std::vector<int32_t> found_starts = rows_starts.Read();
  const HeadRows last = RowsOf(c, host, 2);
  for (int64_t row = 0; row < std::ssize(last.queries); ++row) {
    ASSERT_EQ(empty_lse[row], kNothing);
    if (last.queries[row] >= 0) {
      ASSERT_EQ(found_starts[row], starts[last.queries[row]]);
    } else {
      ASSERT_GE(found_starts[row], kTokens);
    }
  }

  // Every seventh row attended to nothing, and its output is what nobody wrote.
  std::vector<float> part_lse(2 * capacity), part = NormalFloat(2 * capacity * d);
  for (int64_t row = 0; row < 2 * capacity; ++row) {
    part_lse[row] = row % 7 == 0 ? kNothing : 3.0f * part[row * d];
    if (row % 7 == 0) part[row * d] = std::nanf("");
  }
  // Some queries have no output yet.
  std::vector<float> out = NormalFloat(n * kHeads * d), out_lse = lse;
  for (int64_t i = 0; i < kHeads * n; i += 5) out_lse[i] = kNothing;
  DeviceBuffer<float> device_out(out), device_out_lse(out_lse);
  const DeviceBuffer<float> device_part(part), device_part_lse(part_lse);
  ASSERT_EQ(MergeQueryRows(lists.args, range, device_part.data(), device_part_lse.data(),
                           dense(device_out.data()), device_out_lse.data(), nullptr),
            absl::OkStatus());
  DeviceBuffer<float> device_dq(out);
  std::vector<float> gradients = NormalFloat(2 * capacity * d);
  const DeviceBuffer<float> device_gradients(gradients);
  ASSERT_EQ(
      AddQueryRows(lists.args, range, device_gradients.data(), dense(device_dq.data()), nullptr),
      absl::OkStatus());
  const std::vector<float> merged = device_out.Read(), merged_lse = device_out_lse.Read(),
                           added = device_dq.Read();
  for (int head = 0; head < kHeads; ++head) {
    HeadRows mine;
    if (head > 0) mine = RowsOf(c, host, head);
    std::vector<std::vector<int64_t>> of_query(n);
    for (int64_t row = 0; row < std::ssize(mine.queries); ++row) {
      if (mine.queries[row] >= 0) {
        of_query[mine.queries[row]].push_back((head - 1) * capacity + row);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      double sum = out_lse[head * n + i] == kNothing ? 0.0 : std::exp(out_lse[head * n + i]);
      const double before = sum;
      for (const int64_t row : of_query[i]) sum += std::exp(static_cast<double>(part_lse[row]));
      const float to_lse = merged_lse[head * n + i];
      if (sum == 0.0) {
        ASSERT_EQ(to_lse, kNothing);
      } else {
        ASSERT_NEAR(to_lse, std::log(sum), 1e-5);
      }
      for (int j = 0; j < d; ++j) {
        const int64_t at = (i * kHeads + head) * d + j;
        double value = before == 0.0 ? 0.0 : before * out[at], gradient = out[at];
        for (const int64_t row : of_query[i]) {
          if (part_lse[row] != kNothing) {
            value += std::exp(static_cast<double>(part_lse[row])) * part[row * d + j];
          }
          gradient += gradients[row * d + j];
        }
        if (sum > 0.0) {
          ASSERT_NEAR(merged[at], value / sum, 2e-5) << i << ", " << head;
        }
        ASSERT_NEAR(added[at], gradient, 2e-5) << i << ", " << head;
      }
    }
  }
}

TEST_F(QueryRowsTest, AreThosePairsThatWereChosen) {
  ExpectRows({.queries = {.tokens = kTokens}, .keys = {.tokens = kTokens}});
  ExpectRows({.queries = {.tokens = kTokens},
              .keys = {.tokens = kTokens},
              .tile = 128,
              .block_size = 256,
              .head_dim = 128});
}

TEST_F(QueryRowsTest, OfEveryOwnerInEveryLayout) {
  for (const LayoutKind kind :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const int32_t stripe : {64, 256}) {
      for (int32_t owner = 0; owner < 2; ++owner) {
        SCOPED_TRACE(testing::Message()
                     << static_cast<int>(kind) << ", stripes of " << stripe << ", owner " << owner);
        const ShardLayout layout = {
            .kind = kind, .ranks = 2, .rank = 1, .stripe = stripe, .tokens = kTokens};
        ShardLayout keys = layout;
        keys.rank = owner;
        ExpectRows({.queries = layout, .keys = keys, .block_size = 256});
      }
    }
  }
}

TEST_F(QueryRowsTest, AHeadWithMoreThanItsRoomHasNone) {
  const Case c = {.queries = {.tokens = kTokens}, .keys = {.tokens = kTokens}};
  std::vector<uint32_t> host = Choose(c);
  const int64_t words = std::ssize(host) / kHeads;
  std::fill(host.begin() + words, host.begin() + 2 * words, ~0u);  // all of head 1
  const DeviceBuffer<uint32_t> chosen(host);
  const Lists lists(c, kHeads, chosen, /*capacity=*/c.tile * 128);
  ASSERT_EQ(ListQueryRows(lists.args, nullptr), absl::OkStatus());
  const auto offsets = lists.Read(Lists::kRowOffsets), first_rows = lists.Read(Lists::kFirstRows),
             column_offsets = lists.Read(Lists::kColumnOffsets);
  for (int head = 0; head < kHeads; ++head) {
    const auto length = [&](const std::vector<int32_t>& of_heads, int64_t lines) {
      return of_heads[(head + 1) * (lines + 1) - 1] - of_heads[head * (lines + 1)];
    };
    const int64_t rows = std::ssize(RowsOf(c, host, head).queries);
    EXPECT_EQ(rows > lists.args.capacity, head == 1);
    EXPECT_EQ(length(first_rows, lists.args.blocks()), head == 1 ? 0 : rows);
    EXPECT_EQ(length(offsets, lists.args.tiles()), head == 1 ? 0 : rows / c.tile * 2);
    EXPECT_EQ(length(column_offsets, lists.args.key_tiles()), head == 1 ? 0 : rows / c.tile * 2);
  }
}

TEST_F(QueryRowsTest, OwnBlocksAreEachTilesAlone) {
  const ShardLayout layout = {.kind = LayoutKind::kZigzag, .ranks = 2, .rank = 1, .tokens = 8192};
  const DeviceBuffer<uint32_t> device(2 * 64 * 2);
  ASSERT_EQ(ChooseOwnBlocks(layout, 2, 64, 128, device.data(), nullptr), absl::OkStatus());
  const std::vector<uint32_t> chosen = device.Read();
  for (int64_t row = 0; row < 2 * 64; ++row) {
    const int64_t own = layout.Position(row % 64 * 64) / 128;
    for (int64_t block = 0; block < 64; ++block) {
      EXPECT_EQ(chosen[row * 2 + block / 32] >> block % 32 & 1, block == own ? 1 : 0);
    }
  }
}

TEST(QueryRowsArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  const auto message = [](const QueryRowsArgs& args) {
    return std::string(ListQueryRows(args, nullptr).message());
  };
  EXPECT_THAT(message({.query_layout = {.tokens = 1024}, .heads = 1, .tile = 32}),
              HasSubstr("query rows: tile is 32"));
  EXPECT_THAT(message({.query_layout = {.tokens = 1 << 20}, .heads = 1, .capacity = 128}),
              HasSubstr("query rows: blocks is 1024; allowed are multiples of 1 from 1 to 640"));
  EXPECT_THAT(message({.query_layout = {.tokens = 1024}, .heads = 1, .capacity = 100}),
              HasSubstr("query rows: capacity is 100"));
  EXPECT_THAT(message({.query_layout = {.tokens = 1024}, .heads = 1, .capacity = 128}),
              HasSubstr("query rows: chosen"));
}

// Needs no GPU: what is gathered, and how many rows there may be.
TEST(QueryRowsPlanTest, CountsThePairsThatQueriesMayChoose) {
  const ShardLayout whole = {.tokens = 4096};
  // Sixteen blocks of 256: queries of block b keep min(3, b + 1).
  const EarlierBlocks pairs = CountEarlierBlocks(whole, 64, 256, 3, 0.0f, false);
  EXPECT_EQ(pairs.chosen, 256 * (0 + 1 + 14 * 2));
  EXPECT_EQ(pairs.all, 256 * 16 * 15 / 2);
  EarlierBlocks of_ranks;
  for (int32_t rank = 0; rank < 4; ++rank) {
    const EarlierBlocks one = CountEarlierBlocks(
        {.kind = LayoutKind::kStriped, .ranks = 4, .rank = rank, .stripe = 64, .tokens = 4096}, 64,
        256, 3, 0.0f, false);
    of_ranks.chosen += one.chosen;
    of_ranks.all += one.all;
  }
  EXPECT_EQ(of_ranks.chosen, pairs.chosen);
  EXPECT_EQ(of_ranks.all, pairs.all);
  // A quarter of what each sees, its own counted and at least.
  EXPECT_EQ(CountEarlierBlocks(whole, 64, 256, 1, 0.25f, false).chosen, 256 * (4 * 1 + 4 * 2 + 3));
  // Moved they keep up to 5 for 3, but no more than there are.
  const EarlierBlocks moved = CountEarlierBlocks(whole, 64, 256, 3, 0.0f, true);
  EXPECT_EQ(moved.chosen, pairs.chosen);
  EXPECT_EQ(moved.most, 256 * (0 + 1 + 2 + 3 + 12 * 4));
  EXPECT_EQ(pairs.most, pairs.chosen);
  // In a head with half more of the budget 3 for 2 besides their own, and moved 6 for 4.
  const EarlierBlocks by_head = CountEarlierBlocks(whole, 64, 256, 3, 0.0f, false, true),
                      both = CountEarlierBlocks(whole, 64, 256, 3, 0.0f, true, true);
  EXPECT_EQ(by_head.chosen, pairs.chosen);
  EXPECT_EQ(by_head.most, 256 * (0 + 1 + 2 + 13 * 3));
  EXPECT_EQ(both.most, 256 * (0 + 1 + 2 + 3 + 4 + 11 * 5));
}

TEST(QueryRowsPlanTest, GathersWhatIsFewAndFits) {
  const EarlierBlocks few = {.chosen = 1000, .most = 1500, .all = 10000};
  const auto plan = PlanQueryRows(few, 16, 128, 1024, 16, 2, false);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->heads, 8);
  EXPECT_EQ(plan->capacity % 128, 0);
  EXPECT_GE(plan->capacity, few.most + 16 * 127);
  EXPECT_EQ(PlanQueryRows(few, 16, 128, 1024, 16, 2, true)->heads, 1) << "documents";
  EXPECT_FALSE(PlanQueryRows({.all = 10000}, 16, 128, 1024, 16, 2, false).has_value());
  EXPECT_FALSE(
      PlanQueryRows({.chosen = 8001, .most = 8001, .all = 10000}, 16, 128, 1024, 16, 2, false)
          .has_value());
  EXPECT_TRUE(
      PlanQueryRows({.chosen = 8000, .most = 8000, .all = 10000}, 16, 128, 1024, 16, 2, false)
          .has_value());
  const EarlierBlocks many = {.chosen = 1, .most = kMostQueryRows, .all = kMostQueryRows};
  EXPECT_FALSE(PlanQueryRows(many, 16, 128, 1024, 16, 2, false).has_value());
  // Lists of 64 heads would be longer than an offset can say.
  const EarlierBlocks long_lists = {.chosen = 1, .most = 1 << 22, .all = 1 << 30};
  EXPECT_TRUE(PlanQueryRows(long_lists, 16, 64, 16384, 16, 16, false).has_value());
  EXPECT_FALSE(PlanQueryRows(long_lists, 16, 64, 65536, 64, 64, false).has_value());
  EXPECT_EQ(MostRowsAtOnce(1000, 8), 8000);
  EXPECT_EQ(MostRowsAtOnce(kQueryRowsAtOnce / 3, 8), kQueryRowsAtOnce);
  EXPECT_EQ(MostRowsAtOnce(kQueryRowsAtOnce + 64, 8), kQueryRowsAtOnce + 64);
  EXPECT_EQ(MostRowsAtOnce(2 * kMostQueryRows, 8), kMostQueryRows);
  const EarlierBlocks some = {.chosen = 1, .most = kQueryRowsAtOnce / 3, .all = kMostQueryRows};
  EXPECT_EQ(PlanQueryRows(some, 16, 128, 1024, 16, 2, false)->heads, 2);
}

}  // namespace
}  // namespace ringleader::kernels::index
