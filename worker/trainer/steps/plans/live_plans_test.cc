// Plans that change how a running attempt's sequences lie: all ranks at one step, the losses those
// of a job that lay so from its start, and the same again after a resume.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Not;
using ::testing::Pair;
using testing::RecordingHost;

constexpr uint64_t kChanged = 4;  // the first step in the other shape

class LivePlansTest : public ::testing::Test {
 protected:
  LivePlansTest() : job_(testing::TinyTrainingJob(directory_.path().string(), 2)) {
    job_.document_mask = true;
    job_.eval_every_steps = 1;
    job_.keep_last = 10;
  }

  // The job's plan, to lie as `shape` from step kChanged on.
  Plan Changed(const PlanShape& shape) const {
    Plan plan = job_.plan;
    plan.version = 2;
    plan.effective_step = plan.shape_from_step = kChanged;
    plan.earlier_shapes = {{.from_step = 1, .shape = job_.plan}};
    static_cast<PlanShape&>(plan) = shape;
    return plan;
  }
  PlanShape Zigzag() const {
    PlanShape shape = job_.plan;
    shape.layout = kernels::LayoutKind::kZigzag;
    shape.stripe = 0;
    return shape;
  }
  static void LieAs(const PlanShape& shape, TrainingJob* job) {
    static_cast<PlanShape&>(job->plan) = shape;
    job->attention = shape.Of(job->attention);
  }

  // `arrives`: the step during which `next` comes to rank 0; 0: never.
  std::vector<RecordingHost> Run(const TrainingJob& job, const Plan& next, uint64_t arrives) {
    std::vector<RecordingHost> hosts(job.world_size);
    for (RecordingHost& host : hosts) host.plans["next"] = next;
    hosts[0].on_step = [arrives](RecordingHost& host, const StepRecord& record) {
      if (record.step == arrives) host.plan_bytes = "next";
    };
    for (const auto& outcome : testing::RunRanks(job, hosts)) {
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    }
    return hosts;
  }
  std::vector<RecordingHost> Run(TrainingJob job) {
    job.checkpoint_directory = directory_.File("other-checkpoints");
    std::filesystem::remove_all(job.checkpoint_directory);
    return Run(job, job.plan, 0);
  }
  // The job with a checkpoint folder of its own, which holds no checkpoint but that of `step` in
  // the folder of `job`.
  TrainingJob From(uint64_t step, TrainingJob job) {
    const std::string name = "/step-000000000" + std::to_string(step);
    const std::string saved =
        std::exchange(job.checkpoint_directory, directory_.File("from-" + std::to_string(step)));
    std::filesystem::create_directories(job.checkpoint_directory);
    std::filesystem::copy(saved + name, job.checkpoint_directory + name);
    return job;
  }
  static std::vector<double> Losses(const RecordingHost& host) {
    std::vector<double> losses;
    for (const StepRecord& step : host.steps) losses.push_back(step.loss);
    for (const EvalRecord& eval : host.evals) losses.push_back(eval.outcome.loss);
    return losses;
  }
  static std::vector<uint64_t> Versions(const RecordingHost& host) {
    std::vector<uint64_t> versions;
    for (const StepRecord& step : host.steps) versions.push_back(step.plan_version);
    return versions;
  }
  static std::vector<uint64_t> TilesOf(const StepRecord& step) {
    return step.layers.at(0).tiles_per_ring_step;
  }

  TempDir directory_;
  TrainingJob job_;
};

class LiveShapesTest : public LivePlansTest, public ::testing::WithParamInterface<int> {
 protected:
  PlanShape Other() const {
    PlanShape shape = job_.plan;
    switch (GetParam()) {
      case 0:
        return Zigzag();
      case 1:
        shape.layout = kernels::LayoutKind::kContiguous;
        shape.stripe = 0;
        return shape;
      case 2:
        shape.stripe = 128;
        return shape;
      case 3:
        shape.ring.kind = ring::RingKind::kAllGather;
        return shape;
      case 4:
        shape.by_documents = true;
        return shape;
    }
    ADD_FAILURE() << "there is no shape " << GetParam();
    return shape;
  }
};

TEST_P(LiveShapesTest, StepsAfterAChangeAreThoseOfAJobThatLaySoFromItsStart) {
  const std::vector<RecordingHost> before = Run(job_);
  TrainingJob other_job = job_;
  LieAs(Other(), &other_job);
  const std::vector<RecordingHost> other = Run(other_job);
  const std::vector<RecordingHost> changed = Run(job_, Changed(Other()), 1);

  const std::vector<double> losses = Losses(changed[0]), expected = Losses(other[0]);
  ASSERT_EQ(losses.size(), expected.size());
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5) << i;
  for (size_t rank = 0; rank < changed.size(); ++rank) {
    EXPECT_THAT(changed[rank].places, Contains(Pair(kChanged, "changing the layout")));
    EXPECT_THAT(Versions(changed[rank]), ElementsAre(1, 1, 1, 2, 2, 2));
    for (uint64_t step = 1; step <= job_.steps; ++step) {
      const StepRecord& record = changed[rank].steps.at(step - 1);
      const StepRecord& like =
          step < kChanged ? before[rank].steps.at(step - 1) : other[rank].steps.at(step - 1);
      EXPECT_EQ(TilesOf(record), TilesOf(like)) << "rank " << rank << ", step " << step;
      if (step < kChanged) {
        EXPECT_EQ(record.loss, like.loss) << step;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Shapes, LiveShapesTest, ::testing::Range(0, 5));

// From the checkpoint after step 2, a step before the change, and from that after step 4.
TEST_F(LivePlansTest, AResumeTrainsTheStepsAroundAChangeBitForBit) {
  const Plan plan = Changed(Zigzag());
  const std::vector<RecordingHost> whole = Run(job_, plan, 1);
  for (const uint64_t step : {2, 4}) {
    TrainingJob again = From(step, job_);
    again.plan = plan;
    again.attention = plan.Of(again.attention);
    const std::vector<RecordingHost> resumed = Run(again, plan, 0);
    ASSERT_EQ(resumed[0].steps.size(), job_.steps - step);
    for (const StepRecord& record : resumed[0].steps) {
      EXPECT_EQ(record.loss, whole[0].steps.at(record.step - 1).loss) << record.step;
      EXPECT_EQ(TilesOf(record), TilesOf(whole[0].steps.at(record.step - 1))) << record.step;
    }
  }
}

// The coordinator's record was put back to before the change.
TEST_F(LivePlansTest, ACheckpointKnowsAPlanThatTheCoordinatorLost) {
  const Plan plan = Changed(Zigzag());
  const std::vector<RecordingHost> whole = Run(job_, plan, 1);
  TrainingJob again = From(4, job_);
  again.checkpoint_every_steps = 1;
  const std::vector<RecordingHost> resumed = Run(again, plan, 0);
  EXPECT_THAT(Versions(resumed[1]), ElementsAre(2, 2));
  // So do those that were saved since.
  const std::vector<RecordingHost> once_more = Run(From(5, again), plan, 0);
  EXPECT_THAT(Versions(once_more[1]), ElementsAre(2));
  for (const StepRecord* last : {&resumed[0].steps.back(), &once_more[0].steps.back()}) {
    EXPECT_EQ(last->loss, whole[0].steps.at(5).loss);
    EXPECT_EQ(TilesOf(*last), TilesOf(whole[0].steps.at(5)));
  }
}

TEST_F(LivePlansTest, AChangeThatComesTooLateIsRefusedByAllRanks) {
  const std::vector<RecordingHost> undisturbed = Run(job_);
  const std::vector<RecordingHost> hosts = Run(job_, Changed(Zigzag()), kChanged);
  for (const RecordingHost& host : hosts) {
    EXPECT_THAT(Versions(host), Each(1));
    EXPECT_EQ(Losses(host), Losses(undisturbed[&host - hosts.data()]));
  }
}

TEST_F(LivePlansTest, WhatTheDataDoNotAllowIsRefusedByAllRanks) {
  PlanShape long_stripes = job_.plan;
  long_stripes.stripe = 512;
  PlanShape by_documents = job_.plan;
  by_documents.by_documents = true;
  PlanShape of_four = job_.plan;
  of_four.ring.inner = 4;
  for (const PlanShape& shape : {long_stripes, by_documents, of_four}) {
    TrainingJob job = job_;
    job.document_mask = !shape.by_documents;
    std::filesystem::remove_all(job.checkpoint_directory);
    for (const RecordingHost& host : Run(job, Changed(shape), 1)) {
      EXPECT_THAT(Versions(host), Each(1));
      EXPECT_THAT(host.places, Not(Contains(Pair(kChanged, "changing the layout"))));
    }
  }
}

// By documents each document's choice is its own: not the same job.
TEST_F(LivePlansTest, WhatAPatternWouldChooseAnewIsRefusedByAllRanks) {
  PlanShape by_documents = job_.plan;
  by_documents.by_documents = true;
  TrainingJob job = job_;
  job.attention.pattern = patterns::Pattern::kSlidingWindow;
  job.attention.window = 100;
  for (const RecordingHost& host : Run(job, Changed(by_documents), 1)) {
    EXPECT_THAT(Versions(host), Each(1));
    EXPECT_THAT(host.places, Not(Contains(Pair(kChanged, "changing the layout"))));
  }
  // Nor does an attempt begin with it, or have steps that lay so.
  Plan earlier = Changed(job.plan);
  earlier.earlier_shapes[0].shape = by_documents;
  static_cast<PlanShape&>(job.plan) = by_documents;
  for (const Plan& plan : {job.plan, earlier}) {
    job.plan = plan;
    std::vector<RecordingHost> hosts(job.world_size);
    for (const auto& outcome : testing::RunRanks(job, hosts)) {
      EXPECT_EQ(outcome.status().code(), absl::StatusCode::kInvalidArgument) << outcome.status();
    }
  }
}

}  // namespace
}  // namespace ringleader::trainer
