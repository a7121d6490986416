#include "worker/agent/process/child_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/testing/temp_dir.h"
#include "worker/agent/node/data_dir.h"
#include "worker/agent/process/log_pump.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

bool Eventually(const std::function<bool()>& done) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (!done()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

class ProcessTest : public ::testing::Test {
 protected:
  Process Shell(const std::string& script, std::vector<int> inherited_fds = {}) {
    auto process = Process::Start({.command = {"/bin/sh", "-c", script},
                                   .directory = dir_.path(),
                                   .environment = {{"GREETING", "hello"}},
                                   .inherited_fds = std::move(inherited_fds)});
    EXPECT_TRUE(process.ok()) << process.status();
    return *std::move(process);
  }
  static ExitStatus Wait(Process& process) {
    std::optional<ExitStatus> exit;
    EXPECT_TRUE(Eventually([&] { return (exit = process.Poll()).has_value(); }));
    return exit.value_or(ExitStatus{});
  }
  // Everything that the process prints, in lines.
  std::vector<std::string> Output(Process& process, bool from_stderr = false) {
    absl::Mutex mutex;
    std::vector<std::string> all;
    bool ended = false;
    LogPump pump;
    pump.Add(from_stderr ? process.TakeStderr() : process.TakeStdout(),
             [&](std::vector<std::string> lines, bool end) {
               absl::MutexLock lock(&mutex);
               all.insert(all.end(), lines.begin(), lines.end());
               ended = ended || end;
             });
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&ended), absl::Seconds(20)));
    return all;
  }

  // Ends of pipes that this process has open.
  static size_t OpenPipes() {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return static_cast<size_t>(std::count_if(begin(files), end(files), [](const auto& file) {
      std::error_code gone;
      return std::filesystem::read_symlink(file, gone).string().starts_with("pipe:");
    }));
  }

  const TempDir dir_;
};

TEST_F(ProcessTest, RunsInItsFolderWithItsEnvironment) {
  Process process = Shell("echo $GREETING; pwd; echo oops >&2; exit 3");
  EXPECT_THAT(Output(process), ElementsAre("hello", dir_.path().string()));
  EXPECT_THAT(Output(process, true), ElementsAre("oops"));
  const ExitStatus exit = Wait(process);
  EXPECT_EQ(exit.code, 3);
  EXPECT_EQ(exit.signal, 0);
}

// Which of two of one name counts is up to the program.
TEST_F(ProcessTest, ItsEnvironmentTakesThePlaceOfItsParents) {
  setenv("GREETING", "goodbye", 1);
  setenv("GREETINGS", "many", 1);
  Process process = Shell("tr '\\0' '\\n' </proc/$$/environ | grep ^GREETING | sort");
  unsetenv("GREETING");
  unsetenv("GREETINGS");
  EXPECT_THAT(Output(process), ElementsAre("GREETING=hello", "GREETINGS=many"));
}

// The worker's own signals, files and input are none of a trainer's.
TEST_F(ProcessTest, StartsWithNothingOfItsParents) {
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const auto handler = signal(SIGPIPE, SIG_IGN);
  const int kept = open("/dev/null", O_RDONLY), lost = open("/dev/null", O_RDONLY);
  Process process = Shell(
      absl::StrCat("while read -r key value; do case $key in Sig[BI]*) echo $value;; esac; done "
                   "</proc/self/status; [ -e /proc/self/fd/",
                   kept,
                   " ] && echo kept; "
                   "[ -e /proc/self/fd/",
                   lost, " ] && echo open; cat"),
      {kept});
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  signal(SIGPIPE, handler);
  const std::vector<std::string> lines = Output(process);
  ASSERT_THAT(lines, ElementsAre("0000000000000000", ::testing::_, "kept"));
  uint64_t ignored = 0;
  EXPECT_TRUE(absl::SimpleHexAtoi(lines[1], &ignored)) << lines[1];
  EXPECT_EQ(ignored & (uint64_t{1} << (SIGPIPE - 1)), 0u);
  EXPECT_EQ(Wait(process).code, 0) << "its input is empty";
  close(kept);
  close(lost);
}

// Whoever reads them must be able to wait for several at once.
TEST_F(ProcessTest, ItsPipesDoNotBlockAndEndWithIt) {
  const size_t before = OpenPipes();
  {
    Process process = Shell("exec sleep 1000");
    EXPECT_EQ(OpenPipes(), before + 2);
    const int out = process.TakeStdout(), err = process.TakeStderr();
    char byte = 0;
    for (const int fd : {out, err}) {
      EXPECT_EQ(read(fd, &byte, 1), -1);
      EXPECT_EQ(errno, EAGAIN);
      close(fd);
    }
  }
  EXPECT_EQ(OpenPipes(), before);
  Shell("exec sleep 1000");
  EXPECT_EQ(OpenPipes(), before) << "nobody has taken its output";
}

// Else a worker that starts trainers for months has no file left at the end.
TEST_F(ProcessTest, APipeThatWasReadToItsEndIsClosed) {
  std::atomic<int> ends = 0;
  LogPump pump;
  const size_t before = OpenPipes();
  Process process = Shell("echo one; echo two >&2");
  for (const int fd : {process.TakeStdout(), process.TakeStderr()}) {
    pump.Add(fd, [&](const std::vector<std::string>&, bool end) { ends += end; });
  }
  ASSERT_TRUE(Eventually([&] { return ends == 2; }));
  EXPECT_TRUE(Eventually([&] { return OpenPipes() == before; }));
}

TEST_F(ProcessTest, AStartThatFailsLeavesNoPipeOpen) {
  const size_t before = OpenPipes();
  EXPECT_FALSE(Process::Start({.command = {"/no/such/trainer"}, .directory = dir_.path()}).ok());
  EXPECT_EQ(OpenPipes(), before);
  // Room for two of the three pipes that it takes.
  rlimit limit{}, tight{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int next = dup(STDIN_FILENO);
  close(next);
  tight = limit;
  tight.rlim_cur = static_cast<rlim_t>(next) + 5;
  setrlimit(RLIMIT_NOFILE, &tight);
  const absl::Status refused =
      Process::Start({.command = {"/bin/true"}, .directory = dir_.path()}).status();
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(OpenPipes(), before);
}

// A number that is free again may be another thread's by the time that it would be closed twice.
TEST_F(ProcessTest, AStartClosesNoFileOfAnotherThread) {
  std::atomic<bool> over = false;
  int lost = 0;
  std::thread other([&] {
    while (!over) lost += close(open("/dev/null", O_RDONLY | O_CLOEXEC)) != 0;
  });
  for (int i = 0; i < 20; ++i) Shell("exit 0");
  over = true;
  other.join();
  EXPECT_EQ(lost, 0);
}

TEST_F(ProcessTest, AMissingProgramIsAnErrorThatNamesIt) {
  const auto process = Process::Start({.command = {"/no/such/trainer"}, .directory = dir_.path()});
  EXPECT_THAT(std::string(process.status().message()), HasSubstr("/no/such/trainer"));
}

TEST_F(ProcessTest, ASignalReachesTheWholeGroup) {
  Process process = Shell("sleep 1000 & echo $!; wait");
  int child = 0;
  absl::Mutex mutex;
  LogPump pump;  // its thread uses the others: it ends first
  pump.Add(process.TakeStdout(), [&](std::vector<std::string> lines, bool) {
    absl::MutexLock lock(&mutex);
    if (!lines.empty()) (void)absl::SimpleAtoi(lines[0], &child);
  });
  {
    absl::MutexLock lock(&mutex);
    const auto started = [&] { return child != 0; };
    ASSERT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&started), absl::Seconds(20)));
  }
  process.Signal(SIGKILL);
  EXPECT_EQ(Wait(process).signal, SIGKILL);
  EXPECT_TRUE(Eventually([&] { return kill(child, 0) != 0; }));
}

// A trainer's own children do not go on where it has ended.
TEST_F(ProcessTest, WhatItStartedEndsWithIt) {
  Process process = Shell("sleep 1000 >/dev/null 2>&1 & echo $!");
  const std::vector<std::string> lines = Output(process);
  int child = 0;
  ASSERT_THAT(lines, ::testing::SizeIs(1));
  ASSERT_TRUE(absl::SimpleAtoi(lines[0], &child));
  EXPECT_EQ(kill(child, 0), 0);
  EXPECT_EQ(Wait(process).code, 0);
  EXPECT_TRUE(Eventually([&] { return kill(child, 0) != 0; }));
}

TEST_F(ProcessTest, DiesWithTheThreadThatStartedIt) {
  std::optional<Process> process;
  std::thread starter([&] { process.emplace(Shell("sleep 1000")); });
  starter.join();
  EXPECT_EQ(Wait(*process).signal, SIGKILL);
}

// The lock is free only when the worker and all of its trainers are gone.
TEST_F(ProcessTest, TheFolderStaysLockedWhileATrainerLives) {
  std::optional<Process> trainer;
  {
    absl::StatusOr<DataDir> data_dir = DataDir::Open(dir_.File("data"), absl::ZeroDuration());
    ASSERT_TRUE(data_dir.ok()) << data_dir.status();
    trainer.emplace(
        Shell("while [ ! -e go ]; do sleep 0.01; done; sleep 0.2", {data_dir->lock_fd()}));
    EXPECT_THAT(
        std::string(DataDir::Open(dir_.File("data"), absl::ZeroDuration()).status().message()),
        HasSubstr("belongs to a running ringleader-worker"));
  }
  // The file now looks as if the worker that wrote it were dead.
  std::ofstream(dir_.File("data/lock")) << "";
  EXPECT_THAT(
      std::string(DataDir::Open(dir_.File("data"), absl::ZeroDuration()).status().message()),
      HasSubstr("trainers of an earlier worker are still alive"));
  std::ofstream(dir_.File("go")).flush();
  EXPECT_TRUE(DataDir::Open(dir_.File("data"), absl::Seconds(20)).ok());
}

// Whoever could open the lock could keep workers out.
TEST_F(ProcessTest, NobodyElseCanTakeTheFoldersLock) {
  namespace fs = std::filesystem;
  const std::string lock = dir_.File("data/lock");
  fs::create_directory(dir_.File("data"));
  std::ofstream(lock) << "";
  fs::permissions(lock, fs::perms::others_read, fs::perm_options::add);
  ASSERT_TRUE(DataDir::Open(dir_.File("data"), absl::ZeroDuration()).ok());
  EXPECT_EQ(fs::status(lock).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(ProcessTest, AFolderKeepsItsId) {
  const auto id = [&](const std::string& name) {
    return DataDir::Open(dir_.File(name), absl::ZeroDuration())->id();
  };
  EXPECT_EQ(id("one"), id("one"));
  EXPECT_NE(id("one"), id("two"));
}

TEST_F(ProcessTest, ALongFolderNameStillGetsASocket) {
  const std::string path = dir_.File(std::string(120, 'd'));
  const absl::StatusOr<DataDir> data_dir = DataDir::Open(path, absl::ZeroDuration());
  ASSERT_TRUE(data_dir.ok());
  EXPECT_LT(data_dir->socket_path().size(), 100u);
}

TEST(LineSplitterTest, CutsLinesAndKeepsTheRest) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  splitter.Add("one\ntw", &lines);
  splitter.Add("o\r\n\nthree", &lines);
  EXPECT_THAT(lines, ElementsAre("one", "two", ""));
  splitter.Finish(&lines);
  EXPECT_EQ(lines.back(), "three");
  splitter.Finish(&lines);
  EXPECT_EQ(lines.size(), 4u) << "nothing is no line";
}

TEST(LineSplitterTest, CutsEndlessLinesBetweenCharacters) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  std::string text(LineSplitter::kMaxLineBytes - 1, 'x');
  text += "é tail\n";
  splitter.Add(text, &lines);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].substr(lines[0].size() - 2), "é");
  EXPECT_EQ(lines[1], " tail");
}

// Bytes of which each would continue a character, as binary output may have them.
TEST(LineSplitterTest, NoLineIsEndless) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  splitter.Add(std::string(5 * LineSplitter::kMaxLineBytes, '\x80'), &lines);
  splitter.Finish(&lines);
  ASSERT_GE(lines.size(), 2u);
  size_t bytes = 0;
  for (const std::string& line : lines) {
    EXPECT_LE(line.size(), 2 * LineSplitter::kMaxLineBytes);
    bytes += line.size();
  }
  EXPECT_EQ(bytes, 5 * LineSplitter::kMaxLineBytes);
}

TEST(LineSplitterTest, WhatIsNoTextBecomesQuestionMarks) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  splitter.Add("a\xff\xc3z \xed\xa0\x80 \xf0\x9f\x98\x80\n", &lines);
  EXPECT_THAT(lines, ElementsAre("a??z ??? \xf0\x9f\x98\x80"));
  // So does the end of what is written no further: a coordinator can read no message with such
  // bytes, and would be sent it again and again.
  splitter.Add("b\xff", &lines);
  splitter.Finish(&lines);
  EXPECT_EQ(lines.back(), "b?");
}

}  // namespace
}  // namespace ringleader::agent
