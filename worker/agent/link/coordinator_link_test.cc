#include "worker/agent/link/coordinator_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"

namespace ringleader::agent {
namespace {

// Welcomes everybody, in the name of a protocol version, and sends a command after it.
class FakeCoordinator : public v1::WorkerControl::Service {
 public:
  explicit FakeCoordinator(uint32_t version) : version_(version) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>* stream) override {
    ++sessions_;
    v1::WorkerMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    v1::CoordinatorMessage welcome;
    welcome.mutable_welcome()->set_lease_milliseconds(10'000);
    welcome.mutable_welcome()->set_heartbeat_milliseconds(1000);
    welcome.mutable_welcome()->set_fence_milliseconds(90'000);
    welcome.mutable_welcome()->set_protocol_version(version_);
    stream->Write(welcome);
    v1::CoordinatorMessage command;
    command.mutable_command()->set_command_id(1);
    stream->Write(command);
    while (stream->Read(&message)) {
    }
    return grpc::Status::OK;
  }

  std::shared_ptr<grpc::Channel> Channel() const {
    return grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_),
                               grpc::InsecureChannelCredentials());
  }
  int sessions() const { return sessions_; }

 private:
  const uint32_t version_;
  std::atomic<int> sessions_ = 0;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class CoordinatorLinkTest : public ::testing::Test {
 protected:
  // Until `commands` have come, or for `patience`.
  void RunLink(const FakeCoordinator& coordinator, int commands, absl::Duration patience) {
    CoordinatorLink link(coordinator.Channel(), &buffer_,
                         {.hello = [] { return v1::WorkerHello(); },
                          .on_welcome = [this] { ++welcomes_; },
                          .on_command = [this](v1::Command) { ++commands_; }});
    link.Start();
    const absl::Time deadline = absl::Now() + patience;
    while (commands_ < commands && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    sessions_ = link.sessions();
  }

  EventBuffer buffer_{1000};
  std::atomic<int> welcomes_ = 0;
  std::atomic<int> commands_ = 0;
  uint64_t sessions_ = 0;  // that the link counted as welcomed
};

TEST_F(CoordinatorLinkTest, WorksForACoordinatorOfItsProtocolVersion) {
  const FakeCoordinator coordinator(kProtocolVersion);
  RunLink(coordinator, 1, absl::Seconds(20));
  EXPECT_EQ(welcomes_, 1);
  EXPECT_EQ(commands_, 1);
  EXPECT_EQ(sessions_, 1u);
}

TEST_F(CoordinatorLinkTest, TakesNoCommandFromAnotherVersionAndTriesAgainSlowly) {
  for (const uint32_t version : {0u, kProtocolVersion + 1}) {
    const FakeCoordinator coordinator(version);
    RunLink(coordinator, 1, absl::Milliseconds(1500));
    EXPECT_EQ(welcomes_, 0);
    EXPECT_EQ(commands_, 0);
    EXPECT_EQ(sessions_, 0u);
    EXPECT_GE(coordinator.sessions(), 1);
    // After half of 200, 400, 800 ms at the least.
    EXPECT_LE(coordinator.sessions(), 5);
  }
}

}  // namespace
}  // namespace ringleader::agent
