#include "worker/trainer/link/leave_guard.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/synchronization/mutex.h"
#include "worker/comm/group_communicator.h"

namespace ringleader::trainer {
namespace {

// Half of two ranks; counts how often it was looked at.
class WatchedTransport : public comm::Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void Send(comm::StreamId, int, comm::PendingTransferPtr) override {}
  void Receive(comm::StreamId, int, comm::PendingTransferPtr) override {}
  void Abort(const std::string& reason) override {
    absl::MutexLock lock(&mutex_);
    status_ = absl::AbortedError(reason);
  }
  absl::Status status() const override {
    absl::MutexLock lock(&mutex_);
    ++looks_;
    return status_;
  }
  bool aborted_by_peer() const override { return false; }

  // Until the guard has looked four times more: it has acted on what it saw before the last.
  bool AwaitLooks() const {
    absl::MutexLock lock(&mutex_);
    const int enough = looks_ + 4;
    const auto looked = [this, enough]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return looks_ >= enough; };
    return mutex_.AwaitWithTimeout(absl::Condition(&looked), absl::Seconds(30));
  }

 private:
  mutable absl::Mutex mutex_;
  mutable int looks_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

class LeaveGuardTest : public testing::Test {
 protected:
  std::unique_ptr<LeaveGuard> Guard(absl::Duration patience) {
    return std::make_unique<LeaveGuard>(world_, patience, [this](const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      reasons_.push_back(std::string(status.message()));
    });
  }
  std::vector<std::string> reasons() {
    absl::MutexLock lock(&mutex_);
    return reasons_;
  }

  absl::Mutex mutex_;
  std::vector<std::string> reasons_ ABSL_GUARDED_BY(mutex_);
  const std::shared_ptr<WatchedTransport> transport_ = std::make_shared<WatchedTransport>();
  comm::GroupCommunicator world_{transport_};
};

TEST_F(LeaveGuardTest, LeavesOnceThePatienceIsOverAndAgain) {
  const auto guard = Guard(absl::Milliseconds(20));
  transport_->Abort("rank 1: it is out of memory");
  absl::MutexLock lock(&mutex_);
  const auto left = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return reasons_.size() >= 2; };
  ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&left), absl::Seconds(30)));
  EXPECT_EQ(reasons_[0], "rank 1: it is out of memory");
  EXPECT_EQ(reasons_[1], reasons_[0]);
}

TEST_F(LeaveGuardTest, AStepLoopThatComesBackIsLeftAlone) {
  auto guard = Guard(absl::Hours(1));
  transport_->Abort("over");
  ASSERT_TRUE(transport_->AwaitLooks());
  guard.reset();
  EXPECT_TRUE(reasons().empty());
}

TEST_F(LeaveGuardTest, AnAttemptThatRunsIsLeftAlone) {
  const auto guard = Guard(absl::Milliseconds(1));
  ASSERT_TRUE(transport_->AwaitLooks());
  EXPECT_TRUE(reasons().empty());
}

}  // namespace
}  // namespace ringleader::trainer
