// Every cell of the bench in small: what it says is right, and what it cannot do it says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/testing/temp_dir.h"
#include "bench/longca/cell.h"
#include "bench/longca/cpu/cpu_ring_cells.h"
#include "bench/longca/kernel_cells.h"
#include "bench/longca/problem.h"
#include "ring/head_shares.h"

namespace ringleader::bench {
namespace {

using kernels::MaskKind;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::SizeIs;

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
         {Choice{}, Choice{Choice::Kind::kUniform, 0.3}, Choice{Choice::Kind::kVariable, 0.3},
          Choice{Choice::Kind::kLearned, 0.3}}) {
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

TEST(RingCellsTest, EveryMaskIsRightUnderEveryScheme) {
  std::map<std::string, std::set<std::string>> unsupported;  // masks by scheme
  std::map<std::string, std::set<double>> whole, spared;     // MiB by scheme, ranks and direction
  CpuRingCells bench;
  std::vector<Scheme> schemes = SchemesOn(4);
  schemes.push_back(SchemesOn(1).front());
  schemes.push_back({{ring::RingKind::kFlat, 2, 1}, kernels::LayoutKind::kStriped});
  schemes.push_back(
      {{ring::RingKind::kHierarchical, 2, 2}, kernels::LayoutKind::kStriped, /*head_ranks=*/2});
  for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
    for (const Scheme& scheme : schemes) {
      const auto cells = bench.Measure({static_cast<MaskKind>(kind), {}, scheme}, 1024, 1);
      for (const Cell& cell : cells) {
        if (cell.note == "unsupported") unsupported[cell.scheme].insert(cell.mask);
        if (!cell.note.empty()) {
          EXPECT_EQ(cell.note, "unsupported") << cell.mask;
          continue;
        }
        EXPECT_FALSE(cell.is_wrong()) << cell.mask << " " << cell.scheme << " " << cell.error;
        EXPECT_GE(cell.imbalance, 1);
        EXPECT_EQ(cell.mib_moved > 0, cell.ranks > 1);
        EXPECT_LE(cell.mib_moved, cell.mib_whole);
        if (cell.mask == "full") {
          EXPECT_EQ(cell.mib_moved, cell.mib_whole) << cell.scheme;
        }
        const std::string of =
            absl::StrCat(cell.scheme, ", ", cell.ranks, " ranks ", cell.direction);
        whole[of].insert(cell.mib_whole);
        spared[of].insert(cell.mib_whole - cell.mib_moved);
      }
    }
  }
  // Helpers send what their mask asks for; others as much under any, if they sent all.
  for (const auto& [name, mib] : whole) {
    if (!absl::StrContains(name, "helpers")) {
      EXPECT_THAT(mib, SizeIs(1)) << name;
    }
  }
  EXPECT_GT(spared["flat contiguous, 4 ranks forward"].size(), 3)
      << "masks of which hops carry some rows";
  EXPECT_GT(spared["flat contiguous, 4 ranks backward"].size(), 3);
  EXPECT_THAT(spared["all-gather striped, 4 ranks forward"], ElementsAre(0));
  for (const Scheme& scheme : schemes) {
    using Masks = std::set<std::string>;
    EXPECT_EQ(unsupported[scheme.name()],
              scheme.has_helpers
                  ? Masks({"full", "full_window", "full_documents", "global_sliding",
                           "prefix_documents", "prefix_causal", "block_causal_documents"})
                  : Masks())
        << scheme.name();
  }
}

// A choice of more blocks than its pattern takes is no mistake of the run.
TEST(RingCellsTest, APatternThatTakesNoSuchLengthIsUnsupported) {
  CpuRingCells bench;
  const PatternChoice moba = {PatternCalled("moba"), 0.3};
  for (const Cell& cell :
       bench.Measure({MaskKind::kCausal, moba, SchemesOn(1).front()}, 65536, 1)) {
    EXPECT_EQ(cell.note, "unsupported") << "1,024 blocks of a tile";
    EXPECT_FALSE(cell.is_wrong());
  }
}

TEST(RingCellsTest, EveryPatternIsRightUnderEverySchemeWithTheMasksThatItGoesWith) {
  const std::set<std::string> causal = {"causal", "causal_documents"};
  std::set<std::string> any = causal;
  any.insert(
      {"full", "full_documents", "prefix_causal", "prefix_documents", "block_causal_documents"});
  EXPECT_THAT(ChoosingPatterns(), ElementsAre("vertical_slash", "block_topk", "moba", "xattention",
                                              "key_groups", "adaspa", "fixed_blocks"));
  for (const std::string& name : ChoosingPatterns()) {
    CpuRingCells bench;
    const PatternChoice choice = {PatternCalled(name), 0.3};
    std::set<std::string> masks;
    std::map<std::string, std::set<std::string>> unsupported;  // schemes by mask
    for (int kind = 0; kind < kernels::kMaskKinds; ++kind) {
      for (const Scheme& scheme : SchemesOn(4)) {
        for (const Cell& cell :
             bench.Measure({static_cast<MaskKind>(kind), choice, scheme}, 512, 1)) {
          if (cell.note == "unsupported") {
            unsupported[cell.mask].insert(cell.scheme);
            continue;
          }
          masks.insert(cell.mask);
          EXPECT_EQ(cell.note, "") << cell.mask << " " << cell.scheme;
          EXPECT_EQ(cell.choice, name + " 30 %");
          EXPECT_LE(cell.mib_moved, cell.mib_whole) << cell.choice << " " << cell.scheme;
          EXPECT_FALSE(cell.is_wrong()) << cell.mask << " " << cell.choice << " " << cell.scheme;
        }
      }
    }
    for (const std::string& mask : masks) {
      std::set<std::string> refused = {"flat contiguous with helpers"};
      // Heads are even or odd to their rank, and ties go by that: none has one alone.
      if (name != "fixed_blocks") refused.insert("ulysses");
      EXPECT_EQ(unsupported[mask], refused);
    }
    const auto share = [&](const PatternChoice& of) {
      return bench.Measure({MaskKind::kCausal, of, SchemesOn(1).front()}, 2048, 1)[0].share;
    };
    EXPECT_GT(share(choice), 0.2 * share({})) << name;
    // Tiles count as a whole, of which with moba one query may have chosen a block.
    EXPECT_LT(share(choice), (name == "moba" ? 1.0 : 0.45) * share({})) << name;
    const bool takes_masks =
        !std::set<std::string>{"vertical_slash", "moba", "key_groups"}.contains(name);
    EXPECT_EQ(masks, takes_masks ? any : causal) << name;
  }
}

TEST(RingCellsTest, SchemesAreThoseThatHeadsDivideInto) {
  const auto names = [](int ranks) {
    std::vector<std::string> names;
    for (const Scheme& scheme : SchemesOn(ranks)) {
      EXPECT_EQ(scheme.ranks(), ranks) << scheme.name();
      names.push_back(scheme.name());
    }
    return names;
  };
  EXPECT_THAT(names(1), ElementsAre("one rank"));
  EXPECT_THAT(names(2),
              ElementsAre("flat contiguous", "flat contiguous with helpers", "flat zigzag",
                          "all-gather zigzag", "flat striped", "all-gather striped",
                          "all-gather striped in 2 head groups", "ulysses"));
  EXPECT_THAT(names(4), ElementsAre("flat contiguous", "flat contiguous with helpers",
                                    "flat zigzag", "hierarchical zigzag", "all-gather zigzag",
                                    "flat striped", "hierarchical striped", "all-gather striped",
                                    "all-gather striped in 2 head groups", "usp of 2 flat striped",
                                    "ulysses"));
  EXPECT_THAT(names(8), IsSupersetOf({"usp of 2 flat striped", "usp of 2 hierarchical striped",
                                      "usp of 4 flat striped"}));
  EXPECT_THAT(names(3), Not(Contains(HasSubstr("ulysses"))));
}

double MibOf(int64_t floats) {
  return static_cast<double>(floats) * sizeof(float) / 1048576;
}

// What a ring's rank sends forward: its keys and values to each of the others, once.
TEST(RingCellsTest, BytesAreThoseOfTheKeysAndValues) {
  const auto moved = [](const Scheme& scheme) {
    return CpuRingCells().Measure({MaskKind::kFull, {}, scheme}, 1024, 1)[0].mib_moved;
  };
  const double keys = MibOf(int64_t{3} * 2 * 256 * kKvHeads * kHeadDim);
  EXPECT_EQ(moved({{ring::RingKind::kFlat, 4, 1}, kernels::LayoutKind::kStriped}), keys);
  Scheme gather = {{ring::RingKind::kAllGather, 4, 1}, kernels::LayoutKind::kStriped};
  EXPECT_EQ(moved(gather), keys);
  gather.head_groups = 2;
  EXPECT_EQ(moved(gather), keys);
  const Scheme ulysses = {{}, kernels::LayoutKind::kContiguous, /*head_ranks=*/4};
  const ring::HeadShares shares = {.ranks = 4, .heads = kHeads, .kv_heads = kKvHeads};
  EXPECT_EQ(moved(ulysses), MibOf(shares.ForwardValues(256, kHeadDim)));
}

// Contiguous ranks have between one and all shards of keys to attend to. Helpers make odd numbers
// of ranks even, and leave even numbers a shard apart.
TEST(RingCellsTest, HelpersEvenOutContiguousRanks) {
  const auto imbalance = [](int ranks, bool has_helpers) {
    const auto cells =
        CpuRingCells().Measure({.mask = MaskKind::kCausal,
                                .choice = {},
                                .scheme = {.ring = {ring::RingKind::kFlat, ranks, 1},
                                           .layout = kernels::LayoutKind::kContiguous,
                                           .has_helpers = has_helpers}},
                               int64_t{512} * ranks, 1);
    EXPECT_EQ(cells[0].note, "");
    return cells[0].imbalance;
  };
  // Shards of 8 x 8 tiles: 36 on the diagonal, 64 elsewhere.
  EXPECT_DOUBLE_EQ(imbalance(4, false), (36 + 3 * 64) / (36 + 1.5 * 64));
  EXPECT_DOUBLE_EQ(imbalance(4, true), (36 + 2 * 64) / (36 + 1.5 * 64));
  EXPECT_DOUBLE_EQ(imbalance(3, false), (36 + 2 * 64) / (36.0 + 64));
  EXPECT_DOUBLE_EQ(imbalance(3, true), 1);
  EXPECT_DOUBLE_EQ(imbalance(5, true), 1);
}

// Of three ranks the first helps the last. Forward it sends most: its keys to the second and what
// it found to the last. Backward the last does: its queries with what they come with, and the
// gradients of the second's keys.
TEST(RingCellsTest, BytesOfHelpersAreKeysQueriesAndWhatWasFound) {
  const auto cells = CpuRingCells().Measure({.mask = MaskKind::kCausal,
                                             .choice = {},
                                             .scheme = {.ring = {ring::RingKind::kFlat, 3, 1},
                                                        .layout = kernels::LayoutKind::kContiguous,
                                                        .has_helpers = true}},
                                            384, 1);
  const int64_t keys = int64_t{2} * 128 * kKvHeads * kHeadDim,
                queries = int64_t{128} * kHeads * kHeadDim, rows = int64_t{128} * kHeads;
  EXPECT_EQ(cells[0].mib_moved, MibOf(keys + queries + rows));
  EXPECT_EQ(cells[1].mib_moved, MibOf(2 * queries + 2 * rows + keys));
}

int CountOf(const std::string& part, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(DocumentLengthsTest, FollowAHistogram) {
  const TempDir folder;
  const std::string path = folder.File("two kinds.json");
  const auto read = [&](const std::string& text) {
    EXPECT_EQ(WriteFileAtomically(path, text), absl::OkStatus());
    return DocumentLengths::OfHistogram(path);
  };
  const auto lengths = read(R"j({"[0,2)": 1, "[100,101)": 3.0, "[7,9)": 0})j");
  ASSERT_EQ(lengths.status(), absl::OkStatus());
  EXPECT_EQ(lengths->name(), "two kinds");
  const std::vector<int32_t> firsts = lengths->Firsts(1 << 20, 7);
  std::map<int32_t, int> counts;
  for (size_t i = 1; i < firsts.size(); ++i) ++counts[firsts[i] - firsts[i - 1]];
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_NEAR(counts[100] / static_cast<double>(counts[1]), 3, 0.2);
  EXPECT_EQ(lengths->Firsts(1 << 20, 7), firsts);
  EXPECT_NE(lengths->Firsts(1 << 20, 8), firsts);
  EXPECT_THAT(lengths->Firsts(1, 7), ElementsAre(0));
  // As python/tests/masks_bench_test.py has them.
  EXPECT_THAT(DocumentLengths().Firsts(131072, kSeed),
              ElementsAre(0, 23298, 28471, 49156, 103458, 105878, 114422));
  const auto reversed = read(R"j({"[100,201)": 1, "[8,16)": 2})j");
  ASSERT_EQ(reversed.status(), absl::OkStatus());
  EXPECT_THAT(reversed->Firsts(200, kSeed),
              ElementsAre(0, 13, 23, 36, 51, 60, 71, 84, 92, 100, 110, 123));

  for (const char* const wrong :
       {"", "[1, 2]", "{}", R"j({"[0,2)": 0})j", R"j({"[2,2)": 1})j", R"j({"[0,2": 1})j",
        R"j({"[0,2) ": 1})j", R"j({"0-2": 1})j", R"j({"[0,2)": -1})j", R"j({"[0,2)": "1"})j",
        R"j({"[0,99999999999)": 1})j"}) {
    EXPECT_THAT(read(wrong).status().message(), HasSubstr(path)) << wrong;
  }
  EXPECT_THAT(DocumentLengths::OfHistogram(folder.path().string()).status().message(),
              HasSubstr(folder.path().string()));
}

TEST(DocumentLengthsTest, AreThoseOfTheSequence) {
  const TempDir folder;
  const std::string path = folder.File("short.json");
  ASSERT_EQ(WriteFileAtomically(path, R"j({"[8,9)": 1})j"), absl::OkStatus());
  const auto lengths = DocumentLengths::OfHistogram(path);
  ASSERT_EQ(lengths.status(), absl::OkStatus());
  const Cell one = KernelCells(MaskKind::kCausalDocuments, {}, 256, 1, 1, *lengths)[0];
  EXPECT_EQ(one.share, 9.0 / 2 / 256);
  const Setting setting = {
      .mask = MaskKind::kCausalDocuments, .choice = {}, .scheme = SchemesOn(2)[0]};
  const Cell two = CpuRingCells(*lengths).Measure(setting, 256, 1)[0];
  EXPECT_EQ(two.note, "");
  EXPECT_FALSE(two.is_wrong()) << two.error;
  EXPECT_EQ(two.share, one.share);
}

TEST(WriteTableTest, HoldsEveryCellAndWhatWasNotMeasured) {
  const TempDir folder;
  std::vector<Cell> cells;
  for (const Scheme& scheme : SchemesOn(2)) {
    if (!scheme.has_helpers) continue;
    for (Cell& cell : CpuRingCells().Measure({MaskKind::kGlobalSliding, {}, scheme}, 256, 1))
      cells.push_back(cell);
  }
  for (const Scheme& scheme : SchemesOn(4)) {
    cells.push_back({.mask = "causal",
                     .choice = "all",
                     .scheme = scheme.name(),
                     .direction = "forward",
                     .note = "out of memory"});
  }
  cells.push_back({.mask = "full", .choice = "all", .scheme = "one rank", .direction = "forward"});
  const auto write = [&](const std::string& path) {
    return WriteTable(path, "cells", cells,
                      {.heads = kHeads,
                       .head_dim = kHeadDim,
                       .backend = "an engine",
                       .lengths = "pile",
                       .hardware = "2 x GPU, large",
                       .commit = "1234abcd"});
  };
  ASSERT_EQ(write(folder.path().string()), absl::OkStatus());
  const std::string csv = ReadFile(folder.File("cells.csv")).value();
  EXPECT_THAT(csv, HasSubstr("global_sliding,all,flat contiguous with helpers,backward,256,2,"
                             "unsupported,"));
  EXPECT_THAT(csv, HasSubstr("full,all,one rank,forward,0,1,,"));
  EXPECT_EQ(CountOf(",an engine,pile,2 x GPU; large,1234abcd,20", csv),
            static_cast<int>(cells.size()));
  std::set<int64_t> columns;
  for (size_t at = 0, end; (end = csv.find('\n', at)) != std::string::npos; at = end + 1) {
    columns.insert(std::count(csv.begin() + at, csv.begin() + end, ','));
  }
  EXPECT_EQ(columns.size(), 1u) << csv;
  EXPECT_THAT(ReadFile(folder.File("cells.svg")).value(), HasSubstr("unsupported"));
  EXPECT_EQ(write(folder.File("made")), absl::OkStatus());
  const std::string file = folder.File("cells.csv");
  EXPECT_EQ(write(file), absl::PermissionDeniedError(
                             absl::StrCat("cannot write into ", file, "; give --folder")));
}

}  // namespace
}  // namespace ringleader::bench
