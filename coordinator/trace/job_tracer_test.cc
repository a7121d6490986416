// What a collector gets of what was committed, over restarts of the coordinator.
#include "coordinator/trace/job_tracer.h"

#include <gmock/gmock.h>
#include <prometheus/registry.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <string>

#include "base/files.h"
#include "coordinator/store/testing/forwarding_store.h"
#include "coordinator/store/testing/opened_store.h"
#include "coordinator/trace/testing/collector.h"
#include "coordinator/trace/testing/traced_job.h"

namespace ringleader::trace {
namespace {

using testing::BeReady;
using testing::Collector;
using ::testing::ElementsAre;
using testing::End;
using testing::Place;
using testing::Step;
using testing::Train;
using ::testing::UnorderedElementsAre;
using testing::WaitingJob;
using v1::Attempt;

class JobTracerTest : public store::testing::OpenedStoreTest {
 protected:
  void Start(const std::string& endpoint, store::Store* store = nullptr) {
    tracer_.reset();
    auto tracer = JobTracer::Start({.endpoint = endpoint}, limits_, dir_.File("traces-sent"),
                                   store == nullptr ? store_.get() : store, &clock_, &registry_);
    ASSERT_TRUE(tracer.ok()) << tracer.status();
    tracer_ = *std::move(tracer);
  }
  void Save() {
    Write([&](store::WriteTransaction& t) -> absl::Status {
      if (job_.sequence() == 0) t.CreateJob(&job_).IgnoreError();
      for (const Attempt& attempt : job_.attempts()) t.PutAttempt("a", attempt).IgnoreError();
      if (job_.attempts(0).last_step() > 0) t.PutStep("a", Step(1, 17)).IgnoreError();
      return t.UpdateJob(&job_);
    });
  }

  v1::Job job_ = WaitingJob("a", "a-1");
  FakeClock clock_{testing::At(0)};  // when tracing begins
  ExportLimits limits_ = {.at_end = absl::Minutes(1)};
  prometheus::Registry registry_;
  std::unique_ptr<JobTracer> tracer_;
};

TEST_F(JobTracerTest, TheTraceGoesOnWithAnotherCoordinator) {
  Collector collector;
  Start("http://" + collector.Address());
  Attempt& attempt = *Place(0, &job_);
  Save();
  collector.Await(2);
  BeReady(10, &attempt);
  Save();
  tracer_.reset();  // what was committed is sent first
  collector.Await(3);
  Reopen();
  Start("http://" + collector.Address());
  Train(Step(1, 17), &attempt);
  Save();
  collector.Await(5);
  End(Attempt::SUCCEEDED, "", 60, &attempt);
  job_.set_state(v1::Job::SUCCEEDED);
  Save();
  tracer_.reset();
  std::vector<std::string> names;
  std::set<std::string> traces;
  for (const otlp::Span& span : collector.Await(6)) {
    names.push_back(span.name());
    traces.insert(span.trace_id());
  }
  EXPECT_THAT(names, ElementsAre("queue", "place", "start", "step", "load", "attempt"));
  EXPECT_EQ(traces.size(), 1u);
}

// A coordinator that is killed leaves a queue that nobody has sent, of a job that goes on and of
// one that has ended. The next one sends it, and nothing that the collector has.
TEST_F(JobTracerTest, WhatAKilledCoordinatorHadNotSentTheNextSends) {
  Collector collector;
  limits_ = {.at_end = absl::ZeroDuration()};  // as good as SIGKILL for what waits
  Start("http://" + collector.Address());
  Attempt& attempt = *Place(0, &job_);
  Save();
  collector.Await(2);
  // The log is written within a pass or two.
  const std::string log = dir_.File("traces-sent");
  const absl::Time give_up = absl::Now() + absl::Minutes(1);
  while (!std::filesystem::exists(log) && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  collector.SetAnswer(Collector::Hang);
  BeReady(10, &attempt);
  Save();
  collector.AwaitCalls(2);
  Train(Step(1, 17), &attempt);
  End(Attempt::SUCCEEDED, "", 60, &attempt);
  job_.set_state(v1::Job::SUCCEEDED);
  SetTime(testing::At(60), job_.mutable_end_time());
  Save();
  tracer_.reset();
  Reopen();
  collector.SetAnswer(nullptr);
  limits_ = {.at_end = absl::Minutes(1)};
  Start("http://" + collector.Address());
  collector.Await(6);
  tracer_.reset();
  std::vector<std::string> names;
  for (const otlp::Span& span : collector.Await(6)) names.push_back(span.name());
  EXPECT_THAT(names, UnorderedElementsAre("queue", "place", "start", "step", "load", "attempt"));
  Start("http://" + collector.Address());
  tracer_.reset();
  EXPECT_EQ(collector.Await(6).size(), 6u) << "a third coordinator sends nothing again";
}

TEST_F(JobTracerTest, ADamagedLogStopsNobody) {
  Collector collector;
  ASSERT_TRUE(WriteFileAtomically(dir_.File("traces-sent"), "nonsense").ok());
  Start("http://" + collector.Address());
  Place(0, &job_);
  Save();
  collector.Await(2);
  tracer_.reset();
}

// What could not be read is read with the next pass, though nothing changes any more.
TEST_F(JobTracerTest, AReadThatFailsLosesNothing) {
  class FailingStore : public store::testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Read(absl::FunctionRef<absl::Status(store::ReadTransaction&)> body) override {
      if (failures > 0 && failures-- > 0) return absl::UnavailableError("no disk");
      return ForwardingStore::Read(body);
    }
    std::atomic<int> failures = 0;
  };
  Collector collector;
  FailingStore failing(store_.get());
  Start("http://" + collector.Address(), &failing);
  failing.failures = 2;
  Place(0, &job_);
  Save();
  collector.Await(2);
  tracer_.reset();
}

TEST_F(JobTracerTest, ACollectorThatHangsDoesNotStopTheStore) {
  Collector collector;
  collector.SetAnswer(Collector::Hang);
  limits_ = ExportLimits();
  Start("http://" + collector.Address());
  Place(0, &job_);
  for (int i = 0; i < 100; ++i) Save();
  collector.AwaitCalls(1);
  for (int i = 0; i < 100; ++i) Save();
  tracer_.reset();
}

}  // namespace
}  // namespace ringleader::trace
