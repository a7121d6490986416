#include "coordinator/planner_source.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/testing/temp_dir.h"
#include "jobspec/jobspec.h"

namespace ringleader {
namespace {

// What a job's reports teach reaches the prediction of its next attempt, and not the choice.
TEST(PlannerSourceTest, ReportsMakeTheNextAttemptsPredictionTruer) {
  const TempDir folder;
  std::ofstream(folder.File("config.json")) << R"({
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 257,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536})";
  v1::Job job;
  v1::JobSpec* const spec = job.mutable_spec();
  spec->set_name("job");
  spec->mutable_model()->set_config(folder.File("config.json"));
  spec->mutable_data()->set_sequence_length(16384);
  spec->mutable_resources()->set_trainers(4);
  jobspec::ApplyDefaults(spec);
  v1::Placement* const placement = job.add_attempts()->add_placements();
  placement->set_node("nodes/a");
  placement->set_trainers(4);
  v1::NodeInventory node;
  node.set_trainers(4);
  node.set_cpu_cores(4);
  node.set_memory_bytes(uint64_t{64} << 30);

  const auto plans = NewPlannerSource();
  const auto first = plans->Plan(*spec, {*placement}, {node});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_GT(first->prediction().attention_seconds(), 0);
  plans->Started(job, *first, {node});
  v1::StepReport report;
  for (int i = 0; i < 50; ++i) {
    report.set_step(report.step() + 1);
    report.clear_rank_tiles();
    report.clear_layers();
    for (int rank = 0; rank < 4; ++rank) report.add_rank_tiles(20'000);
    for (uint32_t layer = 0; layer < 4; ++layer) {
      v1::LayerReport* const entry = report.add_layers();
      entry->set_layer(layer);
      entry->set_slashes(100);
      entry->set_verticals(1000);
    }
    report.mutable_phases()->set_attention_forward(100);
    report.mutable_phases()->set_attention_backward(300);
    plans->Observe(job, report);
  }
  const auto second = plans->Plan(*spec, {*placement}, {node});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_GT(second->prediction().attention_seconds(), 5 * first->prediction().attention_seconds());
  EXPECT_NE(second->prediction().density(), first->prediction().density());
  EXPECT_EQ(second->layout(), first->layout());
  EXPECT_EQ(second->stripe(), first->stripe());
  EXPECT_EQ(second->ring().kind(), first->ring().kind());

  plans->Forget(job);
  const auto third = plans->Plan(*spec, {*placement}, {node});
  EXPECT_EQ(third->prediction().attention_seconds(), first->prediction().attention_seconds());
}

}  // namespace
}  // namespace ringleader
