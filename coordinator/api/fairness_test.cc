// One client cannot take the coordinator from the others: limits, pages and deadlines over real
// gRPC.
#include <grpcpp/generic/generic_stub.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/net/notice.h"
#include "base/protocol_version.h"
#include "coordinator/api/testing/heap.h"
#include "coordinator/api/testing/server_fixture.h"
#include "coordinator/store/testing/hanging_store.h"
#include "ringleader/v1/access_service.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::api {
namespace {

using ::testing::AllOf;
using testing::BytesInUse;
using ::testing::HasSubstr;
using testing::Spec;

constexpr char kReached[] = "ringleader_coordinator_limit_reached_total";

class FairnessTest : public testing::ServerTest {
 protected:
  // A call that may take long, on its own thread.
  struct AsyncCreate {
    v1::CreateJobRequest request;
    v1::Job job;
    std::unique_ptr<grpc::ClientContext> context = Context();
    grpc::Status status;
    absl::Notification done;
  };
  std::unique_ptr<AsyncCreate> StartCreate(const std::string& name) {
    auto call = std::make_unique<AsyncCreate>();
    *call->request.mutable_spec() = Spec(name);
    jobs_->async()->CreateJob(call->context.get(), &call->request, &call->job,
                              [call = call.get()](const grpc::Status& status) {
                                call->status = status;
                                call->done.Notify();
                              });
    return call;
  }
};

// Submissions that hang, which on a busy file system is what looking at a job's files may do.
TEST_F(FairnessTest, SlowCallsLeaveRoomForOthersAndAreLimited) {
  std::optional<store::testing::HangingStore> hanging;
  const absl::Cleanup stop = [&] { server_.reset(); };
  Start({.listen = Loopback(), .check_files = false}, {.checks_per_client = 12}, {},
        [&](store::Store* store) { return &hanging.emplace(store); });
  hanging->hangs = true;
  // One more than may be under way; those that wait for a thread are.
  std::vector<std::unique_ptr<AsyncCreate>> calls;
  for (int i = 0; i < 13; ++i) calls.push_back(StartCreate(absl::StrCat("j", i)));
  const auto ended = [&] {
    return std::find_if(calls.begin(), calls.end(),
                        [](const auto& call) { return call->done.HasBeenNotified(); });
  };
  while (ended() == calls.end()) absl::SleepFor(absl::Milliseconds(1));
  const auto first = ended();
  (*first)->done.WaitForNotification();  // ThreadSanitizer sees that it is over by this alone
  const grpc::Status refused = (*first)->status;
  v1::ListNodesResponse nodes;
  EXPECT_TRUE(nodes_->ListNodes(Context().get(), {}, &nodes).ok());
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(),
              AllOf(HasSubstr("lists by label at the same time: ipv4:127.0.0.1 has 12"),
                    HasSubstr("--checks-per-client"), HasSubstr("wait until some have ended")));
  EXPECT_GE(Metric(kReached), 1);
  hanging->go_on.Notify();
  for (const auto& call : calls) call->done.WaitForNotification();
  v1::Job job;
  EXPECT_TRUE(Create("after", &job).ok());
}

TEST_F(FairnessTest, WatchesOfOneClientAreLimited) {
  Start({.listen = Loopback(), .check_files = false}, {.watches_per_client = 2});
  Created("a");
  const std::vector<OpenWatch> watches = WatchThriceWhereTwoMay("jobs/a");
  const grpc::Status refused = watches[2].stream->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("--watches-per-client"));
  EXPECT_EQ(Metric(kReached), 1);
  for (const OpenWatch& watch : watches) watch.context->TryCancel();
}

// gRPC's own service; its answer is that of a call which the server gave up.
TEST_F(FairnessTest, HealthWatchesOfOneClientAreLimited) {
  Start({.listen = Loopback(), .check_files = false},
        {.health_calls_per_client = 2, .watches_per_client = 1});
  struct Watch {
    std::unique_ptr<grpc::ClientContext> context = Context();
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
    grpc::ByteBuffer answer;
    grpc::Status status;
  };
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);  // of the server as a whole
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  std::vector<Watch> watches(3);
  const auto open = [&](Watch& watch) {
    watch.call = stub.PrepareCall(watch.context.get(), "/grpc.health.v1.Health/Watch", &queue);
    watch.call->StartCall(&watch);
    EXPECT_TRUE(next());
    watch.call->WriteLast(request, {}, &watch);
    next();  // fails where the call has ended
    watch.call->Read(&watch.answer, &watch);
    return next();
  };
  const auto finish = [&](Watch& watch) {
    watch.call->Finish(&watch.status, &watch);
    next();
    return watch.status.error_code();
  };
  const auto end = [&](Watch& watch) {
    watch.context->TryCancel();
    return finish(watch);
  };
  EXPECT_TRUE(open(watches[0]));
  EXPECT_TRUE(open(watches[1]));
  EXPECT_FALSE(open(watches[2]));
  EXPECT_EQ(finish(watches[2]), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(Metric(kReached), 1);
  end(watches[0]);
  // Its place is free once the server has heard of that.
  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  bool is_open = false;
  while (!is_open && absl::Now() < give_up) {
    Watch again;
    is_open = open(again);
    end(again);
  }
  EXPECT_TRUE(is_open);
  end(watches[1]);
  queue.Shutdown();
}

// A change that a limit refused is a change that somebody wanted to make.
TEST_F(FairnessTest, WhatALimitRefusesIsInTheAuditLog) {
  Start({.listen = Loopback(), .check_files = false}, {.submitted_mebibytes_per_client = 1});
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("large");
  request.mutable_spec()->mutable_model()->set_config("/" + std::string(1100 << 10, 'x'));
  v1::Job job;
  EXPECT_EQ(jobs_->CreateJob(Context().get(), request, &job).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto access = v1::AccessService::NewStub(channel_);
  v1::ListAuditRecordsResponse log;
  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  while (log.records().empty() && absl::Now() < give_up) {
    ASSERT_TRUE(access->ListAuditRecords(Context().get(), {}, &log).ok());
  }
  ASSERT_EQ(log.records_size(), 1);
  EXPECT_EQ(log.records(0).method(), "JobService.CreateJob");
  EXPECT_EQ(log.records(0).resource(), "jobs/large");
  EXPECT_EQ(log.records(0).outcome(), "RESOURCE_EXHAUSTED");
}

TEST_F(FairnessTest, AnIdleWatchKeepsNoPage) {
  constexpr int kWatches = 16;
  Created("a");
  Write([&](store::WriteTransaction& t) {
    v1::StepReport step;
    step.set_step(1);
    for (int layer = 0; layer < 20'000; ++layer) step.add_layers()->set_density(0.1);
    return t.PutStep("a", step);
  });
  const size_t before = BytesInUse();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>>> watches;
  size_t page_bytes = 0;
  for (int i = 0; i < kWatches; ++i) {
    v1::WatchJobRequest request;
    request.set_name("jobs/a");
    request.set_include_steps(true);
    contexts.push_back(Context());
    watches.push_back(jobs_->WatchJob(contexts.back().get(), request));
    v1::WatchJobResponse page;
    ASSERT_TRUE(watches.back()->Read(&page));
    ASSERT_EQ(page.steps_size(), 1);
    page_bytes = page.SpaceUsedLong();
  }
  // Each goes idle when it has found no more to say.
  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  const auto kept = [&] {
    const size_t now = BytesInUse();
    return now - std::min(now, before);
  };
  while (kept() > kWatches * page_bytes / 4 && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_LT(kept(), kWatches * page_bytes / 4);
  for (auto& context : contexts) context->TryCancel();
}

TEST_F(FairnessTest, SubmittedBytesComeBackOverTime) {
  Start({.listen = Loopback(), .check_files = false}, {.submitted_mebibytes_per_client = 1});
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("large");
  request.mutable_spec()->mutable_model()->set_config("/" + std::string(400 << 10, 'x'));
  v1::Job job;
  const auto send = [&] {
    v1::ValidateJobRequest validate;
    *validate.mutable_spec() = request.spec();
    v1::ValidateJobResponse response;
    return jobs_->ValidateJob(Context().get(), validate, &response);
  };
  EXPECT_NE(send().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(send().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const grpc::Status refused = send();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(),
              AllOf(HasSubstr("submitted bytes"), HasSubstr("--submitted-mebibytes-per-client"),
                    HasSubstr("wait")));
  EXPECT_TRUE(Create("small", &job).ok());
  clock_.Advance(absl::Seconds(16));
  EXPECT_NE(send().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(FairnessTest, PagesEndWhereTheyWouldBeTooLarge) {
  constexpr int kJobs = 30;
  for (int i = 0; i < kJobs; ++i) {
    Write([&](store::WriteTransaction& t) {
      v1::Job job;
      *job.mutable_spec() = Spec(absl::StrCat("j", i));
      job.set_name("jobs/" + job.spec().name());
      job.set_state(v1::Job::FAILED);
      job.set_state_reason(std::string(100'000, 'x'));
      return t.CreateJob(&job);
    });
  }
  v1::ListJobsRequest request;
  request.set_page_size(1000);
  v1::ListJobsResponse page;
  int listed = 0;
  do {
    ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &page).ok());
    EXPECT_LE(page.ByteSizeLong(), store::kPageBytes + (64 << 10));
    listed += page.jobs_size();
    request.set_page_token(page.next_page_token());
  } while (!page.next_page_token().empty());
  EXPECT_EQ(listed, kJobs);

  // The same of steps, evaluations and logs, which come in messages of their own.
  constexpr uint64_t kReports = 40;
  Write([&](store::WriteTransaction& t) -> absl::Status {
    for (uint64_t i = 1; i <= kReports; ++i) {
      v1::StepReport step;
      step.set_step(i);
      for (int layer = 0; layer < 4000; ++layer) step.add_layers()->set_density(0.1);
      absl::Status put = t.PutStep("j0", step);
      v1::LogLine line;
      line.set_text(std::string(100'000, 'x'));
      if (put.ok()) put = t.AppendLogs("j0", 1, {line});
      v1::Attempt attempt;
      attempt.set_number(1);
      attempt.set_state(v1::Attempt::FAILED);
      if (put.ok()) put = t.PutAttempt("j0", attempt);
      if (!put.ok()) return put;
    }
    return absl::OkStatus();
  });
  v1::WatchJobRequest watch;
  watch.set_name("jobs/j0");
  watch.set_include_steps(true);
  const auto watching = Context();
  const auto steps = jobs_->WatchJob(watching.get(), watch);
  v1::WatchJobResponse news;
  uint64_t seen = 0;
  while (steps->Read(&news)) {
    EXPECT_LE(news.ByteSizeLong(), store::kPageBytes + (256 << 10));
    seen += static_cast<uint64_t>(news.steps_size());
  }
  EXPECT_TRUE(steps->Finish().ok());
  EXPECT_EQ(seen, kReports);

  v1::TailLogsRequest tail;
  tail.set_job("jobs/j0");
  tail.set_rank(-1);
  tail.set_last_lines(30);
  const auto tailing = Context();
  const auto lines = logs_->TailLogs(tailing.get(), tail);
  v1::TailLogsResponse logged;
  int last = 0;
  while (lines->Read(&logged)) {
    EXPECT_LE(logged.ByteSizeLong(), store::kPageBytes + (256 << 10));
    last += logged.lines_size();
  }
  EXPECT_TRUE(lines->Finish().ok());
  EXPECT_EQ(last, 30);
}

TEST_F(FairnessTest, SessionsHaveToSayWhoTheyAre) {
  Start({.listen = Loopback(), .check_files = false}, {.silent_sessions_per_client = 3},
        {.hello_timeout = absl::Seconds(8)});
  const auto workers = v1::WorkerControl::NewStub(channel_);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  using Stream = grpc::ClientReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>;
  const auto open = [&]() -> std::unique_ptr<Stream> {
    contexts.push_back(Context());
    return workers->Session(contexts.back().get());
  };
  // One that speaks gives its place back.
  const auto speaking = open();
  v1::WorkerMessage message;
  message.mutable_hello()->set_node("nodes/n1");
  message.mutable_hello()->set_incarnation("folder.process");
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  ASSERT_TRUE(speaking->Write(message));
  v1::CoordinatorMessage answer;
  ASSERT_TRUE(speaking->Read(&answer));
  EXPECT_TRUE(answer.has_welcome());

  std::vector<std::unique_ptr<Stream>> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(open());
  std::vector<std::string> errors;
  for (const auto& stream : silent) {
    EXPECT_FALSE(stream->Read(&answer));
    errors.push_back(stream->Finish().error_message());
  }
  EXPECT_THAT(errors, ::testing::UnorderedElementsAre(
                          HasSubstr("no hello within 8s"), HasSubstr("no hello within 8s"),
                          HasSubstr("no hello within 8s"), HasSubstr("--silent-sessions")));
  EXPECT_EQ(Metric(kReached), 1);
  // There is room again, and the session that spoke goes on.
  const auto again = open();
  message.mutable_heartbeat()->set_number(7);
  ASSERT_TRUE(speaking->Write(message));
  do {
    ASSERT_TRUE(speaking->Read(&answer));
  } while (answer.heartbeat_number() != 7);
  for (auto& context : contexts) context->TryCancel();
}

// gRPC gives each of these streams a thread.
TEST_F(FairnessTest, ReflectionTakesFewThreads) {
  constexpr int kStreams = 40;
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  struct Stream {
    std::unique_ptr<grpc::ClientContext> context = Context();
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
    grpc::ByteBuffer answer;
    grpc::Status status;
    enum { kStarts, kReads, kEnds } next = kStarts;
  };
  std::vector<Stream> streams(kStreams);
  for (Stream& stream : streams) {
    stream.call =
        stub.PrepareCall(stream.context.get(),
                         "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
    stream.call->StartCall(&stream);
  }
  // Nobody asks anything, so that only what is refused ends.
  void* tag = nullptr;
  bool ok = false;
  const Stream* refused = nullptr;
  while (refused == nullptr && queue.Next(&tag, &ok)) {
    auto* const stream = static_cast<Stream*>(tag);
    if (stream->next == Stream::kStarts) {
      stream->call->Read(&stream->answer, tag);
      stream->next = Stream::kReads;
    } else if (stream->next == Stream::kReads) {
      stream->call->Finish(&stream->status, tag);
      stream->next = Stream::kEnds;
    } else {
      refused = stream;
    }
  }
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
      << refused->status.error_message();
  v1::ListNodesResponse nodes;
  EXPECT_TRUE(nodes_->ListNodes(Context().get(), {}, &nodes).ok());
  for (Stream& stream : streams) stream.context->TryCancel();
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

// Requests are refused by name, replies and health say what is wrong, and that ends with its cause.
TEST_F(FairnessTest, AFullDiskIsSaid) {
  const std::string small = dir_.File("small");
  std::filesystem::create_directory(small);
  if (mount("tmpfs", small.c_str(), "tmpfs", 0, "size=8m") != 0) {
    GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] {
    server_.reset();
    controller_.reset();
    store_.reset();
    umount(small.c_str());
  };
  database_ = small + "/db";
  reserve_bytes_ = 1 << 20;
  Start({.listen = Loopback(), .check_files = false});
  Created("before");
  {
    std::ofstream ballast(small + "/ballast");
    const std::string block(4096, 'b');
    while (ballast.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  v1::Job job;
  const grpc::Status refused = Create("during", &job);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("the disk is full"));
  const auto context = Context();
  v1::ListNodesResponse nodes;
  ASSERT_TRUE(nodes_->ListNodes(context.get(), {}, &nodes).ok());
  const auto& trailing = context->GetServerTrailingMetadata();
  const auto notice = trailing.find(kNoticeKey);
  ASSERT_NE(notice, trailing.end());
  EXPECT_THAT(std::string(notice->second.data(), notice->second.size()),
              HasSubstr("the disk is full"));
  EXPECT_TRUE(Get("jobs/before", &job).ok());
  std::filesystem::remove(small + "/ballast");
  EXPECT_TRUE(Create("after", &job).ok());
  EXPECT_EQ(Get("jobs/during", &job).error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace ringleader::api
