#include "coordinator/limits/client_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/fake_clock.h"

namespace ringleader::limits {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Whether the flag takes the value.
bool Takes(const std::string& flag, const std::string& value, Options* options) {
  CLI::App app;
  AddLimitFlags(app, options);
  try {
    app.parse(std::vector<std::string>{value, flag});  // from the last to the first
  } catch (const CLI::ParseError&) {
    return false;
  }
  return true;
}

TEST(LimitFlagsTest, EachSetsItsOwn) {
  const std::vector<std::pair<std::string, int64_t Options::*>> flags = {
      {"--calls", &Options::calls},
      {"--calls-per-client", &Options::calls_per_client},
      {"--checks", &Options::checks},
      {"--checks-per-client", &Options::checks_per_client},
      {"--health-calls", &Options::health_calls},
      {"--health-calls-per-client", &Options::health_calls_per_client},
      {"--unread-mebibytes", &Options::unread_mebibytes},
      {"--unread-mebibytes-per-client", &Options::unread_mebibytes_per_client},
      {"--watches", &Options::watches},
      {"--watches-per-client", &Options::watches_per_client},
      {"--submitted-mebibytes", &Options::submitted_mebibytes},
      {"--submitted-mebibytes-per-client", &Options::submitted_mebibytes_per_client},
      {"--silent-sessions", &Options::silent_sessions},
      {"--silent-sessions-per-client", &Options::silent_sessions_per_client}};
  for (const auto& [flag, field] : flags) {
    Options options;
    EXPECT_FALSE(Takes(flag, "0", &options)) << flag;
    EXPECT_FALSE(Takes(flag, "4294967297", &options)) << flag;
    for (const int64_t value : {int64_t{1}, int64_t{1} << 32}) {
      EXPECT_TRUE(Takes(flag, std::to_string(value), &options)) << flag;
      for (const auto& [other, others] : flags) {
        EXPECT_EQ(options.*others, other == flag ? value : Options().*others) << flag << other;
      }
    }
  }
}

// Two for a client and three in all, of each thing; or as many MiB.
TEST(LimitsTest, EachQuotaHasBothOfItsLimits) {
  const Options options = {.calls_per_client = 2,
                           .calls = 3,
                           .checks_per_client = 2,
                           .checks = 3,
                           .health_calls_per_client = 2,
                           .health_calls = 3,
                           .unread_mebibytes_per_client = 2,
                           .unread_mebibytes = 3,
                           .watches_per_client = 2,
                           .watches = 3,
                           .silent_sessions_per_client = 2,
                           .silent_sessions = 3};
  const FakeClock clock;
  prometheus::Registry registry;
  Limits limits(options, &clock, &registry);
  const auto expect = [](Quota& quota, const std::string& flag, int64_t one) {
    std::vector<Quota::Hold> holds;
    for (const char* client : {"a", "a", "b"}) {
      absl::StatusOr<Quota::Hold> hold = quota.Take(client, one);
      ASSERT_TRUE(hold.ok()) << flag << ": " << hold.status();
      holds.push_back(*std::move(hold));
    }
    EXPECT_THAT(std::string(quota.Take("a", one).status().message()),
                HasSubstr(flag + "-per-client"));
    const std::string all(quota.Take("c", one).status().message());
    EXPECT_THAT(all, AllOf(HasSubstr(flag), Not(HasSubstr("-per-client"))));
  };
  expect(limits.calls, "--calls", 1);
  expect(limits.checks, "--checks", 1);
  expect(limits.health_calls, "--health-calls", 1);
  expect(limits.unread_answers, "--unread-mebibytes", 1 << 20);
  expect(limits.unread_messages, "--unread-mebibytes", 1 << 20);
  expect(limits.watches, "--watches", 1);
  expect(limits.silent_sessions, "--silent-sessions", 1);
}

}  // namespace
}  // namespace ringleader::limits
