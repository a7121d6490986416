// What a ring's hops carry under fixed blocks, against the tiles that the kernels keep.
#include "patterns/carried/carried_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "patterns/index/sequence_documents.h"
#include "ringleader/kernels/fixed_blocks.h"

namespace ringleader::patterns {
namespace {

using kernels::LayoutKind;
using kernels::ShardLayout;

constexpr int64_t kTokens = 3072;

struct Sequence {
  std::vector<int64_t> firsts;
  int64_t padding = 0;
};

std::shared_ptr<const SequenceDocuments> DocumentsOf(const AttentionOptions& options,
                                                     const ShardLayout& layout,
                                                     const Sequence& sequence,
                                                     const std::vector<int64_t>& prefix_ends) {
  if (options.mask == Mask::kCausal) {
    return MakeDocuments(layout, sequence.firsts, sequence.padding).value();
  }
  const MaskRule rule = {.mask = options.mask,
                         .block = options.mask_block,
                         .prefix_ends = prefix_ends,
                         .padding = sequence.padding};
  return MakeMasked(layout, sequence.firsts, rule, /*window=*/0).value();
}

// The blocks of the sequence that a rank's tiles of queries keep between them, a flag each.
std::vector<bool> KeptBy(const AttentionOptions& options, const ShardLayout& layout,
                         const SequenceDocuments* documents) {
  const kernels::FixedBlocksStep step = {
      .kept = FixedBlocksOf(options),
      .query_layout = layout,
      .seen = {.document_starts = documents == nullptr || documents->local_starts.empty()
                                      ? nullptr
                                      : documents->local_starts.data(),
               .intervals = documents == nullptr || documents->visible.empty()
                                ? nullptr
                                : documents->visible.data()},
      .heads = 1,
      .tile = options.tile};
  std::vector<bool> kept(kTokens / options.tile);
  for (int64_t a = 0; a < layout.local_tokens() / options.tile; ++a) {
    for (int64_t b = 0; b < std::ssize(kept); ++b) {
      if ((step.Word(a, static_cast<int32_t>(b / 32)) >> b % 32 & 1) != 0) kept[b] = true;
    }
  }
  return kept;
}

bool Holds(const ring::RowRuns& runs, int64_t row) {
  return std::ranges::any_of(
      runs, [&](const ring::RowRun& run) { return run.begin <= row && row < run.end; });
}

// In a flat ring hop h brings a rank the keys of the one that lies h + 1 before it.
void ExpectWhatIsKept(const AttentionOptions& options, int ranks, const Sequence& sequence) {
  std::vector<int64_t> prefix_ends;
  for (size_t i = 0; i < sequence.firsts.size(); ++i) {
    const int64_t end = i + 1 < sequence.firsts.size() ? sequence.firsts[i + 1] : kTokens;
    prefix_ends.push_back(std::min(end, sequence.firsts[i] + 140));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    ShardLayout layout = LayoutOf(options, ranks, rank, kTokens / ranks);
    const auto documents = DocumentsOf(options, layout, sequence, prefix_ends);
    const std::vector<bool> kept = KeptBy(options, layout, documents.get());
    const ring::TravellingRows rows = FindCarriedRows(
        options, ring::ForwardSchedule({ring::RingKind::kFlat, ranks, 1}, rank).value(),
        {.tokens = kTokens,
         .firsts = sequence.firsts,
         .prefix_ends = prefix_ends,
         .padding = sequence.padding},
        *KnownKeysOf(options, /*is_dense=*/false));
    ASSERT_EQ(std::ssize(rows.keys), ranks - 1);
    for (int hop = 0; hop + 1 < ranks; ++hop) {
      ShardLayout owner = layout;
      owner.rank = (rank - hop - 1 + ranks) % ranks;
      for (int64_t row = 0; row < owner.local_tokens(); row += options.tile) {
        const bool is_kept = kept[owner.Position(row) / options.tile],
                   has_come = Holds(rows.keys[hop].received, row);
        EXPECT_LE(is_kept, has_come)
            << "rank " << rank << ", row " << row << " of rank " << owner.rank;
        // The last hop brings nothing that another rank would need, and, with no sinks of other
        // documents, nothing that this one does not.
        if (hop + 2 == ranks && sequence.firsts.size() == 1) {
          EXPECT_EQ(has_come, is_kept)
              << "rank " << rank << ", row " << row << " of rank " << owner.rank;
        }
      }
    }
  }
}

class FixedBlocksCarriedTest : public ::testing::TestWithParam<std::tuple<Mask, LayoutKind>> {};

TEST_P(FixedBlocksCarriedTest, WhatTilesKeepComes) {
  const auto& [mask, layout] = GetParam();
  for (const auto& [local, sinks, stride] :
       {std::array{1, 1, 5}, {0, 3, 0}, {2, 0, 7}, {0, 0, 1}, {30, 2, 11}}) {
    for (const int tile : {64, 128}) {
      const AttentionOptions options = {.pattern = Pattern::kFixedBlocks,
                                        .mask = mask,
                                        .mask_block = 300,
                                        .local_blocks = local,
                                        .sink_blocks = sinks,
                                        .stride_blocks = stride,
                                        .tile = tile,
                                        .layout = layout,
                                        .stripe = 128};
      for (const int ranks : {2, 3, 4}) {
        for (const Sequence& sequence :
             {Sequence{{0}}, Sequence{{0, 100, 101, 130, 900, 1500, 2600}},
              Sequence{{0, 700, 2000, 2900}, 172}, Sequence{{0, 2800}, 272}}) {
          SCOPED_TRACE(::testing::Message()
                       << local << " " << sinks << " " << stride << ", tile " << tile << ", "
                       << ranks << " ranks, " << sequence.firsts.size() << " documents");
          ExpectWhatIsKept(options, ranks, sequence);
        }
      }
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Mask, LayoutKind>>& info) {
  const auto& [mask, layout] = info.param;
  const char* const layouts[] = {"Contiguous", "Zigzag", "Striped"};
  std::string name(MaskName(mask));
  std::erase(name, '_');
  return name + layouts[static_cast<int>(layout)];
}

INSTANTIATE_TEST_SUITE_P(Settings, FixedBlocksCarriedTest,
                         ::testing::Combine(::testing::Values(Mask::kCausal, Mask::kFull,
                                                              Mask::kPrefixLm, Mask::kBlockCausal),
                                            ::testing::Values(LayoutKind::kContiguous,
                                                              LayoutKind::kZigzag,
                                                              LayoutKind::kStriped)),
                         NameOf);

}  // namespace
}  // namespace ringleader::patterns
