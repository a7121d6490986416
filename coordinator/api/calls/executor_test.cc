#include "coordinator/api/calls/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"

namespace ringleader::api {
namespace {

using ::testing::ElementsAre;

// Whoever asks for one thing waits for one of the many that another asked for, not for all.
TEST(ExecutorTest, ClientsTakeTurns) {
  std::vector<std::string> order;
  {
    Executor executor(1);
    absl::Notification begun, all_are_queued;
    executor.Run("a", Pace::kQuick, [&] {
      begun.Notify();
      all_are_queued.WaitForNotification();
    });
    begun.WaitForNotification();
    for (int i = 0; i < 3; ++i) executor.Run("a", Pace::kQuick, [&] { order.emplace_back("a"); });
    executor.Run("b", Pace::kQuick, [&] { order.emplace_back("b"); });
    executor.Run("c", Pace::kQuick, [&] { order.emplace_back("c"); });
    all_are_queued.Notify();
  }
  EXPECT_THAT(order, ElementsAre("a", "b", "c", "a", "a"));
}

TEST(ExecutorTest, SlowTasksLeaveHalfOfTheThreadsToOthers) {
  absl::Notification release;
  absl::Mutex mutex;
  int running = 0;
  Executor executor(4);
  for (int i = 0; i < 12; ++i) {
    executor.Run("a", Pace::kSlow, [&] {
      {
        absl::MutexLock lock(&mutex);
        ++running;
      }
      release.WaitForNotification();
    });
  }
  // Both of the threads that are left work at the same time.
  auto* const both = new absl::Barrier(3);
  for (int i = 0; i < 2; ++i) {
    executor.Run("b", Pace::kQuick, [&] {
      if (both->Block()) delete both;
    });
  }
  if (both->Block()) delete both;
  {
    absl::MutexLock lock(&mutex);
    EXPECT_LE(running, 2);
  }
  release.Notify();
}

// The other half of those that slow tasks may hold is for others' slow tasks.
TEST(ExecutorTest, NoClientHoldsAllThreadsOfSlowTasks) {
  absl::Notification release;
  std::atomic<int> begun = 0, ran = 0;
  {
    Executor executor(8);
    for (int i = 0; i < 12; ++i) {
      executor.Run("a", Pace::kSlow, [&] {
        ++begun;
        release.WaitForNotification();
        ++ran;
      });
    }
    // Between two quick ones a slow one begins, if it may.
    for (int i = 0; i < 8; ++i) {
      absl::Notification done;
      executor.Run("c", Pace::kQuick, [&] { done.Notify(); });
      done.WaitForNotification();
    }
    const absl::Time patience = absl::Now() + absl::Minutes(1);
    while (begun < 2 && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(begun, 2);
    if (begun == 2) {
      auto* const both = new absl::Barrier(3);
      for (int i = 0; i < 2; ++i) {
        executor.Run("b", Pace::kSlow, [both] {
          if (both->Block()) delete both;
        });
      }
      if (both->Block()) delete both;
    }
    release.Notify();
  }
  EXPECT_EQ(ran, 12);
}

TEST(ExecutorTest, ClientsThatHeldTheirShareTakeTurnsAgain) {
  std::vector<std::string> order;
  absl::Mutex mutex;
  {
    Executor executor(2);
    absl::Notification begun, all_are_queued;
    executor.Run("a", Pace::kSlow, [&] {
      begun.Notify();
      all_are_queued.WaitForNotification();
    });
    begun.WaitForNotification();
    const auto note = [&](const char* client) {
      executor.Run(client, Pace::kSlow, [&order, &mutex, client] {
        absl::MutexLock lock(&mutex);
        order.emplace_back(client);
      });
    };
    for (const char* client : {"a", "a", "b", "b", "c"}) note(client);
    all_are_queued.Notify();
  }
  EXPECT_THAT(order, ElementsAre("b", "c", "a", "b", "a"));
}

}  // namespace
}  // namespace ringleader::api
