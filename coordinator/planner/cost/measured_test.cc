#include "coordinator/planner/cost/measured.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "coordinator/planner/planner.h"
#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {
namespace {

using ::testing::HasSubstr;

v1::JobSpec Spec() {
  v1::JobSpec spec = LongJob(4, 131072);
  spec.mutable_attention()->set_tile(128);
  return spec;
}

// Five times slower than the usual H200, and slower still with every row and call.
v1::Measurements MeasuredBy(const std::string& device, double slowdown = 5) {
  v1::Measurements measured;
  v1::LatencyTable* const layers = measured.mutable_layers();
  layers->mutable_machine()->set_device(device);
  *layers->mutable_shape() = ShapeOf(Spec(), ThreeBillion());
  for (const double tokens : {16384.0, 65536.0, 131072.0}) {
    for (const double density : {0.02, 0.1, 0.5, 1.0}) {
      const double tiles = density * 16 * (tokens / 128) * (tokens / 128 + 1) / 2;
      v1::LatencyRow* const row = layers->add_rows();
      row->set_tokens(static_cast<uint64_t>(tokens));
      row->set_density(density);
      row->set_forward_p50_ms(slowdown * (1.6e-5 * tiles + 6e-7 * tokens * 16 + 0.02));
      row->set_p50_ms(row->forward_p50_ms() * 3.5);
      row->set_p90_ms(row->p50_ms() * 1.05);
    }
  }
  v1::LinkSpeed* const link = measured.add_links();
  link->mutable_machine()->set_device(device);
  link->set_bytes_per_second(2e10);
  link->set_latency_seconds(1e-5);
  return measured;
}

std::string Refusal(const v1::Measurements& measured) {
  const v1::LatencyShape shape = ShapeOf(Spec(), ThreeBillion());
  return std::string(CheckMeasurements(measured, shape, "H200").status().message());
}

TEST(MeasurementsTest, QueriesAndHeadsThatChooseTogetherAreMeasuredApart) {
  const auto name = [](uint32_t queries, uint32_t heads, int64_t kv_heads) {
    v1::JobSpec spec = Spec();
    spec.mutable_attention()->Clear();
    spec.mutable_attention()->set_pattern(v1::AttentionSpec::KEY_GROUPS);
    spec.mutable_attention()->set_group_queries(queries);
    spec.mutable_attention()->set_group_heads(heads);
    jobspec::ApplyDefaults(&spec);
    model::ModelConfig model = ThreeBillion();
    model.kv_heads = kv_heads;
    return ShapeOf(spec, model).pattern();
  };
  EXPECT_EQ(name(64, 1, 2), "key_groups");
  EXPECT_EQ(name(16, 1, 2), "key_groups of 16 queries");
  EXPECT_EQ(name(64, 2, 2), "key_groups of pairs of heads");
  EXPECT_EQ(name(16, 0, 2), "key_groups of 16 queries of pairs of heads");
  EXPECT_EQ(name(64, 0, 16), "key_groups") << "one query head for each KV head";
  EXPECT_EQ(ShapeOf(Spec(), ThreeBillion()).pattern(), "vertical_slash");
}

TEST(MeasurementsTest, WhatIsMeasuredIsMadeToGrowWithDensity) {
  v1::Measurements measured = MeasuredBy("H200");
  EXPECT_EQ(Refusal(measured), "");
  measured.mutable_layers()->mutable_rows(2)->set_p50_ms(measured.layers().rows(3).p50_ms() +
                                                         10);  // denser and faster: noise
  measured.mutable_layers()->mutable_rows(2)->set_p90_ms(1e6);
  const auto checked = CheckMeasurements(measured, measured.layers().shape(), "H200");
  ASSERT_TRUE(checked.ok()) << checked.status();
  for (int i = 1; i < 4; ++i) {
    EXPECT_GE(checked->layers().rows(i).p50_ms(), checked->layers().rows(i - 1).p50_ms());
    EXPECT_GE(checked->layers().rows(i).p90_ms(), checked->layers().rows(i - 1).p90_ms());
  }
}

TEST(MeasurementsTest, WhatNoTrainerOfTheJobMeasuresIsRefused) {
  v1::Measurements other = MeasuredBy("H100");
  EXPECT_THAT(Refusal(other), HasSubstr("\"H200\""));
  other = MeasuredBy("H200");
  other.mutable_layers()->mutable_shape()->set_tile(64);
  EXPECT_THAT(Refusal(other), HasSubstr("other attention"));
  for (const double bad : {std::nan(""), -1.0, 0.0, std::numeric_limits<double>::infinity()}) {
    other = MeasuredBy("H200");
    other.mutable_layers()->mutable_rows(5)->set_p50_ms(bad);
    EXPECT_THAT(Refusal(other), HasSubstr("no measurement gives")) << bad;
    other = MeasuredBy("H200");
    other.mutable_links(0)->set_bytes_per_second(bad);
    EXPECT_THAT(Refusal(other), HasSubstr("no link has")) << bad;
  }
  other = MeasuredBy("H200");
  other.mutable_links(0)->set_latency_seconds(std::nan(""));
  EXPECT_THAT(Refusal(other), HasSubstr("no link has"));
  other = MeasuredBy("H200");
  other.mutable_links(0)->mutable_machine()->set_device("H100");
  EXPECT_THAT(Refusal(other), HasSubstr("\"H200\""));
  other = MeasuredBy("H200");
  other.mutable_layers()->mutable_machine()->set_driver("\x1b[2J");
  EXPECT_THAT(Refusal(other), HasSubstr("no text"));
  other = MeasuredBy("H200");
  for (int i = 0; i < 300; ++i) *other.mutable_layers()->add_rows() = other.layers().rows(0);
  EXPECT_THAT(Refusal(other), HasSubstr("more rows"));
  other = MeasuredBy("H200");
  *other.mutable_layers()->add_rows() = other.layers().rows(0);
  EXPECT_THAT(Refusal(other), HasSubstr("twice"));
}

TEST(MeasurementsTest, TheSlowestDeviceOfAJobCounts) {
  const std::vector<v1::LatencyTable> tables = {MeasuredBy("H200", 1).layers(),
                                                MeasuredBy("H100", 2).layers(),
                                                MeasuredBy("H100", 9).layers()};  // older
  const v1::LatencyShape shape = tables[0].shape();
  const double fast = SlowestTable(tables, shape, {"H200"}).Predict(65536, 0.1);
  EXPECT_GT(fast, 0);
  EXPECT_NEAR(SlowestTable(tables, shape, {"H200", "H100"}).Predict(65536, 0.1) / fast, 2, 1e-6);
  EXPECT_TRUE(SlowestTable(tables, shape, {"A100"}).rows.empty());
  v1::LatencyShape narrow = shape;
  narrow.set_heads(8);
  EXPECT_TRUE(SlowestTable(tables, narrow, {"H200"}).rows.empty());
}

TEST(MeasurementsTest, TheCostModelStartsFromThem) {
  const v1::JobSpec spec = Spec();
  const model::ModelConfig model = ThreeBillion();
  ClusterShape cluster = TypicalCluster(v1::ResourcesSpec::CUDA, 1, 4);
  const balance::LatencyTable table = *TableOf(MeasuredBy("H200").layers());
  const CostModel usual(spec, model, cluster), measured(spec, model, cluster, table);
  for (const balance::Row& row : table.rows) {
    const double blocks = static_cast<double>(row.tokens) / 128;
    const Work work = {.tiles = row.density * 16 * blocks * (blocks + 1) / 2,
                       .rows = static_cast<double>(row.tokens) * 16,
                       .calls = 1};
    EXPECT_NEAR(measured.Seconds(Phase::kAttentionForward, work) * 1e3 / row.forward_p50_ms, 1,
                0.05)
        << balance::Describe(row);
    EXPECT_NEAR(
        measured.Seconds(Phase::kAttentionBackward, work) * 1e3 / (row.p50_ms - row.forward_p50_ms),
        1, 0.05);
  }
  EXPECT_EQ(measured.coefficients(Phase::kLinear), usual.coefficients(Phase::kLinear));

  const absl::StatusOr<v1::StepPlan> slow = MakePlan(spec, model, cluster, measured);
  const absl::StatusOr<v1::StepPlan> fast = MakePlan(spec, model, cluster, usual);
  ASSERT_TRUE(slow.ok() && fast.ok()) << slow.status();
  EXPECT_GT(slow->prediction().attention_seconds(), 3 * fast->prediction().attention_seconds());

  UseLinks({MeasuredBy("H200").links(0)}, {"H200"}, &cluster);
  EXPECT_EQ(cluster.intra_node.bytes_per_second, 2e10);
  EXPECT_EQ(cluster.inter_node.bytes_per_second, 45e9);
  UseLinks({MeasuredBy("H100").links(0)}, {"A100"}, &cluster);
  EXPECT_EQ(cluster.intra_node.latency_seconds, 1e-5);
}

// What a link does where nothing else runs, it does not do beside attention.
TEST(MeasurementsTest, HopsInANodeAreNoFasterThanTheyAreBesideAttention) {
  ClusterShape cluster = TypicalCluster(v1::ResourcesSpec::CUDA, 2, 2);
  const double usual = cluster.intra_node.bytes_per_second;
  v1::LinkSpeed alone = MeasuredBy("H200").links(0), between = alone;
  alone.set_bytes_per_second(4e11);
  between.set_bytes_per_second(3e11);
  between.set_between_nodes(true);
  UseLinks({alone, between}, {"H200"}, &cluster);
  EXPECT_EQ(cluster.intra_node.bytes_per_second, usual);
  EXPECT_EQ(cluster.intra_node.latency_seconds, alone.latency_seconds());
  EXPECT_EQ(cluster.inter_node.bytes_per_second, 3e11);
  // CPUs share their cores with what travels in either case.
  cluster = TypicalCluster(v1::ResourcesSpec::CPU, 1, 2);
  UseLinks({alone}, {"H200"}, &cluster);
  EXPECT_EQ(cluster.intra_node.bytes_per_second, 4e11);
}

}  // namespace
}  // namespace ringleader::planner
