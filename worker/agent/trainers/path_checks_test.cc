// Starts whose jobs' files have to be looked at first, and mounts that do not answer.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mount.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/process/time_limit.h"
#include "worker/agent/testing/supervised.h"

namespace ringleader::agent {
namespace {

using ::testing::HasSubstr;

// A file system whose server never answers: its mount is there, and every look at it hangs.
class HungMount {
 public:
  explicit HungMount(const std::string& path) : path_(path) {
    std::filesystem::create_directory(path);
    server_ = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    const std::string options =
        absl::StrCat("fd=", server_, ",rootmode=40000,user_id=0,group_id=0,allow_other");
    mounted_ = server_ >= 0 && mount("hung", path.c_str(), "fuse", 0, options.c_str()) == 0;
  }
  HungMount(const HungMount&) = delete;
  HungMount& operator=(const HungMount&) = delete;
  ~HungMount() {
    if (server_ >= 0) close(server_);  // what hangs gets an error now
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }

 private:
  const std::string path_;
  int server_ = -1;
  bool mounted_ = false;
};

class PathChecksTest : public testing::SupervisedTest {
 protected:
  PathChecksTest() : SupervisedTest({}, {}, {"/"}) {}

  v1::Command StartOn(const std::string& data, uint64_t token, const std::string& job,
                      const std::string& owner = "") {
    v1::Command start = StartOf(token, 1, job);
    start.mutable_start()->set_owner(owner);
    start.mutable_start()->mutable_spec()->set_name(job);
    start.mutable_start()->mutable_spec()->mutable_data()->set_train(dir_.File(data));
    return start;
  }
};

// The worker's heartbeats, and with them the leases of all trainers here, come from the thread that
// starts trainers.
TEST_F(PathChecksTest, AMountThatDoesNotAnswerHoldsUpItsOwnJobAlone) {
  const HungMount hung(dir_.File("hung"));
  if (!hung.mounted()) GTEST_SKIP() << "mounting a file system needs /dev/fuse and CAP_SYS_ADMIN";
  const absl::Time before = absl::Now();
  std::vector<v1::Command> commands;
  for (const uint64_t token : {1, 2, 3, 4}) {
    commands.push_back(StartOn("hung/tokens", token, absl::StrCat("bad", token)));
    supervisor_.OnCommand(commands.back(), now_);
  }
  v1::Command stop = StopOf(1, v1::StopTrainers::ABORT, 0);
  stop.set_job("bad1");
  supervisor_.OnCommand(stop, now_);
  supervisor_.OnCommand(commands[0], now_);  // sent again, for nobody has answered
  EXPECT_TRUE(Do(StartOn("tokens", 9, "good")).accepted());
  EXPECT_GT(PidOf(9, 0, "good"), 0);
  EXPECT_LT(absl::Now() - before, absl::Seconds(2)) << "the look itself takes three";
  EXPECT_FALSE(supervisor_.idle());

  std::map<uint64_t, std::vector<v1::CommandAck>> acks;
  for (int i = 0; i < 6; ++i) {
    const v1::CommandAck ack = Next().command_ack();
    acks[ack.command_id()].push_back(ack);
    // What came after its job's start is answered after it.
    if (ack.command_id() == stop.command_id()) {
      EXPECT_EQ(acks[commands[0].command_id()].size(), 1u);
    }
  }
  for (const v1::Command& command : commands) {
    const std::vector<v1::CommandAck>& answers = acks[command.command_id()];
    ASSERT_EQ(answers.size(), command.job() == "bad1" ? 2u : 1u);
    EXPECT_FALSE(answers[0].accepted());
    EXPECT_THAT(answers[0].message(),
                HasSubstr("looking for the job's files: no answer within 3s"));
  }
  ASSERT_EQ(acks[stop.command_id()].size(), 1u);
  EXPECT_TRUE(acks[stop.command_id()][0].accepted());
  EXPECT_LT(absl::Now() - before, absl::Seconds(10)) << "they are looked at side by side";
  ExpectNothing();
}

// Before anything may start under a token, what runs under an older one is ended: no mount holds
// that up.
TEST_F(PathChecksTest, ANewerAttemptEndsTheOneBeforeItWhateverItsFilesAre) {
  const HungMount hung(dir_.File("hung"));
  if (!hung.mounted()) GTEST_SKIP() << "mounting a file system needs /dev/fuse and CAP_SYS_ADMIN";
  EXPECT_TRUE(Do(StartOn("tokens", 7, "job")).accepted());
  EXPECT_GT(PidOf(7, 0), 0);
  supervisor_.OnCommand(StartOn("hung/tokens", 8, "job"), now_);
  EXPECT_EQ(NextExit().message(), "a newer attempt took its place");
  EXPECT_FALSE(supervisor_.idle()) << "a start is still to be answered";
  // A worker that leaves meanwhile starts nothing more, and says why.
  supervisor_.RefuseStarts("the worker is shutting down");
  supervisor_.OnCommand(StartOn("hung/tokens", 9, "other"), now_);
  EXPECT_EQ(Next().command_ack().message(), "the worker is shutting down");
  EXPECT_FALSE(Next().command_ack().accepted());
  EXPECT_TRUE(supervisor_.idle());
}

// Who has many jobs on a dead mount has no bigger share of the looks than who has one.
TEST_F(PathChecksTest, LooksThatHangAreCountedByOwner) {
  const auto answers = std::make_shared<absl::Notification>();
  const absl::Cleanup answer = [answers] { answers->Notify(); };
  const auto hang = [&](const std::string& owner) {
    for (int i = 0; i < kMaxLimitedCallsOfOne; ++i) {
      const absl::Status given_up =
          WithTimeLimit(owner, absl::ZeroDuration(), "hanging", [answers] {
            answers->WaitForNotification();
            return absl::OkStatus();
          });
      EXPECT_TRUE(absl::IsDeadlineExceeded(given_up)) << given_up;
    }
  };
  hang("bob");
  v1::CommandAck ack = Do(StartOn("tokens", 7, "job", "bob"));
  EXPECT_FALSE(ack.accepted());
  EXPECT_TRUE(ack.later());
  EXPECT_THAT(ack.message(), HasSubstr("looking for the job's files: too many such calls"));
  EXPECT_TRUE(Do(StartOn("tokens", 8, "bob", "alice")).accepted());
  // Jobs of nobody that is known do not stand in for each other.
  hang("jobs/nobodys");
  ack = Do(StartOn("tokens", 9, "nobodys"));
  EXPECT_FALSE(ack.accepted());
  EXPECT_THAT(ack.message(), HasSubstr("too many such calls"));
  EXPECT_TRUE(Do(StartOn("tokens", 10, "another")).accepted());
}

// They come all at once when a coordinator is started anew.
TEST_F(PathChecksTest, HoweverManyStartsOfOneOwnerComeNoneIsTooMany) {
  constexpr uint64_t kStarts = 4 * kMaxLimitedCallsOfOne;
  for (uint64_t token = 1; token <= kStarts; ++token) {
    // Bob's looks, which hung in the test before, may be ending still.
    v1::Command start = StartOn("tokens", token, absl::StrCat("job", token), "carol");
    start.mutable_start()->set_trainers(0);
    supervisor_.OnCommand(start, now_);
  }
  for (uint64_t i = 0; i < kStarts; ++i) {
    const v1::CommandAck ack = Next().command_ack();
    EXPECT_TRUE(ack.accepted()) << ack.message();
  }
}

}  // namespace
}  // namespace ringleader::agent
