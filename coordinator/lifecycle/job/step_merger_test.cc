#include "coordinator/lifecycle/job/step_merger.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include "base/testing/equals_text.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

v1::StepReport Report(uint64_t step, int32_t rank) {
  v1::StepReport report;
  report.set_step(step);
  report.set_rank(rank);
  report.set_loss(2.5);
  return report;
}

class StepMergerTest : public ::testing::Test {
 protected:
  std::optional<v1::StepReport> Add(uint64_t step, int32_t rank) {
    return merger_.Add(Report(step, rank), {"n", "i", next_++}, &released_);
  }
  std::vector<uint64_t> Released() {
    std::vector<uint64_t> sequences;
    for (const StepMerger::Origin& origin : std::exchange(released_, {})) {
      sequences.push_back(origin.sequence);
    }
    return sequences;
  }

  StepMerger merger_{2};
  std::vector<StepMerger::Origin> released_;
  uint64_t next_ = 1;
};

TEST_F(StepMergerTest, KeepsReportsUntilAllRanksHaveSpoken) {
  EXPECT_FALSE(Add(1, 0));
  EXPECT_THAT(Released(), IsEmpty());
  const std::optional<v1::StepReport> merged = Add(1, 1);
  ASSERT_TRUE(merged);
  EXPECT_EQ(merged->step(), 1);
  EXPECT_EQ(merged->rank(), -1);
  EXPECT_THAT(Released(), ElementsAre(1, 2));
}

TEST_F(StepMergerTest, TheLargestGroupAndAllLengthsAreThere) {
  std::vector<v1::StepReport> reports = {Report(1, 0), Report(1, 1)};
  for (int rank = 0; rank < 2; ++rank) {
    reports[rank].set_group_micro_batches(3 - rank);
    reports[rank].set_group_tokens(100 + 50 * rank);
    for (int bin = rank; bin < 2; ++bin) {
      v1::LengthReport* const length = reports[rank].add_lengths();
      length->set_tokens(64 << bin);
      length->set_micro_batches(1 + rank);
      length->set_visited_tiles(10);
      length->set_causal_tiles(40);
    }
  }
  const v1::StepReport merged = MergeSteps(reports);
  EXPECT_EQ(merged.group_micro_batches(), 3u);
  EXPECT_EQ(merged.group_tokens(), 150u);
  ASSERT_EQ(merged.lengths_size(), 2);
  EXPECT_EQ(merged.lengths(0).tokens(), 64u);
  EXPECT_EQ(merged.lengths(0).visited_tiles(), 10u);
  EXPECT_EQ(merged.lengths(1).tokens(), 128u);
  EXPECT_EQ(merged.lengths(1).micro_batches(), 3u);
  EXPECT_EQ(merged.lengths(1).visited_tiles(), 20u);
  EXPECT_EQ(merged.lengths(1).causal_tiles(), 80u);
}

// That of one rank, whose worker says whatever it likes.
TEST_F(StepMergerTest, ReportsThatNothingCompletesAreBoundedByTheirBytes) {
  constexpr uint64_t kSteps = 300'000;
  for (uint64_t step = 1; step <= kSteps; ++step) EXPECT_FALSE(Add(step, 0));
  const size_t gone = Released().size();
  EXPECT_GT(gone, kSteps / 3);
  EXPECT_LE(gone, kSteps - 100'000) << "a worker may hold so many";
  // The oldest went.
  EXPECT_TRUE(Add(gone + 1, 1));
  EXPECT_FALSE(Add(gone + 2, 0));
  EXPECT_TRUE(Add(kSteps, 1));
}

TEST_F(StepMergerTest, DetailsOfTheOldestReportsGoFirst) {
  merger_ = StepMerger(2, 0, size_t{1} << 20);
  const auto add = [&](uint64_t step, int32_t rank) {
    v1::StepReport report = Report(step, rank);
    for (int layer = 0; layer < 64; ++layer) report.add_layers()->set_layer(layer);
    report.add_lengths()->set_tokens(64);
    report.add_documents()->set_tokens(64);
    return merger_.Add(std::move(report), {"n", "i", next_++}, &released_);
  };
  for (uint64_t step = 1; step <= 500; ++step) EXPECT_FALSE(add(step, 0));
  EXPECT_THAT(Released(), IsEmpty());
  for (uint64_t step = 1; step <= 500; ++step) {
    const auto merged = add(step, 1);
    ASSERT_TRUE(merged) << step;
    EXPECT_EQ(merged->layers_size(), step <= 400 ? 0 : 64) << step;
    EXPECT_EQ(merged->lengths_size(), step <= 400 ? 0 : 1) << step;
    EXPECT_EQ(merged->documents_size(), step <= 400 ? 0 : 1) << step;
    if (step == 100) step = 490;
  }
  EXPECT_FALSE(add(501, 0));
  const auto next = add(501, 1);
  ASSERT_TRUE(next) << "there is room again";
  EXPECT_EQ(next->layers_size(), 64);
}

// Its session broke before it heard that the first was taken in.
TEST_F(StepMergerTest, AReportThatComesAgainIsHeldOnce) {
  for (int i = 0; i < 3; ++i) {
    merger_.Add(Report(1, 0), {"n", "i", 7}, &released_);
  }
  EXPECT_THAT(Released(), IsEmpty());
  EXPECT_FALSE(Add(1, 0)) << "under another number";
  EXPECT_THAT(Released(), ElementsAre(7));
  EXPECT_TRUE(Add(1, 1));
  EXPECT_THAT(Released(), ElementsAre(1, 2));
}

TEST_F(StepMergerTest, WhatIsGoneOrComesAgainTakesNoRoom) {
  constexpr uint64_t kMany = 5000;
  merger_ = StepMerger(2, 0, size_t{1} << 20);
  for (uint64_t step = 1; step <= kMany; ++step) {
    EXPECT_FALSE(Add(step, 0));
    EXPECT_TRUE(Add(step, 1));
  }
  Released();
  v1::StepReport detailed = Report(kMany + 1, 0);
  detailed.add_layers();
  for (uint64_t i = 0; i < kMany; ++i) merger_.Add(detailed, {"n", "i", next_}, &released_);
  EXPECT_THAT(Released(), IsEmpty());
  const auto merged = merger_.Add(Report(kMany + 1, 1), {"n", "i", ++next_}, &released_);
  ASSERT_TRUE(merged);
  EXPECT_EQ(merged->layers_size(), 1);
}

TEST_F(StepMergerTest, ARankMayBeAhead) {
  EXPECT_FALSE(Add(1, 0));
  EXPECT_FALSE(Add(2, 0));
  EXPECT_TRUE(Add(1, 1));
  EXPECT_TRUE(Add(2, 1));
}

// Ranks report in order: what is missing of it will not come any more.
TEST_F(StepMergerTest, AnEarlierStepThatStaysIncompleteIsLetGo) {
  EXPECT_FALSE(Add(1, 0));
  EXPECT_FALSE(Add(2, 0));
  EXPECT_TRUE(Add(2, 1));
  EXPECT_THAT(Released(), ElementsAre(1, 2, 3));
  EXPECT_FALSE(Add(1, 1));
  EXPECT_THAT(Released(), ElementsAre(4));
  EXPECT_THAT(merger_.Finish(2, &released_), IsEmpty());
}

TEST_F(StepMergerTest, RepeatedAndLateReportsAreLetGo) {
  EXPECT_FALSE(Add(1, 0));
  EXPECT_FALSE(Add(1, 0));  // sent again
  EXPECT_TRUE(Add(1, 1));
  EXPECT_THAT(Released(), ElementsAre(1, 2, 3));
  EXPECT_FALSE(Add(1, 1));
  EXPECT_THAT(Released(), ElementsAre(4));
}

TEST_F(StepMergerTest, RanksOutsideTheAttemptAreIgnored) {
  EXPECT_FALSE(Add(1, 2));
  EXPECT_FALSE(Add(1, -1));
  EXPECT_THAT(Released(), ElementsAre(1, 2));
}

TEST_F(StepMergerTest, AtTheEndWhatThereIsCounts) {
  EXPECT_FALSE(Add(7, 1));
  const std::vector<StepMerger::Unfinished> unfinished = merger_.Finish(6, &released_);
  ASSERT_EQ(unfinished.size(), 1u);
  EXPECT_EQ(unfinished[0].merged.step(), 7);
  EXPECT_TRUE(unfinished[0].is_believed);
  EXPECT_THAT(Released(), ElementsAre(1));
  EXPECT_THAT(merger_.Finish(6, &released_), IsEmpty());
  EXPECT_FALSE(Add(7, 0));
  EXPECT_THAT(Released(), ElementsAre(2)) << "the step is over";
}

TEST_F(StepMergerTest, AtTheEndRankZeroSaysHowFarTheyCame) {
  for (const auto& [step, rank] : {std::pair{5, 1}, {6, 1}, {7, 0}, {8, 1}}) {
    EXPECT_FALSE(Add(step, rank));
  }
  std::vector<uint64_t> believed;
  for (const StepMerger::Unfinished& step : merger_.Finish(4, &released_)) {
    if (step.is_believed) believed.push_back(step.merged.step());
  }
  EXPECT_THAT(believed, ElementsAre(5, 7));
  EXPECT_THAT(Released(), ElementsAre(1, 2, 3, 4));
}

// A rank that fills them in would shift all others' paces, and have their nodes shunned.
TEST(MergeStepsTest, WhatIsMergedOnlyIsNoRanksToSay) {
  std::vector<v1::StepReport> reports;
  for (int rank = 0; rank < 2; ++rank) {
    v1::StepReport& report = reports.emplace_back(Report(3, rank));
    report.clear_layers();
    report.set_rank_tokens(10);
    report.mutable_phases()->set_linear(rank + 1);
    report.add_rank_paces(7);
    report.add_rank_tiles(7);
    report.set_most_tiles(7);
    report.set_most_tiles_rank(1);
  }
  const v1::StepReport merged = MergeSteps(reports);
  EXPECT_THAT(merged.rank_paces(), ElementsAre(1e5, 2e5));
  EXPECT_THAT(merged.rank_tiles(), IsEmpty());
  EXPECT_EQ(merged.most_tiles(), 0u);
  EXPECT_EQ(merged.most_tiles_rank(), 0u);
}

// Ranks that share out heads say which they have; another group's ranks have the same ones.
TEST(MergeStepsTest, HeadsAreMergedByTheirNumber) {
  std::vector<v1::StepReport> reports;
  for (int rank = 0; rank < 4; ++rank) {
    v1::StepReport& report = reports.emplace_back(Report(3, rank));
    report.set_head_bytes(100 + rank);
    report.set_ring_bytes(10 + rank);
    report.set_whole_ring_bytes(20);
    v1::LayerReport* const layer = report.add_layers();
    layer->set_first_head(rank % 2 * 2);
    for (int head = 0; head < 2; ++head) {
      layer->add_probed_recall_by_head(static_cast<float>(rank) + 0.25F * static_cast<float>(head));
    }
  }
  const v1::StepReport merged = MergeSteps(reports);
  EXPECT_THAT(merged.layers(0).probed_recall_by_head(), ElementsAre(1, 1.25, 2, 2.25));
  EXPECT_EQ(merged.layers(0).first_head(), 0u);
  EXPECT_EQ(merged.head_bytes(), 103u);
  EXPECT_EQ(merged.ring_bytes(), 46u);
  EXPECT_EQ(merged.whole_ring_bytes(), 80u);
  reports[0].mutable_layers(0)->set_first_head(4'000'000'000);
  EXPECT_LT(MergeSteps(reports).layers(0).probed_recall_by_head_size(), 5000);
}

TEST(MergeStepsTest, MaximaMeansAndLoads) {
  v1::StepReport first = Report(3, 0), second = Report(3, 1);
  first.set_step_seconds(2);
  second.set_step_seconds(3);
  first.mutable_phases()->set_data(0.5);
  second.mutable_phases()->set_linear(1);
  first.mutable_phases()->set_exposed_offload(0.125);
  first.set_peak_memory_bytes(10);
  second.set_peak_memory_bytes(20);
  const auto layer = [](v1::StepReport* report, double density, double recall,
                        std::vector<uint64_t> tiles) {
    v1::LayerReport* added = report->add_layers();
    added->set_layer(1);
    added->set_density(density);
    added->set_recall(recall);
    added->set_slashes_at_budget(density * 2);
    added->set_balanced(4);
    added->set_anchor_missed(tiles[0] / 10);
    added->mutable_tiles_per_ring_step()->Add(tiles.begin(), tiles.end());
  };
  layer(&first, 0.2, 0.9, {10, 30});
  layer(&second, 0.4, -1, {30, 50});
  for (const float recall : {0.5F, 0.25F}) {  // as a data-parallel group each
    first.mutable_layers(0)->add_probed_recall_by_head(recall);
    second.mutable_layers(0)->add_probed_recall_by_head(recall + 0.5F);
  }
  first.mutable_layers(0)->set_probed_recall(0.375);
  second.mutable_layers(0)->set_probed_recall(0.875);
  const v1::StepReport merged = MergeSteps({first, second});
  EXPECT_EQ(merged.loss(), 2.5);
  EXPECT_EQ(merged.step_seconds(), 3);
  EXPECT_EQ(merged.phases().data(), 0.5);
  EXPECT_EQ(merged.phases().linear(), 1);
  EXPECT_EQ(merged.phases().exposed_offload(), 0.125);
  EXPECT_EQ(merged.peak_memory_bytes(), 20);
  ASSERT_EQ(merged.layers_size(), 1);
  EXPECT_NEAR(merged.layers(0).density(), 0.3, 1e-12);
  EXPECT_NEAR(merged.layers(0).slashes_at_budget(), 0.6, 1e-12);
  EXPECT_EQ(merged.layers(0).balanced(), 8u);
  EXPECT_EQ(merged.layers(0).anchor_missed(), 4u);
  EXPECT_EQ(merged.layers(0).recall(), 0.9);  // only one rank estimated it
  EXPECT_THAT(merged.layers(0).probed_recall_by_head(), ElementsAre(0.75F, 0.5F));
  EXPECT_EQ(merged.layers(0).probed_recall(), 0.625);
  EXPECT_THAT(merged.layers(0).tiles_per_ring_step(), ElementsAre(40, 80));
  EXPECT_THAT(merged.rank_tiles(), ElementsAre(40, 80));
  EXPECT_EQ(merged.most_tiles(), 80u);
  EXPECT_EQ(merged.most_tiles_rank(), 1u);
  EXPECT_NEAR(merged.worker_imbalance(), 80 / 60.0, 1e-12);
  EXPECT_NEAR(merged.step_imbalance(), 30 / 20.0, 1e-12);
}

TEST(MergeStepsTest, AStepWithoutAProbeHasNoneMerged) {
  v1::StepReport report = Report(1, 0);
  report.add_layers();
  const v1::StepReport merged = MergeSteps({report});
  EXPECT_FALSE(merged.layers(0).has_probed_recall());
  EXPECT_EQ(merged.layers(0).probed_recall_by_head_size(), 0);
}

// Two groups of two ranks; in each layer and ring step the ranks of a group wait for each other.
TEST(MergeStepsTest, ImbalanceIsThatOfRanksThatWaitForEachOther) {
  std::vector<v1::StepReport> reports;
  const auto add = [&](uint32_t group, double seconds,
                       const std::vector<std::vector<uint64_t>>& layers) {
    v1::StepReport& report = reports.emplace_back(Report(1, static_cast<int>(reports.size())));
    report.set_group(group);
    report.set_rank_tokens(1000);
    report.mutable_phases()->set_attention_forward(seconds);
    report.mutable_phases()->set_linear(group == 0 ? 1 : 3);
    for (const std::vector<uint64_t>& tiles : layers) {
      v1::LayerReport* const layer = report.add_layers();
      layer->set_layer(static_cast<uint32_t>(report.layers_size() - 1));
      layer->mutable_tiles_per_ring_step()->Add(tiles.begin(), tiles.end());
    }
  };
  // A tile takes a tenth of a second; both ranks have as many in all.
  add(0, 4, {{10, 10}, {15, 5}});
  add(0, 4, {{10, 10}, {5, 15}});
  add(1, 8, {{20, 20}, {20, 20}});
  add(1, 8, {{20, 20}, {20, 20}});
  const v1::StepReport merged = MergeSteps(reports);
  EXPECT_DOUBLE_EQ(merged.layers(0).ring_imbalance(), 1);
  // Of the second layer's two steps: 1.5 against 1 s in one group, and 2 against 2 in the other.
  EXPECT_DOUBLE_EQ(merged.layers(1).ring_imbalance(), (1.5 + 1.5 + 2 + 2) / (1 + 1 + 2 + 2));
  EXPECT_DOUBLE_EQ(merged.ring_imbalance(), (2.0 + 3.0 + 4.0 + 4.0) / (2 + 2 + 4 + 4));
  EXPECT_DOUBLE_EQ(merged.group_imbalance(), 11 / 8.0) << "5 s and 11 s";
  EXPECT_THAT(merged.rank_paces(), ElementsAre(1000, 1000, 3000, 3000));
  // A rank that takes longer for a tile shows, though it has as many.
  reports[1].mutable_phases()->set_attention_forward(8);
  EXPECT_GT(MergeSteps(reports).layers(0).ring_imbalance(), 1.1);
}

// A worker that ran out of room sends them so.
TEST(MergeStepsTest, AReportWithoutLayersIsNoWordAboutTheLoad) {
  std::vector<v1::StepReport> reports = {Report(1, 0), Report(1, 1), Report(1, 2)};
  reports[1].add_layers()->add_tiles_per_ring_step(10);
  reports[2].add_layers()->add_tiles_per_ring_step(30);
  const v1::StepReport merged = MergeSteps(reports);
  EXPECT_THAT(merged.rank_tiles(), ElementsAre(10, 30));
  EXPECT_EQ(merged.worker_imbalance(), 1.5);
  EXPECT_EQ(merged.most_tiles(), 30u);
  EXPECT_EQ(merged.most_tiles_rank(), 2u);
}

TEST(MergeStepsTest, AStepEndsWithItsLastRank) {
  std::vector<v1::StepReport> reports = {Report(1, 0), Report(1, 1), Report(1, 2)};
  for (const auto& [rank, seconds] : {std::pair{0, 100}, {1, 102}, {2, 101}}) {
    reports[rank].mutable_time()->set_seconds(seconds);
  }
  EXPECT_EQ(MergeSteps(reports).time().seconds(), 102);
}

// Ranks 0 and 1 are a group, rank 2 is another.
TEST(MergeStepsTest, FieldByField) {
  std::vector<v1::StepReport> reports(3);
  const std::string texts[] = {
      R"(step: 3 loss: 2.5 gradient_norm: 1.5 learning_rate: 0.125 tokens: 600 step_seconds: 3
         phases { data: 1 index: 1 attention_forward: 2 linear: 1 optimizer: 2 }
         peak_memory_bytes: 10 plan_version: 2 time { seconds: 100 } samples: 6 micro_batches: 4
         padding_tokens: 30 dealt_imbalance: 1.25 overlong_documents: 1 overlong_tokens: 70
         group: 1 group_micro_batches: 2 group_tokens: 300 rank_tokens: 100
         lengths { tokens: 64 micro_batches: 1 visited_tiles: 5 causal_tiles: 10 }
         documents { tokens: 64 count: 2 } head_bytes: 5 ring_bytes: 7 whole_ring_bytes: 9
         layers { layer: 1 density: 0.25 verticals: 4 slashes: 2 recall: 0.5
                  tiles_per_ring_step: [6, 2] column_tiles: 8 verticals_at_budget: 0.5
                  slashes_at_budget: 0.25 balanced: 1 anchor_missed: 1 })",
      R"(step: 3 rank: 1 loss: 2.5 gradient_norm: 1.5 learning_rate: 0.125 tokens: 600 step_seconds: 4
         phases { data: 2 attention_forward: 1 attention_backward: 1 linear: 1 }
         peak_memory_bytes: 30 skipped: true plan_version: 2 time { seconds: 102 }
         group: 1 group_micro_batches: 5 group_tokens: 400 documents { tokens: 64 count: 2 }
         head_bytes: 8 ring_bytes: 1 whole_ring_bytes: 2
         layers { layer: 1 density: 0.5 verticals: 2 slashes: 1 recall: -1
                  tiles_per_ring_step: [2, 2] column_tiles: 4 verticals_at_budget: 0.25
                  slashes_at_budget: 0.5 balanced: 2 })",
      R"(step: 3 rank: 2 loss: 2.5 gradient_norm: 1.5 learning_rate: 0.125 tokens: 600 step_seconds: 2
         phases { attention_forward: 1 linear: 11 } peak_memory_bytes: 20 plan_version: 2
         time { seconds: 101 } group_micro_batches: 3 group_tokens: 350 rank_tokens: 1000
         lengths { tokens: 128 micro_batches: 1 visited_tiles: 1 causal_tiles: 1 }
         lengths { tokens: 64 micro_batches: 2 visited_tiles: 6 causal_tiles: 20 }
         documents { tokens: 128 count: 1 } head_bytes: 3 ring_bytes: 4 whole_ring_bytes: 8
         layers { layer: 1 density: 0.75 slashes: 3 recall: 1 tiles_per_ring_step: [4, 4]
                  verticals_at_budget: 0.75 slashes_at_budget: 0.75 balanced: 3
                  anchor_missed: 2 })"};
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(texts[rank], &reports[rank]));
  }
  // A tile takes an eighth of a second on ranks 0 and 2, a fourth on rank 1. In group 1's two ring
  // steps the slower rank takes 0.75 and 0.5 s where the mean is 0.625 and 0.375.
  EXPECT_THAT(MergeSteps(reports), EqualsText(R"(
    step: 3 rank: -1 loss: 2.5 gradient_norm: 1.5 learning_rate: 0.125 tokens: 600 step_seconds: 4
    phases { data: 2 index: 1 attention_forward: 2 attention_backward: 1 linear: 11 optimizer: 2 }
    peak_memory_bytes: 30 skipped: true plan_version: 2 time { seconds: 102 } samples: 6
    micro_batches: 4 padding_tokens: 30 dealt_imbalance: 1.25 overlong_documents: 1
    overlong_tokens: 70 group_micro_batches: 5 group_tokens: 400
    lengths { tokens: 64 micro_batches: 3 visited_tiles: 11 causal_tiles: 30 }
    lengths { tokens: 128 micro_batches: 1 visited_tiles: 1 causal_tiles: 1 }
    documents { tokens: 64 count: 2 } documents { tokens: 128 count: 1 }
    head_bytes: 8 ring_bytes: 12 whole_ring_bytes: 19
    layers { layer: 1 density: 0.5 verticals: 2 slashes: 2 recall: 0.75 tiles_per_ring_step: [12, 8]
             column_tiles: 12 verticals_at_budget: 0.5 slashes_at_budget: 0.5 balanced: 6
             anchor_missed: 3 ring_imbalance: 1.125 }
    worker_imbalance: 1.5 step_imbalance: 1.5 rank_tiles: [16, 8, 8] most_tiles: 16
    rank_paces: [10000, 0, 11000] ring_imbalance: 1.125 group_imbalance: 1.5
  )"));
}

TEST(MergeStepsTest, NoLoadIsNoImbalance) {
  const v1::StepReport merged = MergeSteps({Report(1, 0), Report(1, 1)});
  EXPECT_EQ(merged.worker_imbalance(), 1);
  EXPECT_EQ(merged.ring_imbalance(), 1);
  EXPECT_EQ(merged.group_imbalance(), 1);
}

}  // namespace
}  // namespace ringleader::lifecycle
