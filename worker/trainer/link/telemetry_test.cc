// Every field of a step's and an evaluation's record, as it goes up.
#include "worker/trainer/link/telemetry.h"

#include "absl/time/clock.h"
#include "base/testing/equals_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/timestamps.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;

TEST(TelemetryFieldsTest, OfAStep) {
  StepRecord record{.step = 4,
                    .loss = 2.5,
                    .gradient_norm = 0.75,
                    .learning_rate = 3e-4,
                    .tokens = 4096,
                    .step_seconds = 1.5,
                    .phases = {},
                    .peak_memory_bytes = 1 << 20,
                    .layers = {},
                    .skipped = true,
                    .plan_version = 6};
  const absl::Time before = absl::Now();
  const v1::StepReport report = ToProto(record, 3);
  EXPECT_EQ(report.step(), 4u);
  EXPECT_EQ(report.rank(), 3);
  EXPECT_EQ(report.loss(), 2.5);
  EXPECT_EQ(report.gradient_norm(), 0.75);
  EXPECT_EQ(report.learning_rate(), 3e-4);
  EXPECT_EQ(report.tokens(), 4096u);
  EXPECT_EQ(report.step_seconds(), 1.5);
  EXPECT_EQ(report.peak_memory_bytes(), 1u << 20);
  EXPECT_TRUE(report.skipped());
  EXPECT_EQ(report.plan_version(), 6u);
  EXPECT_GE(ToTime(report.time()), absl::FromUnixMicros(absl::ToUnixMicros(before)));
  record.skipped = false;
  EXPECT_FALSE(ToProto(record, 3).skipped());
}

TEST(TelemetryFieldsTest, OfSamples) {
  StepRecord record;
  record.micro_batches = 3;
  record.padding_tokens = 192;
  record.dealt_imbalance = 1.25;
  record.overlong = {.documents = 90, .overlong = 7, .overlong_tokens = 80000};
  record.group = 1;
  record.rank_tokens = 512;
  record.documents = {{64, 5}, {1024, 2}};
  EXPECT_EQ(ToProto(record, 0).micro_batches(), 0u) << "packed";
  EXPECT_EQ(ToProto(record, 0).padding_tokens(), 192u) << "by documents these have some, too";
  record.samples = 4;
  record.group_micro_batches = 2;
  record.group_tokens = 768;
  record.lengths[512] = {.micro_batches = 1, .tiles = {.visited = 20, .causal = 36}};
  const v1::StepReport report = ToProto(record, 0);
  EXPECT_EQ(report.samples(), 4u);
  EXPECT_EQ(report.group(), 1u);
  EXPECT_EQ(report.rank_tokens(), 512u);
  ASSERT_EQ(report.documents_size(), 2);
  EXPECT_EQ(report.documents(1).tokens(), 1024u);
  EXPECT_EQ(report.documents(1).count(), 2u);
  EXPECT_EQ(report.micro_batches(), 3u);
  EXPECT_EQ(report.padding_tokens(), 192u);
  EXPECT_EQ(report.dealt_imbalance(), 1.25);
  EXPECT_EQ(report.group_micro_batches(), 2u);
  EXPECT_EQ(report.group_tokens(), 768u);
  ASSERT_EQ(report.lengths_size(), 1);
  EXPECT_EQ(report.lengths(0).tokens(), 512u);
  EXPECT_EQ(report.lengths(0).micro_batches(), 1u);
  EXPECT_EQ(report.lengths(0).visited_tiles(), 20u);
  EXPECT_EQ(report.lengths(0).causal_tiles(), 36u);
  EXPECT_EQ(report.overlong_documents(), 7u);
  EXPECT_EQ(report.overlong_tokens(), 80000u);
}

TEST(TelemetryFieldsTest, OfALayer) {
  StepRecord record;
  record.layers.resize(2);
  record.layers[1] = {.density = 0.125,
                      .verticals = 20,
                      .slashes = 30,
                      .verticals_at_budget = 0.25,
                      .slashes_at_budget = 0.375,
                      .recall = 0.875,
                      .balanced = 6,
                      .anchor_missed = 2,
                      .probed_recall = {0.5, 0.75},
                      .first_head = 2,
                      .tiles_per_ring_step = {10, 4},
                      .column_tiles = 5};
  record.probed_recall = {-1.0, 0.625};
  record.head_bytes = 4096;
  record.ring_bytes = {.sent = 300, .whole = 1000};
  const v1::StepReport report = ToProto(record, 0);
  ASSERT_EQ(report.layers_size(), 2);
  const v1::LayerReport& layer = report.layers(1);
  EXPECT_EQ(layer.layer(), 1u);
  EXPECT_EQ(layer.first_head(), 2u);
  EXPECT_EQ(report.head_bytes(), 4096u);
  EXPECT_EQ(report.ring_bytes(), 300u);
  EXPECT_EQ(report.whole_ring_bytes(), 1000u);
  EXPECT_EQ(layer.density(), 0.125);
  EXPECT_EQ(layer.verticals(), 20);
  EXPECT_EQ(layer.slashes(), 30);
  EXPECT_EQ(layer.recall(), 0.875);
  EXPECT_EQ(layer.verticals_at_budget(), 0.25);
  EXPECT_EQ(layer.slashes_at_budget(), 0.375);
  EXPECT_EQ(layer.balanced(), 6u);
  EXPECT_EQ(layer.anchor_missed(), 2u);
  EXPECT_THAT(layer.tiles_per_ring_step(), ElementsAre(10, 4));
  EXPECT_EQ(layer.column_tiles(), 5u);
  EXPECT_EQ(report.layers(0).layer(), 0u);
  EXPECT_EQ(report.layers(0).recall(), -1.0) << "not estimated";
  EXPECT_THAT(layer.probed_recall_by_head(), ElementsAre(0.5F, 0.75F));
  EXPECT_EQ(layer.probed_recall(), 0.625);
  EXPECT_EQ(report.layers(0).probed_recall_by_head_size(), 0);
  EXPECT_FALSE(report.layers(0).has_probed_recall()) << "not probed yet";
  record.probed_recall[0] = 0.0;
  EXPECT_TRUE(ToProto(record, 0).layers(0).has_probed_recall()) << "probed, and nothing found";
}

TEST(TelemetryFieldsTest, RingStepsOfLayersOfAnyLengthAddUp) {
  StepRecord record;
  EXPECT_EQ(ToProto(record, 0).step_imbalance(), 1.0) << "nothing to wait for";
  record.layers.resize(2);
  record.layers[0].tiles_per_ring_step = {6};
  record.layers[1].tiles_per_ring_step = {0, 3, 3};
  EXPECT_DOUBLE_EQ(ToProto(record, 0).step_imbalance(), 6.0 / 4.0);
}

TEST(TelemetryFieldsTest, OfAnEvaluation) {
  const v1::EvalReport report =
      ToProto(EvalRecord{.step = 7, .outcome = {.loss = 2.5, .tokens = 512}, .seconds = 0.25});
  EXPECT_EQ(report.step(), 7u);
  EXPECT_EQ(report.loss(), 2.5);
  EXPECT_EQ(report.tokens(), 512u);
  EXPECT_EQ(report.seconds(), 0.25);
  EXPECT_THAT(
      ToProto(EvalRecord{.step = 8,
                         .outcome = {.loss = 2, .tokens = 512, .answers = {{"far", 4, 3, 0.5}}},
                         .dense = EvalOutcome{.loss = 1.5, .answers = {{"near", 5, 2, 0.25}}},
                         .seconds = 1}),
      EqualsText(R"(step: 8 loss: 2 tokens: 512 seconds: 1
                    answers { task: "far" asked: 4 right: 3 loss: 0.5 }
                    dense { loss: 1.5 answers { task: "near" asked: 5 right: 2 loss: 0.25 } })"));
}

TEST(TelemetryTest, MeasurementsFieldByField) {
  balance::Measurements measured = {.machine = {"device", "clocks", "driver", "build"}};
  measured.links = {{.between_nodes = true, .bytes_per_second = 3, .latency_seconds = 4}};
  EXPECT_FALSE(ToProto(measured).has_layers());
  measured.rows = {{.pattern = "dense",
                    .tile = 64,
                    .heads = 8,
                    .kv_heads = 2,
                    .head_dim = 128,
                    .tokens = 4096,
                    .document_tokens = 1024,
                    .density = 0.25,
                    .p50_ms = 5,
                    .p90_ms = 6,
                    .forward_p50_ms = 2}};
  const v1::Measurements proto = ToProto(measured);
  const v1::LatencyTable& table = proto.layers();
  EXPECT_EQ(table.machine().ShortDebugString(),
            "device: \"device\" clocks: \"clocks\" driver: \"driver\" build: \"build\"");
  EXPECT_EQ(table.shape().ShortDebugString(),
            "pattern: \"dense\" tile: 64 heads: 8 kv_heads: 2 head_dim: 128");
  ASSERT_EQ(table.rows_size(), 1);
  EXPECT_EQ(
      table.rows(0).ShortDebugString(),
      "tokens: 4096 document_tokens: 1024 density: 0.25 p50_ms: 5 p90_ms: 6 forward_p50_ms: 2");
  ASSERT_EQ(proto.links_size(), 1);
  EXPECT_EQ(proto.links(0).machine().device(), "device");
  EXPECT_TRUE(proto.links(0).between_nodes());
  EXPECT_EQ(proto.links(0).bytes_per_second(), 3);
  EXPECT_EQ(proto.links(0).latency_seconds(), 4);
}

}  // namespace
}  // namespace ringleader::trainer
