// What rank 0 measures before the first step, and that it changes nothing of the training.
#include <algorithm>
#include <cmath>
#include <limits>

#include "balance/latency_table.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/trainer/measure/attention_grid.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using patterns::Pattern;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::RecordingHost;
using ::testing::SizeIs;

class MeasureTest : public ::testing::Test {
 protected:
  TrainingJob Job(int context) {
    return testing::TinyTrainingJob(directory_.path().string(), context);
  }
  std::vector<RecordingHost> Run(TrainingJob job, const balance::MeasureRequest& request,
                                 const std::string& folder) {
    job.checkpoint_directory = directory_.File(folder);
    std::vector<RecordingHost> hosts(job.world_size);
    for (RecordingHost& host : hosts) host.to_measure = request;
    for (const auto& outcome : testing::RunRanks(job, hosts)) {
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    }
    return hosts;
  }
  static model::ModelConfig OneHead() {
    model::ModelConfig config;
    config.heads = 1;
    config.kv_heads = 1;
    config.head_dim = 64;
    return config;
  }
  static std::vector<double> Losses(const RecordingHost& host) {
    std::vector<double> losses;
    for (const StepRecord& step : host.steps) losses.push_back(step.loss);
    return losses;
  }

  TempDir directory_;
};

TEST_F(MeasureTest, AnUnknownMachineIsMeasuredByRankZeroOnce) {
  TrainingJob job = Job(2);
  job.attention.pattern = Pattern::kVerticalSlash;
  const auto plain = Run(job, {}, "plain");
  EXPECT_THAT(plain[0].measured, IsEmpty());
  balance::MeasureRequest request = {.budget_seconds = 1e6};
  const auto first = Run(job, request, "first");
  ASSERT_THAT(first[0].measured, SizeIs(1));
  EXPECT_THAT(first[1].measured, IsEmpty());
  const balance::Measurements& measured = first[0].measured[0];
  EXPECT_EQ(measured.machine.device, "cpu, 1 threads");
  EXPECT_FALSE(measured.machine.driver.empty());
  const absl::StatusOr<balance::LatencyTable> table = balance::MakeTable(measured.rows);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->rows.back().pattern, "vertical_slash");
  EXPECT_EQ(table->rows.back().tokens, static_cast<int64_t>(job.sequence_length));
  EXPECT_GT(table->rows.size(), 1u) << "densities";
  // Two ranks of one node.
  ASSERT_THAT(measured.links, SizeIs(1));
  EXPECT_FALSE(measured.links[0].between_nodes);
  EXPECT_GT(measured.links[0].bytes_per_second, 0);
  EXPECT_GE(measured.links[0].latency_seconds, 0);
  // A look that takes long is no hang.
  const auto told = [&first](int rank, const char* phase) {
    const auto& places = first[rank].places;
    return std::find(places.begin(), places.end(), std::pair<uint64_t, std::string>(0, phase)) !=
           places.end();
  };
  EXPECT_TRUE(told(0, "measuring links"));
  EXPECT_TRUE(told(0, "measuring attention"));
  EXPECT_TRUE(told(1, "measuring links"));
  EXPECT_FALSE(told(1, "measuring attention"));
  // The same losses, bit for bit.
  EXPECT_EQ(Losses(first[0]), Losses(plain[0]));

  request.known_layers = request.known_links_inside = {measured.machine};
  EXPECT_THAT(Run(job, request, "second")[0].measured, IsEmpty());
  request.known_layers[0].driver += "-other";
  const auto third = Run(job, request, "third");
  ASSERT_THAT(third[0].measured, SizeIs(1));
  EXPECT_FALSE(third[0].measured[0].rows.empty());
  EXPECT_THAT(third[0].measured[0].links, IsEmpty());
}

TEST_F(MeasureTest, AJobByDocumentsIsMeasuredAsDenseAttentionIs) {
  TrainingJob job = Job(2);
  job.attention.pattern = Pattern::kDense;
  job.document_mask = job.plan.by_documents = job.attention.by_documents = true;
  const auto hosts = Run(job, {.budget_seconds = 1e6}, "documents");
  ASSERT_THAT(hosts[0].measured, SizeIs(1));
  ASSERT_FALSE(hosts[0].measured[0].rows.empty());
  EXPECT_EQ(hosts[0].measured[0].rows[0].pattern, "dense");
}

TEST_F(MeasureTest, LinksInsideAndBetweenNodesAreToldApart) {
  TrainingJob job = Job(4);
  job.ranks_per_node = 2;
  const auto hosts = Run(job, {.budget_seconds = 1e-9}, "nodes");
  ASSERT_THAT(hosts[0].measured, SizeIs(1));
  ASSERT_THAT(hosts[0].measured[0].links, SizeIs(2));
  EXPECT_FALSE(hosts[0].measured[0].links[0].between_nodes);
  EXPECT_TRUE(hosts[0].measured[0].links[1].between_nodes);
  for (int rank = 1; rank < 4; ++rank) EXPECT_THAT(hosts[rank].measured, IsEmpty()) << rank;
}

TEST_F(MeasureTest, NothingIsLeftOfABudgetThatIsTooSmall) {
  EXPECT_THAT(Run(Job(1), {.budget_seconds = 1e-9}, "hasty")[0].measured, IsEmpty());
}

// Tables are of causal attention; and who is to stop does not measure first.
TEST_F(MeasureTest, NothingIsMeasuredUnderOtherMasksOrOnceAStopWasAsked) {
  TrainingJob job = Job(1);
  const auto worlds = comm::testing::LocalCommunicators(1);
  const auto rows_of = [&](patterns::Mask mask, bool stop) {
    RecordingHost host;
    host.stop = stop;
    job.attention.mask = mask;
    auto device = CreateCpuDevice(job, *worlds[0], host);
    EXPECT_TRUE(device.ok()) << device.status();
    return MeasureAttention(job, OneHead(), 1e6, **device, host);
  };
  EXPECT_THAT(rows_of(patterns::Mask::kCausal, false), Not(IsEmpty()));
  EXPECT_THAT(rows_of(patterns::Mask::kCausal, true), IsEmpty());
  EXPECT_THAT(rows_of(patterns::Mask::kFull, false), IsEmpty());
}

// A rank measures by itself what a ring computes with heads shared and in groups.
TEST_F(MeasureTest, RingsWithHeadsInGroupsAreMeasured) {
  TrainingJob job = Job(1);
  job.attention.ring.kind = ring::RingKind::kAllGather;
  job.attention.head_ranks = 2;
  job.attention.head_groups = 2;
  RecordingHost host;
  const auto worlds = comm::testing::LocalCommunicators(1);
  const auto device = CreateCpuDevice(Job(1), *worlds[0], host);
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_THAT(MeasureAttention(job, OneHead(), 1e6, **device, host), Not(IsEmpty()));
}

// Each pattern that has a control comes near the densities that are wished for.
TEST_F(MeasureTest, PatternsComeToTheDensitiesOfTheGrid) {
  TrainingJob job = Job(1);
  job.sequence_length = 4096;
  job.attention.block_size = 128;
  job.attention.window = 256;
  RecordingHost host;
  const auto worlds = comm::testing::LocalCommunicators(1);
  const auto rows_of = [&](Pattern pattern) {
    job.attention.pattern = pattern;
    auto device = CreateCpuDevice(job, *worlds[0], host);
    EXPECT_TRUE(device.ok()) << device.status();
    return MeasureAttention(job, OneHead(), 1e6, **device, host);
  };
  for (const Pattern pattern : {Pattern::kSlidingWindow, Pattern::kVerticalSlash,
                                Pattern::kBlockTopK, Pattern::kXAttention}) {
    const std::vector<balance::Row> rows = rows_of(pattern);
    EXPECT_TRUE(balance::MakeTable(rows).ok()) << balance::MakeTable(rows).status();
    for (const double wished : {0.15, 0.4, 1.0}) {
      double nearest = std::numeric_limits<double>::infinity();
      for (const balance::Row& row : rows) {
        if (row.tokens == 4096) nearest = std::min(nearest, std::abs(row.density / wished - 1));
      }
      EXPECT_LT(nearest, 0.25) << static_cast<int>(pattern) << " at " << wished;
    }
  }
  // Tiles of random queries that choose apart are visited nearly all: densities lie close together.
  const std::vector<balance::Row> moba = rows_of(Pattern::kMoba);
  EXPECT_TRUE(balance::MakeTable(moba).ok()) << balance::MakeTable(moba).status();
  double sparsest = 1, densest = 0;
  for (const balance::Row& row : moba) {
    if (row.tokens != 4096) continue;
    sparsest = std::min(sparsest, row.density);
    densest = std::max(densest, row.density);
  }
  EXPECT_LT(sparsest, 0.2) << "each query's own block";
  EXPECT_GT(densest, 0.9);
  const std::vector<balance::Row> dense = rows_of(Pattern::kDense);
  ASSERT_THAT(dense, SizeIs(2));
  EXPECT_EQ(dense[1].density, 1);

  job.document_mask = true;
  job.sequence_length = 8192;
  const std::vector<balance::Row> apart = rows_of(Pattern::kDense);
  EXPECT_TRUE(std::any_of(apart.begin(), apart.end(), [](const balance::Row& row) {
    return row.tokens == 8192 && row.document_tokens == 4096 && row.density < 0.7;
  }));
}

}  // namespace
}  // namespace ringleader::trainer
