// Clients that do not read what they are sent cost the coordinator their share of memory, and no
// more.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <list>
#include <string>

#include "absl/time/clock.h"
#include "coordinator/api/testing/server_fixture.h"

namespace ringleader::api {
namespace {

using ::testing::HasSubstr;
using testing::Spec;

constexpr char kReached[] = "ringleader_coordinator_limit_reached_total";
constexpr char kListJobs[] = "/ringleader.v1.JobService/ListJobs";
constexpr char kCancelJob[] = "/ringleader.v1.JobService/CancelJob";
constexpr char kWatchJob[] = "/ringleader.v1.JobService/WatchJob";

class UnreadTest : public testing::ServerTest {
 protected:
  // A call whose answer is left with the coordinator: gRPC takes 64 KiB of it by itself.
  struct Unread {
    std::unique_ptr<grpc::ClientContext> context = Context();
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call;
    grpc::ByteBuffer answer;
    grpc::Status status;
  };

  ~UnreadTest() override {
    for (Unread& call : calls_) {
      call.context->TryCancel();
      EndOf(call);
    }
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  // An ended job of some 300 kB.
  void AddLargeJob(const std::string& name, v1::Job::State state = v1::Job::FAILED) {
    Write([&](store::WriteTransaction& t) {
      v1::Job job;
      *job.mutable_spec() = Spec(name);
      job.set_name("jobs/" + name);
      job.set_state(state);
      job.set_state_reason(std::string(300'000, 'x'));
      return t.CreateJob(&job);
    });
  }
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  Unread& Begin(const char* method, const google::protobuf::Message& request) {
    Unread& call = calls_.emplace_back();
    if (!stub_) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // would take more of it
      arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 16);
      stub_.emplace(grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                              grpc::InsecureChannelCredentials(), arguments));
    }
    call.call = stub_->PrepareCall(call.context.get(), method, &queue_);
    call.call->StartCall(&call);
    EXPECT_TRUE(Next());
    grpc::ByteBuffer bytes;
    bool owns = false;
    const grpc::Status written =
        grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(request, &bytes,
                                                                                   &owns);
    EXPECT_TRUE(written.ok());
    call.call->WriteLast(bytes, {}, &call);
    Next();
    return call;
  }
  // Reads what there is, and how the call ended.
  grpc::Status EndOf(Unread& call) {
    if (call.call == nullptr) return call.status;
    do {
      call.call->Read(&call.answer, &call);
    } while (Next());
    call.call->Finish(&call.status, &call);
    Next();
    call.call.reset();
    return call.status;
  }
  // Whether `again` is refused in time, for what the unread calls hold.
  bool IsRefused(const std::function<grpc::Status()>& again,
                 const std::string& limit = "--unread-mebibytes-per-client") {
    const absl::Time give_up = absl::Now() + absl::Seconds(60);
    while (absl::Now() < give_up) {
      const grpc::Status status = again();
      if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
        EXPECT_THAT(status.error_message(), HasSubstr(limit));
        return true;
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }
  grpc::Status List() {
    v1::ListJobsResponse page;
    return jobs_->ListJobs(Context().get(), {}, &page);
  }

  // Whether a list is answered again in time. The next may be refused: that it was read is heard of
  // a little later.
  bool HasRoomInTime() {
    const absl::Time give_up = absl::Now() + absl::Seconds(60);
    while (absl::Now() < give_up) {
      if (List().ok()) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  std::optional<grpc::GenericStub> stub_;
  grpc::CompletionQueue queue_;
  std::list<Unread> calls_;
};

TEST_F(UnreadTest, AnswersOfOneClientAreLimited) {
  Start({.listen = Loopback(), .check_files = false}, {.unread_mebibytes_per_client = 1});
  for (int i = 0; i < 3; ++i) AddLargeJob(absl::StrCat("j", i));
  EXPECT_TRUE(List().ok());
  EXPECT_TRUE(IsRefused([&] {
    Begin(kListJobs, v1::ListJobsRequest());
    return List();
  }));
  EXPECT_GE(Metric(kReached), 1);
  // Once they are read, there is room again.
  int read = 0;
  for (Unread& call : calls_) read += EndOf(call).ok() ? 1 : 0;
  EXPECT_GE(read, 1);
  EXPECT_TRUE(HasRoomInTime());
}

// They are refused before they are made, for what was made is told.
TEST_F(UnreadTest, ChangesOfWhoDoesNotReadAreRefused) {
  Start({.listen = Loopback(), .check_files = false}, {.unread_mebibytes_per_client = 1});
  AddLargeJob("j", v1::Job::CANCELLED);
  v1::CancelJobRequest request;
  request.set_name("jobs/j");
  v1::Job job;
  std::string name;
  EXPECT_TRUE(IsRefused([&] {
    Begin(kCancelJob, request);
    name = absl::StrCat("after-", calls_.size());
    return Create(name, &job);
  }));
  EXPECT_EQ(Get("jobs/" + name, &job).error_code(), grpc::StatusCode::NOT_FOUND);
}

// What all together leave unread is no reason to refuse a change of somebody who reads.
TEST_F(UnreadTest, NobodyKeepsOthersFromAChange) {
  Start({.listen = Loopback(), .check_files = false}, {.unread_mebibytes = 1});
  for (int i = 0; i < 3; ++i) AddLargeJob(absl::StrCat("j", i));
  EXPECT_TRUE(IsRefused(
      [&] {
        Begin(kListJobs, v1::ListJobsRequest());
        return List();
      },
      "--unread-mebibytes)"));
  v1::Job job;
  EXPECT_TRUE(Create("after", &job).ok());
}

TEST_F(UnreadTest, AnAnswerThatNobodyTakesEndsItsCall) {
  Start({.listen = Loopback(), .check_files = false, .unread_patience = absl::Seconds(2)},
        {.unread_mebibytes_per_client = 1});
  for (int i = 0; i < 3; ++i) AddLargeJob(absl::StrCat("j", i));
  EXPECT_TRUE(IsRefused([&] {
    Begin(kListJobs, v1::ListJobsRequest());
    return List();
  }));
  // There is room again though nobody reads.
  const absl::Time patience = absl::Now() + absl::Minutes(1);
  while (limits_->unread_answers.taken() > 0 && absl::Now() < patience) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(HasRoomInTime());
  int ended = 0;
  for (Unread& call : calls_) {
    ended += EndOf(call).error_code() == grpc::StatusCode::CANCELLED ? 1 : 0;
  }
  EXPECT_GE(ended, 1);
}

TEST_F(UnreadTest, WatchesOfOneClientAreLimitedByWhatTheyHold) {
  Start({.listen = Loopback(), .check_files = false}, {.unread_mebibytes_per_client = 1});
  AddLargeJob("j");
  v1::WatchJobRequest request;
  request.set_name("jobs/j");
  EXPECT_TRUE(IsRefused([&] {
    Begin(kWatchJob, request);
    return EndOf(Begin(kWatchJob, request));
  }));
  // Answers have a share of their own.
  EXPECT_TRUE(List().ok());
}

}  // namespace
}  // namespace ringleader::api
