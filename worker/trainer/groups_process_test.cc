// Data-parallel groups of whole attempts: real ringleader-trainer processes on a tiny model.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_test.h"

namespace ringleader::trainer {
namespace {

using testing::Losses;
using testing::TinyPlan;
using TrainerGroupsTest = testing::AttemptTest;

// The ranks of a group that has come to its end take part in the sums of the others' gradients.
TEST_F(TrainerGroupsTest, GroupsMayTrainDifferentNumbersOfSequences) {
  v1::JobSpec spec = Job(1, 2);
  spec.mutable_training()->set_global_batch(4);
  const std::vector<double> expected = Losses(RunToEnd(spec)[0]);
  UseCheckpoints(&spec, Path("uneven"));
  v1::StepPlan plan = TinyPlan(spec);
  const std::vector<uint32_t> sequences[] = {{2}, {0, 1, 3}};
  for (uint32_t group = 0; group < 2; ++group) {
    v1::MicroBatchAssignment* assignment = plan.add_micro_batches();
    assignment->set_group(group);
    assignment->mutable_sequences()->Add(sequences[group].begin(), sequences[group].end());
  }
  const std::vector<double> losses = Losses(Start(spec, plan)->Finish()[0]);
  ASSERT_EQ(losses.size(), expected.size()) << Output();
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], expected[i], 1e-4 * expected[i]) << i;
  }
}

}  // namespace
}  // namespace ringleader::trainer
