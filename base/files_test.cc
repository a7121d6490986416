// Files that somebody else names: what is none is refused, and nothing waits for a pipe's writer.
#include "base/files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/testing/temp_dir.h"

namespace ringleader {
namespace {

using ::testing::HasSubstr;

TEST(ReadRegularFileTest, TakesFilesOfTheSizeAllowedAlone) {
  const TempDir folder;
  std::ofstream(folder.File("four")) << "four";
  EXPECT_EQ(*ReadRegularFile(folder.File("four"), 4), "four");
  EXPECT_THAT(ReadRegularFile(folder.File("four"), 3).status().message(),
              HasSubstr("four has 4 bytes; at most 3 are allowed"));
  EXPECT_TRUE(absl::IsNotFound(ReadRegularFile(folder.File("none"), 4).status()));
  EXPECT_THAT(ReadRegularFile(folder.File(""), 4).status().message(), HasSubstr("is a folder"));
  ASSERT_EQ(mkfifo(folder.File("pipe").c_str(), 0600), 0);
  EXPECT_THAT(ReadRegularFile(folder.File("pipe"), 4).status().message(), HasSubstr("is a pipe"));
  EXPECT_THAT(ReadRegularFile("/dev/zero", 4).status().message(), HasSubstr("is a device"));
  std::ofstream(folder.File("sparse")) << "";
  std::filesystem::resize_file(folder.File("sparse"), uint64_t{1} << 32);
  EXPECT_THAT(ReadRegularFile(folder.File("sparse"), 1 << 20).status().message(),
              HasSubstr("has 4294967296 bytes"));
}

TEST(ReadRegularFileTest, AFileIsReadWholeHoweverLongItMayBe) {
  const TempDir folder;
  const std::string text(100'000, 'x');
  std::ofstream(folder.File("file")) << text;
  EXPECT_EQ(*ReadRegularFile(folder.File("file"), size_t{1} << 40), text);
  EXPECT_EQ(*ReadRegularFile(folder.File("file"), 100'000), text);
  EXPECT_FALSE(ReadRegularFile(folder.File("file"), 99'999).ok());
  // The system gives it no size.
  EXPECT_THAT(*ReadRegularFile("/proc/self/status", 1 << 20), HasSubstr("VmPeak"));
}

// Half of a file would pass for all of it.
TEST(ReadFileTest, AnErrorOfReadingIsNoEnd) {
  const TempDir folder;
  const std::string text(100'000, 'x');
  std::ofstream(folder.File("file")) << text;
  EXPECT_EQ(*ReadFile(folder.File("file")), text);
  EXPECT_THAT(*ReadFile("/proc/self/status"), HasSubstr("VmPeak"));
  for (const std::string& unread : {std::string("/proc/self/mem"), folder.File("")}) {
    const absl::StatusOr<std::string> read = ReadFile(unread);
    ASSERT_FALSE(read.ok()) << unread;
    EXPECT_THAT(read.status().message(), HasSubstr(absl::StrCat("read ", unread)));
  }
}

// ABORTED is what one attempt tells another whose place it has taken.
TEST(FileErrorTest, AFileThatItsServerForgotMayComeBack) {
  EXPECT_EQ(FileError(ESTALE, "write a").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FileError(EDEADLK, "lock a").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FileError(ENOSPC, "write a").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(FileError(ESTALE, "write a").message(), HasSubstr("write a: "));
}

TEST(ReadFlagFileTest, ErrorsBeginWithTheFlag) {
  const TempDir folder;
  std::ofstream(folder.File("four")) << "four";
  EXPECT_EQ(*ReadFlagFile("--file", folder.File("four"), 4), "four");
  EXPECT_EQ(ReadFlagFile("--file", folder.File("four"), 3).status().message(),
            absl::StrCat("--file: ", folder.File("four"), " has 4 bytes; at most 3 are allowed"));
  EXPECT_EQ(ReadFlagFile("--file", "/dev/zero", 4, Pipe::kRead).status().message(),
            "--file: /dev/zero is a device; a file is expected");
  const absl::Status none = ReadFlagFile("--file", folder.File("none"), 4).status();
  EXPECT_TRUE(absl::IsNotFound(none));
  EXPECT_EQ(none.message(), absl::StrCat("--file: cannot read ", folder.File("none"),
                                         ": No such file or directory"));
}

TEST(ReadFlagFileTest, APipeIsReadToItsEndAndNoFarther) {
  const TempDir folder;
  const std::string path = folder.File("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(ReadFlagFile("--file", path, 4).status().message(), HasSubstr("is a pipe"));
  EXPECT_EQ(*ReadFlagFile("--file", path, 4, Pipe::kRead), "") << "nobody writes into it";
  // As the shell hands over `<(command)`.
  const auto piped = [](const std::string& text, size_t max_bytes) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    std::thread writer([&] {
      for (const char c : text) {
        EXPECT_EQ(write(ends[1], &c, 1), 1);
      }
      close(ends[1]);
    });
    auto got = ReadFlagFile("--file", absl::StrCat("/dev/fd/", ends[0]), max_bytes, Pipe::kRead);
    writer.join();
    close(ends[0]);
    return got;
  };
  EXPECT_EQ(*piped("piece by piece", 100), "piece by piece");
  EXPECT_THAT(piped(std::string(1000, 'x'), 999).status().message(),
              HasSubstr("has more than the 999 bytes that are allowed"));
}

}  // namespace
}  // namespace ringleader
