// Every cell of the bench in small: what it says is right, and what it cannot do it says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "bench/longca/cell.h"
#include "bench/longca/kernel_cells.h"
#include "bench/longca/problem.h"
#include "bench/longca/ring_cells.h"

namespace ringleader::bench {
namespace {

using kernels::MaskKind;
using ::testing::HasSubstr;

TEST(CellTest, TheSlowestRankAndTheMeanAreOfEachRepetition) {
  Cell cell;
  SetTimes(std::vector<std::vector<double>>{{1, 9, 1}, {7, 1, 1}}, &cell);
  EXPECT_EQ(cell.slowest.median, 7);
  EXPECT_EQ(cell.mean.median, 4);
  const Spread spread = SpreadOf({5, 1, 2, 3, 4, 6});
  EXPECT_EQ(spread.median, 3.5);
  EXPECT_EQ(spread.p20, 2);
  EXPECT_EQ(spread.p80, 5);
  cell.error = 1e-3;
  EXPECT_TRUE(cell.is_wrong());
  cell.error = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(cell.is_wrong());
  cell.note = "unsupported";
  EXPECT_FALSE(cell.is_wrong());
}

TEST(KernelCellsTest, EveryMaskIsRightAloneAndWithLists) {
  for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
    for (const Choice& choice :
         {Choice{}, Choice{Choice::Kind::kUniform, 0.3}, Choice{Choice::Kind::kLearned, 0.3}}) {
      const auto cells = KernelCells(static_cast<MaskKind>(kind), choice, 320, 1, 2);
      ASSERT_EQ(cells.size(), 2u);
      for (const Cell& cell : cells) {
        EXPECT_EQ(cell.note, "");
        EXPECT_FALSE(cell.is_wrong()) << cell.mask << " " << cell.choice << " " << cell.error;
        EXPECT_GT(cell.gflops(kHeads, kHeadDim), 0);
        EXPECT_GT(cell.share, 0);
        EXPECT_LE(cell.share, 1);
        EXPECT_LE(cell.slowest.p20, cell.slowest.p80);
      }
    }
  }
}

TEST(RingCellsTest, EveryMaskThatJobsCanAskForIsRightUnderEveryScheme) {
  std::set<std::string> unsupported;
  for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
    for (const Scheme& scheme :
         {Scheme{{ring::RingKind::kFlat, 1, 1}, kernels::LayoutKind::kContiguous},
          Scheme{{ring::RingKind::kFlat, 2, 1}, kernels::LayoutKind::kStriped},
          Scheme{{ring::RingKind::kFlat, 4, 1}, kernels::LayoutKind::kZigzag},
          Scheme{{ring::RingKind::kHierarchical, 2, 2}, kernels::LayoutKind::kStriped},
          Scheme{{ring::RingKind::kAllGather, 4, 1}, kernels::LayoutKind::kStriped}}) {
      const auto cells = RingCells(static_cast<MaskKind>(kind), scheme, 1024, 1);
      for (const Cell& cell : cells) {
        if (cell.note == "unsupported") unsupported.insert(cell.mask);
        if (!cell.note.empty()) {
          EXPECT_EQ(cell.note, "unsupported") << cell.mask;
          continue;
        }
        EXPECT_FALSE(cell.is_wrong()) << cell.mask << " " << cell.scheme << " " << cell.error;
        EXPECT_GE(cell.imbalance, 1);
        EXPECT_EQ(cell.mib_moved > 0, cell.ranks > 1);
      }
    }
  }
  EXPECT_EQ(unsupported,
            (std::set<std::string>{"shared_question", "causal_blockwise", "global_sliding"}));
}

// What a ring's rank sends forward: its keys and values to each of the others, once.
TEST(RingCellsTest, BytesAreThoseOfTheKeysAndValues) {
  const auto cells = RingCells(
      MaskKind::kFull, {{ring::RingKind::kFlat, 4, 1}, kernels::LayoutKind::kStriped}, 1024, 1);
  EXPECT_EQ(cells[0].mib_moved, 3.0 * 2 * 256 * kKvHeads * kHeadDim * 4 / 1048576);
}

TEST(WriteTableTest, HoldsEveryCellAndWhatWasNotMeasured) {
  const TempDir folder;
  std::vector<Cell> cells =
      RingCells(MaskKind::kGlobalSliding,
                {{ring::RingKind::kFlat, 2, 1}, kernels::LayoutKind::kStriped}, 256, 1);
  cells.push_back({.mask = "full", .choice = "all", .scheme = "one rank", .direction = "forward"});
  ASSERT_TRUE(WriteTable(folder.path().string(), "cells", cells, kHeads, kHeadDim));
  const std::string csv = ReadFile(folder.File("cells.csv")).value();
  EXPECT_THAT(csv, HasSubstr("global_sliding,all,flat striped,backward,256,2,unsupported,"));
  EXPECT_THAT(csv, HasSubstr("full,all,one rank,forward,0,1,,"));
  std::set<int64_t> columns;
  for (size_t at = 0, end; (end = csv.find('\n', at)) != std::string::npos; at = end + 1) {
    columns.insert(std::count(csv.begin() + at, csv.begin() + end, ','));
  }
  EXPECT_EQ(columns.size(), 1u) << csv;
  EXPECT_THAT(ReadFile(folder.File("cells.svg")).value(), HasSubstr("unsupported"));
  EXPECT_FALSE(WriteTable(folder.File("nowhere"), "cells", cells, kHeads, kHeadDim));
}

}  // namespace
}  // namespace ringleader::bench
