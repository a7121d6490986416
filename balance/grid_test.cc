#include "balance/grid.h"

#include <gmock/gmock.h>

#include "balance/testing/latency_rows.h"

namespace ringleader::balance {
namespace {

using testing::IsEmpty;
using testing::Lt;

// A machine whose calls take what its tiles take, on a clock that only they move.
class Machine {
 public:
  explicit Machine(double seconds_per_tile) : seconds_per_tile_(seconds_per_tile) {}

  absl::StatusOr<Timing> Run(const GridPoint& point) {
    ++calls;
    if (point.tokens > fits) return absl::ResourceExhaustedError("no memory");
    const double blocks = static_cast<double>(point.tokens) / 128;
    const double seconds = seconds_per_tile_ * point.density * blocks * (blocks + 1) / 2;
    // The first call of a point is slow.
    const bool first = point.tokens != last_.tokens || point.density != last_.density;
    last_ = point;
    clock += first ? 3 * seconds : seconds;
    return Timing{.forward_seconds = seconds / 4 * (first ? 3 : 1),
                  .backward_seconds = seconds * 3 / 4 * (first ? 3 : 1),
                  .density = std::max(point.density, least_density)};
  }
  std::vector<Row> Measure(double budget) {
    return MeasureGrid(
        RowOf(1, 1, 1), MakeGrid(128, 131072, {0.02, 0.1, 0.5, 1.0}, 0), budget,
        [&](const GridPoint& point) { return Run(point); }, [&] { return clock; },
        [&] { return calls >= most_calls; });
  }

  double clock = 0;
  int calls = 0, most_calls = 1 << 30;
  int64_t fits = 1 << 30;
  double least_density = 0;

 private:
  const double seconds_per_tile_;
  GridPoint last_;
};

TEST(GridTest, MeasuresAllInTime) {
  Machine machine(1e-6);
  const std::vector<Row> rows = machine.Measure(20);
  EXPECT_EQ(rows.size(), MakeGrid(128, 131072, {0.02, 0.1, 0.5, 1.0}, 0).size());
  const absl::StatusOr<LatencyTable> table = MakeTable(rows);
  ASSERT_TRUE(table.ok()) << table.status();
  const double blocks = 1024;  // of 128 tokens
  EXPECT_NEAR(table->Predict(131072, 0.5), 1e3 * 1e-6 * 0.5 * blocks * (blocks + 1) / 2, 1e-6)
      << "not the slow first call";
  EXPECT_NEAR(table->rows.back().forward_p50_ms * 4, table->rows.back().p50_ms, 1e-6);
  EXPECT_NEAR(table->rows.back().p90_ms, table->rows.back().p50_ms, 1e-6) << "not there either";
}

// A machine on which the grid takes hours: it still ends in time, with the points that fit.
TEST(GridTest, StopsInTimeOnASlowMachine) {
  for (const double seconds_per_tile : {1e-5, 1e-4, 1e-3, 1e-2}) {
    Machine machine(seconds_per_tile);
    const std::vector<Row> rows = machine.Measure(20);
    EXPECT_THAT(machine.clock, Lt(24)) << seconds_per_tile;
    EXPECT_FALSE(rows.empty()) << seconds_per_tile;
    EXPECT_TRUE(MakeTable(rows).ok());
  }
  Machine machine(1);
  EXPECT_THAT(machine.Measure(0), IsEmpty());
  EXPECT_EQ(machine.calls, 0);
}

TEST(GridTest, EndsWhereAStopIsAskedForOrMemoryEnds) {
  Machine stopped(1e-6);
  stopped.most_calls = 20;
  EXPECT_EQ(stopped.Measure(20).size(), 3u);
  EXPECT_EQ(stopped.calls, 20);
  Machine small(1e-6);
  small.fits = 8192;
  EXPECT_EQ(small.Measure(20).back().tokens, 8192);
}

// A pattern that keeps more than was wished for gives each density once.
TEST(GridTest, ADensityIsMeasuredOnce) {
  Machine machine(1e-6);
  machine.least_density = 0.3;
  const std::vector<Row> rows = machine.Measure(20);
  EXPECT_TRUE(MakeTable(rows).ok()) << MakeTable(rows).status();
  EXPECT_EQ(rows[0].density, 0.3);
  EXPECT_EQ(rows[1].density, 0.5);
}

TEST(GridTest, LengthsEndWithTheJobs) {
  const std::vector<GridPoint> grid = MakeGrid(128, 50000, {0.1, 1.0}, 4096);
  EXPECT_EQ(grid.front().tokens, 2048);
  EXPECT_EQ(grid.back().tokens, 50000 / 128 * 128);
  EXPECT_EQ(grid.back().document_tokens, 4096);
  EXPECT_EQ(grid.size(), 2u + 4 + 4 + 4 - 0);
  for (const GridPoint& point : grid) EXPECT_GE(point.tokens, 2 * point.document_tokens);
  EXPECT_EQ(MakeGrid(128, 1024, {1.0}, 4096).size(), 1u);
  EXPECT_THAT(MakeGrid(128, 100, {1.0}, 0), IsEmpty());
}

}  // namespace
}  // namespace ringleader::balance
