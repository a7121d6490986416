// The access file: what it takes to start without or with one, and changes while the server runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "coordinator/api/testing/access_fixture.h"

namespace ringleader::api::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// What is logged, to wait for.
class AwaitedLog : public spdlog::sinks::base_sink<std::mutex> {
 public:
  // Until a line with both texts has been logged; forgets what was.
  bool Await(const std::string& text, const std::string& more) {
    absl::MutexLock lock(&lines_mutex_);
    const auto is_there = [&] {
      return std::ranges::any_of(lines_, [&](const std::string& line) {
        return absl::StrContains(line, text) && absl::StrContains(line, more);
      });
    };
    const bool found = lines_mutex_.AwaitWithTimeout(absl::Condition(&is_there), absl::Seconds(30));
    lines_.clear();
    return found;
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    absl::MutexLock lock(&lines_mutex_);
    lines_.emplace_back(message.payload.data(), message.payload.size());
  }
  void flush_() override {}

 private:
  absl::Mutex lines_mutex_;
  std::vector<std::string> lines_;
};

class AccessChangeTest : public AccessTest {
 protected:
  // Before the server has threads that log.
  static void SetUpTestSuite() { spdlog::default_logger()->sinks().push_back(log_); }
  static void TearDownTestSuite() { spdlog::default_logger()->sinks().pop_back(); }

  static inline const std::shared_ptr<AwaitedLog> log_ = std::make_shared<AwaitedLog>();
};

TEST_F(AccessChangeTest, TheAccessFileIsTakenUpWithoutARestart) {
  Client bob = As("bob");
  ASSERT_TRUE(bob.Create("x").ok());
  v1::WatchJobRequest watch;
  watch.set_name("jobs/x");
  const auto context = Client::Context();
  const auto stream = bob.jobs->WatchJob(context.get(), watch);
  v1::WatchJobResponse seen;
  ASSERT_TRUE(stream->Read(&seen));

  WriteAccess("roles_in_certificates: [");  // a slip: what was said before stays
  EXPECT_TRUE(log_->Await("access.yaml", "stays in force"));
  EXPECT_TRUE(bob.List().ok());
  std::filesystem::remove(dir_.File("access.yaml"));
  EXPECT_TRUE(log_->Await("access.yaml", "stays in force"));
  EXPECT_TRUE(bob.List().ok());

  WriteAccess(std::string(kAccess) + "  - {uri: \"ringleader://user/desert/bob\", role: none}\n");
  while (stream->Read(&seen)) continue;
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  const grpc::Status out = bob.List();
  EXPECT_EQ(out.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(out.error_message(), HasSubstr("shut out"));
  EXPECT_TRUE(As("alice").List().ok());

  // Nor does a token help who is shut out.
  Client root = As("root");
  ASSERT_TRUE(root.CreateToken("rlt_secret", v1::USER, "bob").ok());
  EXPECT_TRUE(WithToken("rlt_secret").List().ok());
  const grpc::Status still_out = Connect(Certificates().Options("bob"), "rlt_secret").List();
  EXPECT_EQ(still_out.error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(still_out.error_message(), HasSubstr("shut out"));
}

// Those that are open when a token expires end, for nobody knows which of them it opened. They are
// opened again, and the token has ended them once.
TEST_F(AccessChangeTest, ATokenThatExpiredEndsNothingThatIsOpenedLater) {
  Client root = As("root");
  ASSERT_TRUE(root.Create("x").ok());
  v1::WatchJobRequest watch;
  watch.set_name("jobs/x");
  v1::WatchJobResponse seen;
  const auto before_context = Client::Context();
  const auto before = root.jobs->WatchJob(before_context.get(), watch);
  ASSERT_TRUE(before->Read(&seen));
  ASSERT_TRUE(root.CreateToken("rlt_brief", v1::VIEWER, "erin", 1).ok());
  while (before->Read(&seen)) continue;
  EXPECT_EQ(before->Finish().error_code(), StatusCode::UNAVAILABLE);

  const auto context = Client::Context();
  const auto stream = root.jobs->WatchJob(context.get(), watch);
  ASSERT_TRUE(stream->Read(&seen));
  // Whoever has found the second slip has looked at the tokens after the first.
  WriteAccess("roles_in_certificates: [");
  EXPECT_TRUE(log_->Await("access.yaml", "stays in force"));
  WriteAccess("roles: all\n");
  EXPECT_TRUE(log_->Await("unknown key roles", "stays in force"));
  EXPECT_EQ(root.Cancel("jobs/x"), StatusCode::OK);
  while (stream->Read(&seen)) continue;
  EXPECT_EQ(seen.job().state(), v1::Job::CANCELLED);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(AccessTest, OffLoopbackNothingStartsWithoutRoles) {
  const Address everywhere{.host = "0.0.0.0", .port = 0, .path = ""};
  const auto complaint = [&](const ServerOptions& options) {
    const auto server = Start(options);
    EXPECT_EQ(server.status().code(), absl::StatusCode::kFailedPrecondition);
    return std::string(server.status().message());
  };
  EXPECT_THAT(complaint({.listen = everywhere, .tls = Certificates().Options("server")}),
              AllOf(HasSubstr("--listen 0.0.0.0:0"), HasSubstr("give --access FILE")));
  TlsOptions insecure;
  insecure.insecure = true;
  EXPECT_THAT(complaint({.listen = everywhere, .tls = insecure}), HasSubstr("give --access FILE"));
  EXPECT_THAT(
      complaint({.listen = everywhere, .tls = insecure, .access_path = dir_.File("access.yaml")}),
      HasSubstr("plain_text_is_admin: true"));
  std::ofstream(dir_.File("open.yaml")) << "plain_text_is_admin: true\n";
  ServerOptions open = {
      .listen = everywhere, .tls = insecure, .access_path = dir_.File("open.yaml")};
  EXPECT_THAT(complaint(open), HasSubstr("--allow-path is missing"));
  open.allowed_paths = {"/data"};
  EXPECT_TRUE(Start(open).ok());
  // A file whose roles nobody can show is no protection on loopback, either.
  EXPECT_THAT(complaint({.listen = kListen, .access_path = dir_.File("access.yaml")}),
              HasSubstr("plain_text_is_admin: true"));
  std::ofstream(dir_.File("wrong.yaml")) << "roles: all\n";
  EXPECT_THAT(
      std::string(
          Start({.listen = kListen, .access_path = dir_.File("wrong.yaml")}).status().message()),
      HasSubstr("unknown key roles"));
}

TEST_F(AccessTest, WhoIsNoAdminAnyMoreIsNoneOnOpenConnectionsEither) {
  WriteAccess(std::string(kAccess) +
              "  - {uri: \"ringleader://user/ocean/alice\", role: admin, name: alice}\n");
  ASSERT_TRUE(As("bob").Create("x").ok());
  Client alice = As("alice");
  const auto await_admin = [&](bool admin) {
    for (int i = 0; i < 1000; ++i) {
      if (alice.Audit().ok() == admin) return;
      absl::SleepFor(absl::Milliseconds(10));
    }
    ADD_FAILURE() << "the access file was not taken up";
  };
  await_admin(true);
  WriteAccess(kAccess);
  await_admin(false);
  EXPECT_EQ(alice.Cancel("jobs/x"), StatusCode::PERMISSION_DENIED);
}

}  // namespace
}  // namespace ringleader::api::testing
