// What a collector gets of what was committed, over restarts of the coordinator.
#include "coordinator/trace/job_tracer.h"

#include <gmock/gmock.h>
#include <prometheus/registry.h>

#include <atomic>
#include <set>
#include <string>

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
using testing::WaitingJob;
using v1::Attempt;

class JobTracerTest : public store::testing::OpenedStoreTest {
 protected:
  void Start(const std::string& endpoint, store::Store* store = nullptr) {
    tracer_.reset();
    auto tracer = JobTracer::Start({.endpoint = endpoint}, {.at_end = absl::Minutes(1)},
                                   store == nullptr ? store_.get() : store, &registry_);
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
  tracer_.reset();
  auto tracer = JobTracer::Start({.endpoint = "http://" + collector.Address()}, ExportLimits(),
                                 store_.get(), &registry_);
  ASSERT_TRUE(tracer.ok()) << tracer.status();
  tracer_ = *std::move(tracer);
  Place(0, &job_);
  for (int i = 0; i < 100; ++i) Save();
  collector.AwaitCalls(1);
  for (int i = 0; i < 100; ++i) Save();
  tracer_.reset();
}

}  // namespace
}  // namespace ringleader::trace
