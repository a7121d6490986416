// Trainers that run as another user than their worker. Needs root, as the flag does: without it
// only the refusal is looked at.
#include "worker/agent/node/run_as.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "base/testing/temp_dir.h"
#include "worker/agent/trainers/supervisor.h"

namespace ringleader::agent {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kUser[] = "nobody";  // of every Linux

bool Eventually(const std::function<bool()>& done) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (!done()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

std::string Complaint(const std::vector<std::string>& flags) {
  return std::string(RunAs::Parse(flags).status().message());
}

TEST(RunAsTest, OnlyRootMay) {
  // A process of its own gives its rights up.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
    const bool refused = absl::StrContains(Complaint({kUser}), "only root can start trainers");
    _exit(refused && RunAs::Parse({}).ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

class RunAsRootTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root";
    chmod(dir_.path().c_str(), 0711);
    user_ = *RunAs::Parse({kUser})->UserOf("");
  }
  Process Shell(const std::string& script) {
    auto process = Process::Start(
        {.command = {"/bin/sh", "-c", script}, .directory = dir_.path(), .user = user_});
    EXPECT_TRUE(process.ok()) << process.status();
    return *std::move(process);
  }

  const TempDir dir_;
  std::optional<LocalUser> user_;
};

TEST_F(RunAsRootTest, FlagsSayWhoseTrainersRunAsWhom) {
  const auto users = RunAs::Parse({"alice=daemon", kUser});
  ASSERT_TRUE(users.ok()) << users.status();
  EXPECT_EQ((*users->UserOf("alice"))->name, "daemon");
  EXPECT_EQ((*users->UserOf("bob"))->name, kUser);
  EXPECT_EQ((*users->UserOf(""))->name, kUser);
  const auto few = RunAs::Parse({"alice=daemon"});
  EXPECT_EQ(few->UserOf("bob").status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(few->UserOf("bob").status().message()), HasSubstr("no jobs of bob"));
  // Names that certificates give have such characters, those of users have none.
  const auto named = RunAs::Parse({"CN=alice=daemon"});
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ((*named->UserOf("CN=alice"))->name, "daemon");
  EXPECT_FALSE(RunAs().any());
  EXPECT_FALSE((*RunAs().UserOf("bob")).has_value());

  EXPECT_THAT(Complaint({"no-such-user"}), HasSubstr("no user no-such-user"));
  EXPECT_THAT(Complaint({"root"}), HasSubstr("root is root"));
  EXPECT_THAT(Complaint({"alice=root"}), HasSubstr("--run-as alice=root: root is root"));
  EXPECT_THAT(Complaint({"=daemon"}), HasSubstr("write USER, or OWNER=USER"));
  EXPECT_THAT(Complaint({"alice=daemon", "alice=nobody"}), HasSubstr("alice got a user before"));
  EXPECT_THAT(Complaint({"daemon", "nobody"}), HasSubstr("all other owners got a user before"));
}

// A member of root's group reads what it may, e.g. keys of other services.
TEST_F(RunAsRootTest, AUserOfRootsGroupIsRefused) {
  const std::string users = dir_.File("passwd");
  std::ofstream(users) << "operator:x:37:0::/:/bin/sh\nplain:x:38:38::/:/bin/sh\n";
  // A process of its own sees other users of the machine.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount(users.c_str(), "/etc/passwd", nullptr, MS_BIND, nullptr) != 0) {
      _exit(2);
    }
    const bool refused = absl::StrContains(Complaint({"operator"}), "operator is root, or of");
    _exit(refused && RunAs::Parse({"plain"}).ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "needs the right to mount";
  EXPECT_EQ(status, 0);
}

TEST_F(RunAsRootTest, AProcessHasTheUsersRightsAndNoWayToMore) {
  // Whoever starts a worker by hand has groups, and so has it.
  const int count = getgroups(0, nullptr);
  ASSERT_GE(count, 0);
  std::vector<gid_t> before(static_cast<size_t>(count));
  ASSERT_EQ(getgroups(count, before.data()), count);
  const absl::Cleanup restore = [&] { setgroups(before.size(), before.data()); };
  const gid_t kept = 0;
  ASSERT_EQ(setgroups(1, &kept), 0);
  Process process =
      Shell("grep -E '^(Uid|Gid|Groups|CapEff|CapPrm|NoNewPrivs):' /proc/self/status");
  const int fd = process.TakeStdout();
  std::string output;
  ASSERT_TRUE(Eventually([&] {
    char buffer[4096];
    const ssize_t count = read(fd, buffer, sizeof(buffer));
    if (count > 0) output.append(buffer, static_cast<size_t>(count));
    return count == 0;
  }));
  close(fd);
  const std::string uid = absl::StrCat("Uid:\t", user_->uid, "\t", user_->uid, "\t", user_->uid);
  const std::string gid = absl::StrCat("Gid:\t", user_->gid, "\t", user_->gid, "\t", user_->gid);
  EXPECT_THAT(output, AllOf(HasSubstr(uid), HasSubstr(gid), HasSubstr("Groups:\t \n"),
                            HasSubstr("CapPrm:\t0000000000000000"),
                            HasSubstr("CapEff:\t0000000000000000"), HasSubstr("NoNewPrivs:\t1")));
}

// The kernel forgets the signal when a process changes its user.
TEST_F(RunAsRootTest, AProcessStillDiesWithTheThreadThatStartedIt) {
  std::optional<Process> process;
  std::thread starter([&] { process.emplace(Shell("exec sleep 1000")); });
  starter.join();
  std::optional<ExitStatus> exit;
  ASSERT_TRUE(Eventually([&] { return (exit = process->Poll()).has_value(); }));
  EXPECT_EQ(exit->signal, SIGKILL);
}

TEST_F(RunAsRootTest, AFolderThatTheUserCannotEnterIsAnErrorThatNamesBoth) {
  chmod(dir_.path().c_str(), 0700);
  const auto process = Process::Start(
      {.command = {"/bin/sh", "-c", "true"}, .directory = dir_.path(), .user = user_});
  EXPECT_THAT(std::string(process.status().message()),
              AllOf(HasSubstr(dir_.path().string()), HasSubstr("as nobody (--run-as)"),
                    HasSubstr("Permission denied")));
}

TEST_F(RunAsRootTest, AFolderIsItsUsersAloneAndHoldsNothingOfAnothers) {
  const DataDir data = DataDir::Open(dir_.File("data"), absl::ZeroDuration()).value();
  const std::string folder = *data.TrainerDirectory("job", 1, 0, user_);
  struct stat found {};
  ASSERT_EQ(stat(folder.c_str(), &found), 0);
  EXPECT_EQ(found.st_uid, user_->uid);
  EXPECT_EQ(found.st_gid, user_->gid);
  EXPECT_EQ(found.st_mode & 07777, 0700u);
  // On the way there they find nothing of others' but what they know by name.
  for (const char* const above : {"data/jobs", "data/jobs/job", "data/jobs/job/attempt-1"}) {
    ASSERT_EQ(stat(dir_.File(above).c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 07777, 0711u) << above;
  }
  std::ofstream(folder + "/kept") << "x";
  EXPECT_EQ(*data.TrainerDirectory("job", 1, 0, user_), folder);
  EXPECT_TRUE(fs::exists(folder + "/kept"));
  const auto other = *RunAs::Parse({"daemon"})->UserOf("");
  EXPECT_EQ(*data.TrainerDirectory("job", 1, 0, other), folder);
  EXPECT_FALSE(fs::exists(folder + "/kept"));
}

// The socket is open to all users of the machine then: who dials it has to know the secret.
TEST_F(RunAsRootTest, ATrainerIsKnownByTheSecretThatItWasGiven) {
  const std::string binary = dir_.File("trainer");
  std::ofstream(binary) << "#!/bin/sh\necho $$ $HOME $USER $LOGNAME "
                           "$RINGLEADER_TRAINER_SECRET >new\nmv new started\nexec sleep 600\n";
  chmod(binary.c_str(), 0755);
  DataDir data = DataDir::Open(dir_.File("data"), absl::ZeroDuration()).value();
  std::ofstream(data.socket_path()) << "";
  ASSERT_TRUE(data.OpenToOtherUsers().ok());
  EventBuffer events(1 << 20);
  prometheus::Registry registry;
  WorkerMetrics metrics(registry);
  const auto post = [](std::function<void()>) {};
  auto logs = std::make_unique<LogPump>();
  Supervisor trainers({.trainer_binary = binary,
                       .gpus = {},
                       .listen_host = "127.0.0.1",
                       .tls = {},
                       .run_as = *RunAs::Parse({"alice=nobody"})},
                      &data, &events, logs.get(), &metrics, post);
  // Its thread calls the supervisor: it ends first.
  const absl::Cleanup stop_logs = [&] { logs.reset(); };
  v1::Command command;
  command.set_command_id(1);
  command.set_job("job");
  command.set_attempt(1);
  command.set_fencing_token(7);
  command.mutable_start()->set_trainers(1);
  command.mutable_start()->set_world_size(1);
  command.mutable_start()->set_owner("mallory");
  trainers.OnCommand(command, absl::Now());
  const auto refused = events.Next(0, absl::Seconds(1));
  ASSERT_TRUE(refused.has_value());
  EXPECT_FALSE(refused->command_ack().accepted());
  EXPECT_THAT(refused->command_ack().message(), HasSubstr("runs no jobs of mallory"));

  command.set_command_id(2);
  command.mutable_start()->set_owner("alice");
  trainers.OnCommand(command, absl::Now());
  uint32_t pid = 0;
  std::string home, name, login, secret;
  ASSERT_TRUE(Eventually([&] {
    std::ifstream started(dir_.File("data/jobs/job/attempt-1/rank-0/started"));
    return static_cast<bool>(started >> pid >> home >> name >> login >> secret);
  }));
  EXPECT_EQ(home, user_->home);
  EXPECT_EQ(name, kUser);
  EXPECT_EQ(login, kUser);
  class Connection : public TrainerConnection {
   public:
    void Send(v1::AgentMessage) override { assigned = true; }
    void Close(const absl::Status& status) override { closed = status; }
    bool assigned = false;
    absl::Status closed;
  };
  const auto attach = [&](const std::string& shown) {
    v1::TrainerMessage message;
    message.mutable_hello()->set_fencing_token(7);
    message.mutable_hello()->set_pid(pid);
    message.mutable_hello()->set_secret(shown);
    message.mutable_hello()->set_protocol_version(kProtocolVersion);
    auto connection = std::make_shared<Connection>();
    trainers.OnTrainerMessage(connection, message, absl::Now());
    return connection;
  };
  for (const std::string& wrong : {std::string(), std::string("rlt_guess"), secret + "x"}) {
    EXPECT_EQ(attach(wrong)->closed.code(), absl::StatusCode::kPermissionDenied);
  }
  EXPECT_TRUE(attach(secret)->assigned);
}

}  // namespace
}  // namespace ringleader::agent
