#include "base/process/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>

#include "absl/cleanup/cleanup.h"

namespace ringleader {
namespace {

using ::testing::EndsWith;

// What stands on standard error once this was logged.
std::string Logged(const LoggingOptions& options, const std::string& message) {
  const std::shared_ptr<spdlog::logger> before = spdlog::default_logger();
  const absl::Cleanup put_back = [&] { spdlog::set_default_logger(before); };
  ::testing::internal::CaptureStderr();
  SetUpLogging("program", options);
  spdlog::info("nodes/a connected (version {})", message);
  return ::testing::internal::GetCapturedStderr();
}

// Before, the version of a worker was enough to forge a line.
TEST(LoggingTest, AMessageIsOneLine) {
  EXPECT_THAT(
      Logged({}, "1\n2026-11-27T00:00:00.000Z info program[1] all is well\x1b[2J\t\xc3\xa9"),
      EndsWith("nodes/a connected (version 1\\x0a2026-11-27T00:00:00.000Z info program[1] all "
               "is well\\x1b[2J\t\xc3\xa9)\n"));
}

TEST(LoggingTest, AProgramMayLogLinesOfItsOwn) {
  EXPECT_THAT(Logged({.one_line = false}, "a\nb\x1b"),
              EndsWith("nodes/a connected (version a\nb\\x1b)\n"));
}

}  // namespace
}  // namespace ringleader
