#include "base/wait/timed_wait.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace {

// Of the wall clock of this program.
std::atomic<int64_t> seconds_ahead{0};

}  // namespace

// These take the place of the C library's. Who computes a time of a wall clock that is ahead, and
// has the kernel wait for it, waits as long as if somebody had set the machine's clock back
// meanwhile.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += seconds_ahead;
  return result;
}
extern "C" int gettimeofday(timeval* time, void* zone) noexcept {
  const auto result = static_cast<int>(syscall(SYS_gettimeofday, time, zone));
  time->tv_sec += seconds_ahead;
  return result;
}

namespace ringleader {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Longer than anything takes here, and much less than an hour.
constexpr absl::Duration kLong = absl::Seconds(20);

class AwaitForTest : public ::testing::Test {
 protected:
  ~AwaitForTest() override { seconds_ahead = 0; }
  // Sets this program's wall clock. Abseil's is an estimate from ticks between looks at it, some
  // seconds apart: this waits for the next.
  static void SetClock(int64_t ahead) {
    seconds_ahead = ahead;
    const Clock::time_point end = Clock::now() + absl::ToChronoNanoseconds(kLong);
    const auto is_set = [&] {
      timespec machine;
      syscall(SYS_clock_gettime, CLOCK_REALTIME, &machine);
      const absl::Duration is_ahead = absl::Now() - absl::TimeFromTimespec(machine);
      return absl::AbsDuration(is_ahead - absl::Seconds(ahead)) < absl::Minutes(1);
    };
    while (!is_set() && Clock::now() < end) std::this_thread::sleep_for(milliseconds(50));
    ASSERT_TRUE(is_set()) << ahead;
  }
  // How long a wait in vain takes, and at most kLong.
  milliseconds WaitInVain(absl::Duration patience) {
    absl::Mutex mutex;
    bool rescued = false, over = false;
    std::thread rescue([&] {
      const Clock::time_point end = Clock::now() + absl::ToChronoNanoseconds(kLong);
      while (Clock::now() < end) {
        {
          const absl::MutexLock lock(&mutex);
          if (over) return;
        }
        std::this_thread::sleep_for(milliseconds(200));
      }
      const absl::MutexLock lock(&mutex);
      rescued = true;
    });
    const Clock::time_point begin = Clock::now();
    {
      const absl::MutexLock lock(&mutex);
      EXPECT_FALSE(AwaitFor(mutex, absl::Condition(&rescued), patience)) << "it did not end";
      over = true;
    }
    const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
    rescue.join();
    return took;
  }
};

TEST_F(AwaitForTest, AClockThatIsSetLengthensNoWaitAndShortensNone) {
  for (const int64_t ahead : {0, 3600, -3600}) {
    ASSERT_NO_FATAL_FAILURE(SetClock(ahead));
    EXPECT_GE(WaitInVain(absl::Milliseconds(300)), milliseconds(300)) << ahead;
  }
}

TEST_F(AwaitForTest, WhatHoldsOrNeedNotBeWaitedForIsToldAtOnce) {
  absl::Mutex mutex;
  bool yes = true, no = false;
  const absl::MutexLock lock(&mutex);
  const Clock::time_point begin = Clock::now();
  EXPECT_TRUE(AwaitFor(mutex, absl::Condition(&yes), absl::InfiniteDuration()));
  EXPECT_FALSE(AwaitFor(mutex, absl::Condition(&no), absl::ZeroDuration()));
  EXPECT_FALSE(AwaitFor(mutex, absl::Condition(&no), -absl::InfiniteDuration()));
  EXPECT_LT(Clock::now() - begin, absl::ToChronoNanoseconds(kLong));
}

TEST_F(AwaitForTest, EndsWhenItsConditionHolds) {
  absl::Mutex mutex;
  bool done = false;
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    const absl::MutexLock lock(&mutex);
    done = true;
  });
  {
    const absl::MutexLock lock(&mutex);
    EXPECT_TRUE(AwaitFor(mutex, absl::Condition(&done), absl::InfiniteDuration()));
  }
  other.join();
}

// Each in its time, though the mutex is somebody's when it comes, and gone right after.
TEST_F(AwaitForTest, ManyWaitsEndEachInItsTime) {
  for (int round = 0; round < 20; ++round) {
    auto mutex = std::make_unique<absl::Mutex>();
    bool never = false;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        const Clock::time_point begin = Clock::now();
        const absl::MutexLock lock(mutex.get());
        EXPECT_FALSE(AwaitFor(*mutex, absl::Condition(&never), absl::Milliseconds(i)));
        EXPECT_GE(Clock::now() - begin, milliseconds(i));
        if (i % 2 == 0) std::this_thread::sleep_for(milliseconds(2));
      });
    }
    for (std::thread& thread : threads) thread.join();
    mutex.reset();
  }
}

}  // namespace
}  // namespace ringleader
