// 10,000 inputs that no client would send, at the coordinator's gRPC port: raw bytes on the socket,
// HTTP/2 frames of garbage, and mutated messages to every method. It must not crash, nor keep
// memory or file descriptors, and must go on serving. Deterministic but for timing.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/net/address.h"
#include "base/protocol_version.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.pb.h"
#include "ringleader/v1/worker_control.pb.h"
#include "tests/support/coordinator_process.h"

namespace ringleader::testing {
namespace {

constexpr int kRawInputs = 2000;
constexpr int kMessages = 18000;
constexpr int kInFlight = 32;

using Random = std::mt19937;

std::string RandomBytes(Random& random, size_t bytes) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// A few of: flip a bit, set a byte, cut out, repeat a part, cut off, insert noise.
std::string Mutate(Random& random, std::string bytes) {
  const int mutations = 1 + static_cast<int>(random() % 6);
  for (int i = 0; i < mutations; ++i) {
    if (bytes.empty()) return RandomBytes(random, random() % 64);
    const size_t at = random() % bytes.size();
    const size_t span = std::min<size_t>(1 + random() % 16, bytes.size() - at);
    switch (random() % 6) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(random() % 2 == 0 ? 0xff : random());
        break;
      case 2:
        bytes.erase(at, span);
        break;
      case 3:
        bytes.insert(at, bytes.substr(at, span));
        break;
      case 4:
        bytes.resize(at);
        break;
      default:
        bytes.insert(at, RandomBytes(random, random() % 16));
    }
  }
  return bytes;
}

struct Method {
  std::string path;
  std::vector<std::string> seeds;  // well-formed messages
  bool streaming = false;
};

template <typename... Messages>
Method MethodOf(const std::string& path, bool streaming, const Messages&... seeds) {
  return {absl::StrCat("/ringleader.v1.", path), {seeds.SerializeAsString()...}, streaming};
}

std::vector<Method> Methods() {
  v1::CreateJobRequest create;
  *create.mutable_spec() = TestJob("fuzz", 2, 10);
  (*create.mutable_spec()->mutable_labels())["team"] = "ocean";
  create.set_request_id("6f1c");
  v1::GetJobRequest get;
  get.set_name("jobs/fuzz");
  v1::ListJobsRequest list;
  list.set_page_size(3);
  list.set_filter("state=PENDING AND labels.team!=\"x\"");
  list.set_page_token("MTIzNDU2Nzg5MDEyMzQ1Njc4OTA");
  v1::CancelJobRequest cancel;
  cancel.set_name("jobs/fuzz");
  cancel.set_etag("1");
  cancel.set_request_id("7a");
  v1::ValidateJobRequest validate;
  *validate.mutable_spec() = create.spec();
  v1::WatchJobRequest watch;
  watch.set_name("jobs/fuzz");
  watch.set_include_steps(true);
  watch.set_after_revision(1);
  v1::TailLogsRequest tail;
  tail.set_job("jobs/fuzz");
  tail.set_attempt(1);
  tail.set_rank(-1);
  tail.set_last_lines(5);
  v1::WorkerMessage hello;
  hello.mutable_hello()->set_node("nodes/fuzz");
  hello.mutable_hello()->set_incarnation("i");
  hello.mutable_hello()->set_protocol_version(kProtocolVersion);
  hello.mutable_hello()->mutable_inventory()->set_trainers(2);
  hello.mutable_hello()->mutable_inventory()->set_hostname("h");
  v1::RunningAttempt* const running = hello.mutable_hello()->add_attempts();
  running->set_job("fuzz");
  running->set_attempt(1);
  running->set_fencing_token(1);
  running->add_ranks(0);
  v1::WorkerMessage step;
  step.set_sequence(1);
  step.mutable_event()->set_job("fuzz");
  step.mutable_event()->set_attempt(1);
  step.mutable_event()->set_fencing_token(1);
  step.mutable_event()->mutable_step()->set_step(1);
  step.mutable_event()->mutable_step()->add_layers()->add_tiles_per_ring_step(7);
  v1::WorkerMessage heartbeat;
  heartbeat.mutable_heartbeat()->set_number(1);
  v1::WorkerMessage exited;
  exited.set_sequence(2);
  exited.mutable_event()->set_job("fuzz");
  exited.mutable_event()->mutable_trainer_exited()->set_rank(1);
  v1::WorkerMessage logs;
  logs.set_sequence(1);
  logs.mutable_event()->set_job("fuzz");
  logs.mutable_event()->mutable_logs()->add_lines()->set_text("line");
  return {MethodOf("JobService/CreateJob", false, create),
          MethodOf("JobService/GetJob", false, get),
          MethodOf("JobService/ListJobs", false, list),
          MethodOf("JobService/DeleteJob", false, cancel),
          MethodOf("JobService/CancelJob", false, cancel),
          MethodOf("JobService/PauseJob", false, cancel),
          MethodOf("JobService/ResumeJob", false, cancel),
          MethodOf("JobService/ValidateJob", false, validate),
          MethodOf("NodeService/ListNodes", false, list),
          MethodOf("NodeService/DrainNode", false, get),
          MethodOf("NodeService/UndrainNode", false, get),
          MethodOf("JobService/WatchJob", true, watch),
          MethodOf("LogService/TailLogs", true, tail),
          MethodOf("WorkerControl/Session", true, hello, step, heartbeat, exited, logs),
          MethodOf("JobService/NoSuchMethod", false, get)};
}

// One call with some messages; cancels once it has heard anything. Deletes itself.
class Call : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Call(grpc::GenericStub* stub, const std::string& path, const std::vector<std::string>& messages,
       std::function<void(const grpc::Status&)> done)
      : done_(std::move(done)) {
    for (const std::string& message : messages) {
      const grpc::Slice slice(message);
      messages_.emplace_back(&slice, 1);
    }
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    stub->PrepareBidiStreamingCall(&context_, path, {}, this);
    StartRead(&incoming_);
    WriteNext();
    StartCall();
  }

  void OnWriteDone(bool ok) override {
    if (ok) WriteNext();
  }
  void OnReadDone(bool ok) override {
    if (ok) context_.TryCancel();
  }
  void OnDone(const grpc::Status& status) override {
    // Before the test hears of it: the context must not hold the channel's last reference in a
    // callback.
    const std::function<void(const grpc::Status&)> done = done_;
    delete this;
    done(status);
  }

 private:
  void WriteNext() {
    if (next_ < messages_.size()) {
      StartWrite(&messages_[next_++]);
    } else if (next_++ == messages_.size()) {
      StartWritesDone();
    }
  }

  grpc::ClientContext context_;
  std::vector<grpc::ByteBuffer> messages_;
  size_t next_ = 0;
  grpc::ByteBuffer incoming_;
  const std::function<void(const grpc::Status&)> done_;
};

class GrpcFuzzTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(coordinator_.Start()) << coordinator_.log(); }

  void ExpectUnharmed() {
    ASSERT_TRUE(coordinator_.process().Running()) << coordinator_.log();
    EXPECT_TRUE(coordinator_.Serving());
    v1::CreateJobRequest request;
    *request.mutable_spec() = TestJob(absl::StrCat("after-", ++created_), 1, 10);
    v1::Job job;
    const grpc::Status status = v1::JobService::NewStub(coordinator_.Channel())
                                    ->CreateJob(CoordinatorProcess::Context().get(), request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  int OpenFiles() {
    int files = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(
             absl::StrCat("/proc/", coordinator_.process().pid(), "/fd"))) {
      ++files;
    }
    return files;
  }
  int64_t ResidentBytes() {
    int64_t total = 0, resident = 0;
    std::ifstream(absl::StrCat("/proc/", coordinator_.process().pid(), "/statm")) >> total >>
        resident;
    return resident * sysconf(_SC_PAGESIZE);
  }
  void SendRaw(const std::string& bytes) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(ParseAddress(coordinator_.address())->port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    // The server may hang up in the middle, which is its right.
    [[maybe_unused]] const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  // `count` messages to all methods in turn, kInFlight calls at a time; counts the outcomes.
  void SendMessages(Random& random, int count) {
    const auto channel = coordinator_.Channel();
    grpc::GenericStub stub(channel);
    const std::vector<Method> methods = Methods();
    absl::Mutex mu;
    int in_flight = 0;
    const auto room = [&] { return in_flight < kInFlight; };
    const auto none = [&] { return in_flight == 0; };
    for (int sent = 0; sent < count;) {
      const Method& method = methods[random() % methods.size()];
      std::vector<std::string> messages;
      const size_t most = method.seeds.size();
      for (size_t i = 0; i < (most == 1 ? 1 : 1 + random() % 5); ++i) {
        const std::string& seed = method.seeds[most == 1 || i == 0 ? 0 : random() % most];
        // Some of a session's messages stay whole, so that what follows a good hello is reached.
        const bool whole = most > 1 && random() % 2 == 0;
        messages.push_back(random() % 10 == 0 ? RandomBytes(random, random() % 200)
                           : whole            ? seed
                                              : Mutate(random, seed));
      }
      sent += static_cast<int>(messages.size());
      {
        absl::MutexLock lock(&mu);
        mu.Await(absl::Condition(&room));
        ++in_flight;
      }
      new Call(&stub, method.path, messages, [&](const grpc::Status& status) {
        absl::MutexLock lock(&mu);
        ++outcomes_[status.error_code()];
        if (status.error_code() == grpc::StatusCode::UNKNOWN ||
            status.error_code() == grpc::StatusCode::DATA_LOSS) {
          faults_.push_back(status.error_message());
        }
        --in_flight;
      });
    }
    absl::MutexLock lock(&mu);
    mu.Await(absl::Condition(&none));
  }

  CoordinatorProcess coordinator_;
  std::map<grpc::StatusCode, int> outcomes_;
  std::vector<std::string> faults_;  // what the coordinator blamed on itself or on its database
  int created_ = 0;
};

TEST_F(GrpcFuzzTest, RawBytes) {
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const std::string settings("\0\0\0\4\0\0\0\0\0", 9);
  Random random(1);
  SendRaw(RandomBytes(random, 100));
  ExpectUnharmed();
  const int files = OpenFiles();
  for (int i = 0; i < kRawInputs; ++i) {
    std::string bytes = RandomBytes(random, random() % 400);
    if (i % 4 == 1) bytes = absl::StrCat(preface, bytes);
    if (i % 4 == 2) bytes = absl::StrCat(preface, settings, bytes);
    if (i % 4 == 3) {
      // A frame with a plausible header, of a random type, on stream 1.
      std::string frame(9, '\0');
      frame[2] = static_cast<char>(std::min<size_t>(bytes.size(), 255));
      frame[3] = static_cast<char>(random() % 10);
      frame[4] = static_cast<char>(random());
      frame[8] = 1;
      bytes = absl::StrCat(preface, settings, frame, bytes);
    }
    SendRaw(bytes);
  }
  ExpectUnharmed();
  // Connections that were dropped are closed, soon if not at once.
  EXPECT_TRUE(Eventually([&] { return OpenFiles() <= files + 5; }))
      << files << " before, " << OpenFiles() << " now";
}

TEST_F(GrpcFuzzTest, MutatedMessages) {
  Random random(2);
  SendMessages(random, kMessages / 2);
  ExpectUnharmed();
  const int files = OpenFiles();
  [[maybe_unused]] const int64_t resident = ResidentBytes();
  SendMessages(random, kMessages / 2);
  ExpectUnharmed();
  EXPECT_TRUE(Eventually([&] { return OpenFiles() <= files + 5; }))
      << files << " before, " << OpenFiles() << " now";
  // The second half may add records to the store, but memory has reached its level. A sanitizer
  // keeps freed memory back; it looks for leaks itself, below.
#ifndef RINGLEADER_SANITIZED
  EXPECT_LT(ResidentBytes() - resident, 32 << 20) << resident << " before";
#endif
  // The inputs reached the handlers, and nothing that they said was a fault of the coordinator's.
  EXPECT_GT(outcomes_[grpc::StatusCode::OK], 100);
  EXPECT_GT(outcomes_[grpc::StatusCode::INVALID_ARGUMENT], 100);
  EXPECT_GT(outcomes_[grpc::StatusCode::UNIMPLEMENTED], 100);
  EXPECT_THAT(faults_, ::testing::IsEmpty());
  EXPECT_THAT(coordinator_.log(), ::testing::Not(::testing::HasSubstr("internal error")));
  coordinator_.process().Signal(SIGTERM);
  EXPECT_EQ(coordinator_.process().Wait(), 0) << coordinator_.log();
}

}  // namespace
}  // namespace ringleader::testing
