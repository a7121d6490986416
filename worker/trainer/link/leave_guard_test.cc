#include "worker/trainer/link/leave_guard.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/mutex.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::trainer {
namespace {

TEST(LeaveGuardTest, LeavesOnceThePatienceIsOver) {
  const auto worlds = comm::testing::LocalCommunicators(2);
  absl::Mutex mutex;
  std::string reason;
  const LeaveGuard guard(*worlds[0], absl::Milliseconds(20), [&](const absl::Status& status) {
    absl::MutexLock lock(&mutex);
    reason = std::string(status.message());
  });
  worlds[1]->Abort("it is out of memory");
  absl::MutexLock lock(&mutex);
  mutex.Await(absl::Condition(
      +[](std::string* text) { return !text->empty(); }, &reason));
  EXPECT_EQ(reason, "rank 1: it is out of memory");
}

TEST(LeaveGuardTest, AStepLoopThatComesBackIsLeftAlone) {
  const auto worlds = comm::testing::LocalCommunicators(1);
  bool left = false;
  {
    const LeaveGuard guard(*worlds[0], absl::Hours(1), [&](const absl::Status&) { left = true; });
    worlds[0]->Abort("over");
  }
  EXPECT_FALSE(left);
}

}  // namespace
}  // namespace ringleader::trainer
