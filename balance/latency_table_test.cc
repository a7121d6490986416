#include "balance/latency_table.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

#include "balance/testing/latency_rows.h"

namespace ringleader::balance {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;

LatencyTable Table(std::vector<Row> rows) {
  absl::StatusOr<LatencyTable> table = MakeTable(std::move(rows));
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

std::string Refusal(std::vector<Row> rows) {
  return std::string(MakeTable(std::move(rows)).status().message());
}

TEST(IsotonicTest, PoolsWhatFalls) {
  EXPECT_THAT(Isotonic(std::vector<double>{1, 3, 2, 2, 5, 4}),
              ElementsAre(1, 7.0 / 3, 7.0 / 3, 7.0 / 3, 4.5, 4.5));
  EXPECT_THAT(Isotonic(std::vector<double>{3, 2, 1}), ElementsAre(2, 2, 2));
  EXPECT_THAT(Isotonic(std::vector<double>{1, 2, 3}), ElementsAre(1, 2, 3));
  EXPECT_TRUE(Isotonic({}).empty());
}

// Of all non-decreasing values, those of the min-max formula (Barlow et al., 1972) are nearest:
// value i is the largest over a of the smallest over b of the mean of [a, b], a <= i <= b.
TEST(IsotonicTest, IsTheMinMaxFormula) {
  std::mt19937 random(5);
  std::normal_distribution<double> noise(0, 3);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> values(1 + random() % 12);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i) + noise(random);
    std::vector<double> expected;
    for (size_t i = 0; i < values.size(); ++i) {
      double most = -std::numeric_limits<double>::infinity();
      for (size_t a = 0; a <= i; ++a) {
        double least = std::numeric_limits<double>::infinity();
        for (size_t b = i; b < values.size(); ++b) {
          double sum = 0;
          for (size_t k = a; k <= b; ++k) sum += values[k];
          least = std::min(least, sum / static_cast<double>(b - a + 1));
        }
        most = std::max(most, least);
      }
      expected.push_back(most);
    }
    EXPECT_THAT(Isotonic(values), Pointwise(DoubleNear(1e-9), expected));
  }
}

TEST(LatencyTableTest, SaysWhatWasMeasured) {
  const LatencyTable table = Table(
      {RowOf(8192, 1, 40), RowOf(8192, 0.1, 8), RowOf(65536, 0.1, 300), RowOf(65536, 1, 2500)});
  for (const Row& row : table.rows) {
    EXPECT_DOUBLE_EQ(table.Predict(static_cast<double>(row.tokens), row.density), row.p50_ms);
  }
  EXPECT_DOUBLE_EQ(table.Predict(8192, 0.55), 24);  // linear in density
  EXPECT_DOUBLE_EQ(table.Predict(8192, 0.01), 8);   // what every call takes
  EXPECT_EQ(LatencyTable().Predict(8192, 0.5), 0);
  EXPECT_EQ(table.Predict(0, 0.5), 0);
}

// Forward, backward and p90 are smoothed each by itself, and stay what they are to each other.
TEST(LatencyTableTest, SlowCallsStaySlowerThanUsualOnes) {
  Row low = RowOf(8192, 0.1, 40), high = RowOf(8192, 0.5, 20);
  low.forward_p50_ms = 5;
  low.p90_ms = 40;
  high.forward_p50_ms = 15;
  high.p90_ms = 20;
  const LatencyTable table = Table({low, high});
  EXPECT_DOUBLE_EQ(table.rows[1].p50_ms, 35);
  for (const Row& row : table.rows) EXPECT_GE(row.p90_ms, row.p50_ms);
}

TEST(LatencyTableTest, LengthsBetweenAndBeyondAreAPowerOfTheLength) {
  // 1e-7 tokens² ms at density 1: the grid of a machine that does nothing but tiles.
  const auto ms = [](double tokens) { return 1e-7 * tokens * tokens; };
  const LatencyTable table = Table({RowOf(8192, 1, ms(8192)), RowOf(32768, 1, ms(32768))});
  for (const double tokens : {1024.0, 10000.0, 20000.0, 32768.0, 1e6}) {
    EXPECT_NEAR(table.Predict(tokens, 1) / ms(tokens), 1, 1e-9) << tokens;
  }
  // Nothing grows faster than the square, or slower than the tokens, however rows scatter.
  const LatencyTable steep = Table({RowOf(8192, 1, 1), RowOf(16384, 1, 100)});
  EXPECT_NEAR(steep.Predict(32768, 1), 400, 1e-9);
  const LatencyTable flat = Table({RowOf(8192, 1, 1), RowOf(16384, 1, 1.1)});
  EXPECT_NEAR(flat.Predict(32768, 1), 2.2, 1e-9);
  const LatencyTable single = Table({RowOf(8192, 1, 10)});
  EXPECT_DOUBLE_EQ(single.Predict(16384, 1), 40);
  EXPECT_DOUBLE_EQ(single.Predict(4096, 1), 5);
  EXPECT_DOUBLE_EQ(single.Predict(8192, 0.5), 10);
}

// Measured times scatter; predictions grow with density all the same, in every part of the table.
TEST(LatencyTableTest, PredictionsGrowWithDensity) {
  std::mt19937 random(7);
  std::normal_distribution<double> noise(1, 0.3);
  std::vector<Row> rows;
  for (const int64_t tokens : {8192, 32768, 131072}) {
    for (const double density : {0.01, 0.03, 0.1, 0.3, 1.0}) {
      const double x = static_cast<double>(tokens);
      rows.push_back(
          RowOf(tokens, density, (1 + density * x * x * 1e-7) * std::max(0.2, noise(random))));
    }
  }
  const LatencyTable table = Table(rows);
  for (int i = 0; i < 20; ++i) {
    const double tokens = 2048 * std::pow(1.37, i);
    double before = 0;
    for (int k = 0; k < 58; ++k) {
      const double density = 0.004 * std::pow(1.1, k);
      const double ms = table.Predict(tokens, density);
      EXPECT_GE(ms, before) << tokens << " " << density;
      before = ms;
    }
  }
  for (const Row& row : table.rows) {
    EXPECT_GT(row.forward_p50_ms, 0);
    EXPECT_LT(row.forward_p50_ms, row.p50_ms);
    EXPECT_GE(row.p90_ms, row.p50_ms);
  }
}

TEST(LatencyTableTest, AlignIsTheInverse) {
  const LatencyTable table =
      Table({RowOf(8192, 0.05, 6), RowOf(8192, 0.2, 12), RowOf(8192, 0.4, 12), RowOf(8192, 1, 40),
             RowOf(32768, 0.05, 50), RowOf(32768, 1, 600)});
  for (const double tokens : {4096.0, 8192.0, 20000.0, 32768.0, 100000.0}) {
    for (const double density : {0.06, 0.15, 0.5, 0.93}) {
      const std::optional<double> back = table.Align(tokens, table.Predict(tokens, density));
      ASSERT_TRUE(back.has_value());
      EXPECT_NEAR(*back, density, 1e-6) << tokens;
    }
  }
  // The largest where several take the same time, 1 where everything fits, none where nothing does.
  EXPECT_NEAR(*table.Align(8192, 12 + 1e-9), 0.4, 1e-6);
  EXPECT_EQ(table.Align(8192, 1000), 1);
  EXPECT_EQ(table.Align(8192, 5.9), std::nullopt);
  EXPECT_EQ(LatencyTable().Align(8192, 5.9), std::nullopt);
  EXPECT_EQ(table.Align(8192, std::nan("")), std::nullopt);
}

TEST(LatencyTableTest, DocumentsCountAsTheNearestInLength) {
  Row shorter = RowOf(65536, 0.1, 20), longer = RowOf(65536, 0.1, 30),
      whole = RowOf(65536, 0.1, 50);
  shorter.document_tokens = 1024;
  longer.document_tokens = 16384;
  const LatencyTable table = Table({whole, longer, shorter});
  EXPECT_EQ(table.Predict(65536, 0.1), 50);
  EXPECT_EQ(table.Predict(65536, 0.1, 500), 20);
  EXPECT_EQ(table.Predict(65536, 0.1, 3000), 20);
  EXPECT_EQ(table.Predict(65536, 0.1, 4096), 20);  // as near to both: the shorter
  EXPECT_EQ(table.Predict(65536, 0.1, 5000), 30);
  EXPECT_EQ(table.Predict(65536, 0.1, 40000), 50);
  EXPECT_NEAR(*table.Align(65536, 60, 500), 0.3, 1e-6);
}

TEST(LatencyTableTest, RefusesWhatNoMeasurementGives) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {nan, infinity, -1.0, 0.0, 1e12}) {
    Row row = RowOf(8192, 0.5, 10);
    row.p50_ms = bad;
    EXPECT_THAT(Refusal({RowOf(8192, 0.1, 5), row}), HasSubstr("no measurement gives")) << bad;
    row = RowOf(8192, 0.5, 10);
    row.p90_ms = bad;
    EXPECT_THAT(Refusal({row}), HasSubstr("no measurement gives")) << bad;
    row = RowOf(8192, 0.5, 10);
    row.forward_p50_ms = bad;
    EXPECT_THAT(Refusal({row}), HasSubstr("no measurement gives")) << bad;
    row = RowOf(8192, 0.5, 10);
    row.density = bad == 1e12 ? 1.5 : bad;
    EXPECT_THAT(Refusal({row}), HasSubstr("density")) << bad;
  }
  Row row = RowOf(8192, 0.5, 10);
  row.forward_p50_ms = row.p50_ms;  // which leaves nothing for backward
  EXPECT_THAT(Refusal({row}), HasSubstr("no measurement gives"));
  row = RowOf(8192, 0.5, 10);
  row.p90_ms = 9;
  EXPECT_THAT(Refusal({row}), HasSubstr("8192 tokens, density 0.5"));
  EXPECT_THAT(Refusal({RowOf(-8192, 0.5, 10)}), HasSubstr("length"));
  row = RowOf(8192, 0.5, 10);
  row.document_tokens = 8192;
  EXPECT_THAT(Refusal({row}), HasSubstr("documents of 8192"));
  row = RowOf(8192, 0.5, 10);
  row.kv_heads = 3;
  EXPECT_THAT(Refusal({row}), HasSubstr("no attention of this shape"));
  row = RowOf(8192, 0.5, 10);
  row.pattern.clear();
  EXPECT_THAT(Refusal({row}), HasSubstr("no name"));
  row.pattern = std::string(100000, 'x');
  EXPECT_LT(Refusal({row}).size(), 500);
}

TEST(LatencyTableTest, RefusesRowsOfAnotherShapeAndPointsMeasuredTwice) {
  Row other = RowOf(16384, 0.5, 10);
  other.tile = 64;
  EXPECT_THAT(Refusal({RowOf(8192, 0.5, 10), other}), HasSubstr("another shape"));
  EXPECT_THAT(Refusal({RowOf(8192, 0.5, 10), RowOf(8192, 0.5, 11)}), HasSubstr("twice"));
}

}  // namespace
}  // namespace ringleader::balance
