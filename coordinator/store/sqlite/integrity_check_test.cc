#include "coordinator/store/sqlite/integrity_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>
#include <sqlite3.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/store/testing/opened_store.h"

namespace ringleader::store {
namespace {

using ::testing::IsEmpty;

using IntegrityCheckTest = testing::OpenedStoreTest;

// What SQLite reads: from the `held`th time on only while the test's thread waits for the check.
struct Reads {
  int held = 0;
  std::atomic<int> made = 0;
  absl::Notification begun;  // the first that is held
  std::atomic<bool> stopping = false;
  const absl::Time latest = absl::Now() + absl::Seconds(60);
};
Reads* reads = nullptr;

// Whether the process's first thread, which is the test's, sleeps.
bool TestSleeps() {
  std::ifstream stat(absl::StrCat("/proc/self/task/", getpid(), "/stat"));
  std::string id, name, state;
  stat >> id >> name >> state;
  return state == "S";
}

ssize_t ReadAt(int fd, void* data, size_t bytes, off_t at) {
  const int number = ++reads->made;
  if (number == reads->held) reads->begun.Notify();
  while (number >= reads->held && (!reads->stopping || !TestSleeps()) &&
         absl::Now() < reads->latest) {
    std::this_thread::yield();
  }
  return pread(fd, data, bytes, at);
}

// Whether it has only opened the file, or is in the middle of it.
TEST_F(IntegrityCheckTest, IsBrokenOffWithoutAWord) {
  Write([](WriteTransaction& t) -> absl::Status {
    for (int i = 0; i < 400; ++i) {
      v1::Job job = NewJob(absl::StrCat("j", i));
      job.set_state_reason(std::string(4096, 'x'));
      RETURN_IF_ERROR(t.CreateJob(&job));
    }
    return absl::OkStatus();
  });
  store_.reset();
  const auto log = std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(100);
  spdlog::default_logger()->sinks().push_back(log);
  const absl::Cleanup remove = [] { spdlog::default_logger()->sinks().pop_back(); };
  sqlite3_vfs* const files = sqlite3_vfs_find(nullptr);
  for (const int held : {1, 100}) {
    Reads these;
    these.held = held;
    reads = &these;
    for (const char* name : {"pread", "pread64"}) {
      ASSERT_EQ(files->xSetSystemCall(files, name, reinterpret_cast<sqlite3_syscall_ptr>(&ReadAt)),
                SQLITE_OK);
    }
    {
      const IntegrityCheck check(options_.path,
                                 [](const absl::Status& damage) { ADD_FAILURE() << damage; });
      EXPECT_TRUE(these.begun.WaitForNotificationWithTimeout(absl::Seconds(60)));
      these.stopping = true;
    }
    ASSERT_EQ(files->xSetSystemCall(files, nullptr, nullptr), SQLITE_OK);  // its own again
    EXPECT_LT(these.made, held + 100) << "of more than 500 that the file takes";
  }
  EXPECT_THAT(log->last_formatted(), IsEmpty());
}

}  // namespace
}  // namespace ringleader::store
