#include "coordinator/api/metrics/job_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "coordinator/store/testing/damage.h"

namespace ringleader::api {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// [labels' values, joined by a space] → the gauge.
using Series = std::map<std::string, double>;

class JobMetricsTest : public ::testing::Test {
 protected:
  JobMetricsTest() {
    auto store = store::OpenSqliteStore({.path = dir_.File("coordinator.db")});
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  // A job that has completed `step`, whose report has `layers` layers of density 1 / (layer + 1).
  void Put(const std::string& id, v1::Job::State state, uint64_t step, int layers,
           const std::string& reason = "") {
    const absl::Status status = store_->Write([&](store::WriteTransaction& t) -> absl::Status {
      v1::Job job;
      job.set_name("jobs/" + id);
      job.set_state(state);
      job.set_state_reason(reason);
      job.mutable_spec()->set_name(id);
      job.mutable_spec()->mutable_checkpoint()->set_every_steps(checkpoint_every_);
      job.mutable_progress()->set_step(step);
      job.mutable_progress()->set_loss(2.5);
      RETURN_IF_ERROR(t.CreateJob(&job));
      v1::Attempt attempt;
      attempt.set_number(1);
      v1::Placement* const placement = attempt.add_placements();
      placement->set_node("nodes/a");
      placement->set_trainers(3);
      attempt.add_plan_changes()->set_state(v1::PlanChange::MISSED);
      attempt.add_plan_changes()->set_state(v1::PlanChange::IN_FORCE);
      attempt.add_plan_changes()->set_state(v1::PlanChange::IN_FORCE);
      attempt.add_slow_ranks()->set_rank(2);
      RETURN_IF_ERROR(t.PutAttempt(id, attempt));
      // An earlier attempt was further; its report is no word on where the job stands now.
      for (const uint64_t reported : {step + 5, step}) {
        v1::StepReport report;
        report.set_step(reported);
        report.mutable_phases()->set_linear(static_cast<double>(reported));
        if (layers > 0) report.set_head_bytes(4096);
        for (int layer = 0; layer < layers; ++layer) {
          v1::LayerReport* const of = report.add_layers();
          of->set_layer(static_cast<uint32_t>(layer));
          of->set_density(1.0 / (layer + 1));
          of->set_recall(layer == 0 ? -1 : 0.9);
          if (layer > 0) of->set_probed_recall(0.75);
          if (layer > 0) of->set_balanced(4);
          of->set_anchor_missed(static_cast<uint64_t>(layer));
          of->add_tiles_per_ring_step(10);
          of->add_tiles_per_ring_step(20);
          of->set_column_tiles(5);
        }
        RETURN_IF_ERROR(t.PutStep(id, report));
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }

  Series Collect(const std::string& name) {
    std::vector<prometheus::MetricFamily> families;
    const absl::Status status =
        store_->Read([&](store::ReadTransaction& t) { return CollectRunningJobs(t, &families); });
    EXPECT_TRUE(status.ok()) << status;
    Series series;
    for (const prometheus::MetricFamily& family : families) {
      if (family.name != name) continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        std::string key;
        for (const auto& label : metric.label)
          absl::StrAppend(&key, key.empty() ? "" : " ", label.value);
        series[key] = metric.gauge.value;
      }
    }
    return series;
  }

  const TempDir dir_;
  std::unique_ptr<store::Store> store_;
  uint64_t checkpoint_every_ = 0;
};

TEST_F(JobMetricsTest, TheLastStepOfJobsThatRun) {
  Put("waits", v1::Job::PENDING, 7, 2);
  Put("runs", v1::Job::RUNNING, 7, 2);
  Put("begins", v1::Job::RUNNING, 0, 0);
  EXPECT_THAT(Collect("ringleader_job_completed_steps"),
              UnorderedElementsAre(Pair("runs", 7), Pair("begins", 0)));
  EXPECT_THAT(Collect("ringleader_job_loss"), ElementsAre(Pair("runs", 2.5)));
  EXPECT_EQ(Collect("ringleader_job_phase_seconds")["runs linear"], 7);
  EXPECT_THAT(Collect("ringleader_job_layer_density_ratio"),
              ElementsAre(Pair("runs 0", 1), Pair("runs 1", 0.5)));
  EXPECT_THAT(Collect("ringleader_job_layer_recall_ratio"), ElementsAre(Pair("runs 1", 0.9)));
  EXPECT_THAT(Collect("ringleader_job_layer_probed_recall_ratio"),
              ElementsAre(Pair("runs 1", 0.75)));
  EXPECT_THAT(Collect("ringleader_job_layer_anchor_missed_ratio"),
              ElementsAre(Pair("runs 1", 0.25)));
  EXPECT_THAT(Collect("ringleader_job_head_exchange_bytes"), ElementsAre(Pair("runs", 4096)));
  EXPECT_THAT(Collect("ringleader_job_layer_tiles"),
              ElementsAre(Pair("runs 0", 35), Pair("runs 1", 35)));
  EXPECT_EQ(Collect("ringleader_job_plan_changes")["runs missed"], 1);
  EXPECT_EQ(Collect("ringleader_job_plan_changes")["runs in_force"], 2);
  EXPECT_EQ(Collect("ringleader_job_plan_changes")["runs announced"], 0);
  EXPECT_THAT(Collect("ringleader_job_slow_ranks"),
              UnorderedElementsAre(Pair("runs", 1), Pair("begins", 1)));
  EXPECT_THAT(Collect("ringleader_job_trainers"),
              UnorderedElementsAre(Pair("runs a a", 3), Pair("begins a a", 3)));
}

// An alert says that a job which trains has saved nothing for long.
TEST_F(JobMetricsTest, CheckpointsOfJobsThatWereAskedForSome) {
  Put("never", v1::Job::RUNNING, 7, 1);
  checkpoint_every_ = 10;
  Put("not yet", v1::Job::RUNNING, 7, 1);
  EXPECT_THAT(Collect("ringleader_job_checkpoint_step"), ElementsAre(Pair("not yet", 0)));
}

// Before, one of them took the figures of all jobs.
TEST_F(JobMetricsTest, DamagedRecordsHideNoOthers) {
  for (const char* id : {"job", "attempt", "step", "whole"}) Put(id, v1::Job::RUNNING, 7, 1);
  store::testing::DamageRecord(dir_.File("coordinator.db"), "jobs", "id = 'job'");
  store::testing::DamageRecord(dir_.File("coordinator.db"), "attempts", "job = 'attempt'");
  store::testing::DamageRecord(dir_.File("coordinator.db"), "steps", "job = 'step' AND step = 7");
  EXPECT_THAT(Collect("ringleader_job_completed_steps"),
              UnorderedElementsAre(Pair("step", 7), Pair("whole", 7)));
  EXPECT_THAT(Collect("ringleader_job_head_exchange_bytes"), ElementsAre(Pair("whole", 4096)));
}

TEST_F(JobMetricsTest, LayersHaveABoundInAll) {
  Put("old", v1::Job::RUNNING, 7, 1);
  Put("large", v1::Job::RUNNING, 7, kMaxLayerSeries / 5 + 1);
  Put("fits", v1::Job::RUNNING, 7, kMaxLayerSeries / 5 - 1);
  const Series series = Collect("ringleader_job_layer_tiles");
  EXPECT_EQ(series.size(), kMaxLayerSeries / 5);
  EXPECT_EQ(series.count("fits 0"), 1);
  EXPECT_EQ(series.count("large 0"), 0);
  EXPECT_EQ(series.count("old 0"), 1);
  EXPECT_EQ(Collect("ringleader_job_step_seconds").size(), 3);
}

// Large records fill a page of the list long before it has as many jobs as have series.
TEST_F(JobMetricsTest, LargeJobsHideNoOthers) {
  const std::string large(store::kPageBytes / 3, 'x');
  for (int i = 0; i < 10; ++i) Put(absl::StrCat("j", i), v1::Job::RUNNING, 7, 0, large);
  EXPECT_EQ(Collect("ringleader_job_completed_steps").size(), 10);
}

TEST_F(JobMetricsTest, NoJobNoSeries) {
  Put("ended", v1::Job::SUCCEEDED, 7, 1);
  std::vector<prometheus::MetricFamily> families;
  ASSERT_TRUE(
      store_->Read([&](store::ReadTransaction& t) { return CollectRunningJobs(t, &families); })
          .ok());
  EXPECT_THAT(families, IsEmpty());
}

}  // namespace
}  // namespace ringleader::api
