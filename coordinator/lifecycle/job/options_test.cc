#include "coordinator/lifecycle/job/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "coordinator/lifecycle/job/wire_time.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::HasSubstr;

absl::Status Parse(std::vector<std::string> arguments, Options* options) {
  CLI::App app;
  AddLifecycleFlags(app, options);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return absl::OkStatus();
}

TEST(OptionsTest, EveryFlagIsItsOwn) {
  struct Case {
    std::string flag;
    absl::Duration Options::*field;
  };
  for (const Case& one : std::vector<Case>{{"--heartbeat", &Options::heartbeat_interval},
                                           {"--lease", &Options::lease},
                                           {"--adoption-timeout", &Options::adoption_timeout},
                                           {"--fence-after", &Options::fence_after},
                                           {"--start-timeout", &Options::start_timeout},
                                           {"--blame-window", &Options::blame_window},
                                           {"--retry-backoff", &Options::retry_backoff},
                                           {"--max-retry-backoff", &Options::max_retry_backoff},
                                           {"--checkpoint-grace", &Options::checkpoint_grace},
                                           {"--abort-grace", &Options::abort_grace}}) {
    Options options;
    ASSERT_EQ(Parse({one.flag, "7.5"}, &options), absl::OkStatus()) << one.flag;
    EXPECT_EQ(options.*one.field, absl::Seconds(7.5)) << one.flag;
    options.*one.field = Options().*one.field;
    EXPECT_EQ(options.batch_window, Options().batch_window);
    EXPECT_EQ(options.lease, Options().lease) << one.flag;
    EXPECT_EQ(options.fence_after, Options().fence_after) << one.flag;
    EXPECT_THAT(std::string(Parse({one.flag, "0"}, &options).message()), HasSubstr(one.flag));
    EXPECT_THAT(std::string(Parse({one.flag, "-1"}, &options).message()), HasSubstr(one.flag));
    for (const char* text : {"1e-300", "1e10"}) {
      EXPECT_THAT(std::string(Parse({one.flag, text}, &options).message()),
                  HasSubstr(one.flag + ": '" + text +
                            "' is not allowed; give seconds from 0.001 to 1000000000"));
    }
    for (const char* text : {"nan", "-nan", "inf"}) {
      EXPECT_THAT(std::string(Parse({one.flag, text}, &options).message()),
                  HasSubstr(one.flag + ": '" + text + "' is not allowed; give a finite number"));
    }
  }
}

TEST(OptionsTest, TimesAreTheseUnlessTheyAreSet) {
  const Options options;
  EXPECT_EQ(options.heartbeat_interval, absl::Seconds(2));
  EXPECT_EQ(options.lease, absl::Seconds(10));
  EXPECT_EQ(options.adoption_timeout, absl::Seconds(120));
  EXPECT_EQ(options.fence_after, absl::Seconds(90));
  EXPECT_EQ(options.start_timeout, absl::Minutes(10));
  EXPECT_EQ(options.blame_window, absl::Seconds(3));
  EXPECT_EQ(options.retry_backoff, absl::Seconds(2));
  EXPECT_EQ(options.max_retry_backoff, absl::Minutes(5));
  EXPECT_EQ(options.refusal_pause, absl::Seconds(30));
  EXPECT_EQ(options.set_aside_after_jobs, 3u);
  EXPECT_EQ(options.set_aside_window, absl::Minutes(15));
  EXPECT_EQ(options.set_aside_for, absl::Minutes(30));
  EXPECT_EQ(options.checkpoint_grace, absl::Seconds(120));
  EXPECT_EQ(options.abort_grace, absl::Seconds(5));
  EXPECT_EQ(options.batch_window, absl::Milliseconds(25));
}

TEST(OptionsTest, NodesAreKeptForDays) {
  Options options;
  ASSERT_EQ(Parse({"--keep-nodes", "3"}, &options), absl::OkStatus());
  EXPECT_EQ(options.keep_nodes, absl::Hours(72));
  EXPECT_EQ(options.lease, Options().lease);
  EXPECT_EQ(Options().keep_nodes, absl::Hours(24 * 7));
  for (const char* days : {"0", "36501", "x"}) {
    EXPECT_THAT(std::string(Parse({"--keep-nodes", days}, &options).message()),
                HasSubstr("--keep-nodes"));
  }
}

// Each bound is allowed, and what lies a millisecond beyond it is refused by the flag's name.
TEST(OptionsTest, TimesThatContradictEachOtherAreRefused) {
  constexpr absl::Duration kBeyond = absl::Milliseconds(1);
  EXPECT_EQ(Validate(Options()), absl::OkStatus());
  const auto refusal = [](const Options& options) {
    const absl::Status status = Validate(options);
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  Options options;
  options.lease = 2 * options.heartbeat_interval;
  EXPECT_EQ(refusal(options), "");
  options.lease -= kBeyond;
  EXPECT_THAT(refusal(options), HasSubstr("--lease must be at least twice --heartbeat"));

  options = Options();
  options.fence_after = options.lease;
  EXPECT_EQ(refusal(options), "");
  options.fence_after -= kBeyond;
  EXPECT_THAT(refusal(options), HasSubstr("--fence-after must not be less than --lease"));

  options = Options();
  options.adoption_timeout = options.fence_after + options.heartbeat_interval;
  EXPECT_EQ(refusal(options), "");
  options.adoption_timeout -= kBeyond;
  EXPECT_THAT(refusal(options), HasSubstr("--adoption-timeout (1m31.999s) must exceed "
                                          "--fence-after (1m30s) by at least --heartbeat (2s)"));

  options = Options();
  options.max_retry_backoff = options.retry_backoff;
  EXPECT_EQ(refusal(options), "");
  options.max_retry_backoff -= kBeyond;
  EXPECT_THAT(refusal(options),
              HasSubstr("--max-retry-backoff must not be less than --retry-backoff"));
}

TEST(WireTimeTest, WhatIsLongerThanAWorkerCanBeToldIsTheMostThatItCan) {
  EXPECT_EQ(WireMilliseconds(absl::Seconds(90)), 90'000u);
  EXPECT_EQ(WireMilliseconds(absl::Milliseconds(4294967295)), 4294967295u);
  EXPECT_EQ(WireMilliseconds(absl::Seconds(4294968)), 4294967295u);
  EXPECT_EQ(WireMilliseconds(absl::InfiniteDuration()), 4294967295u);
}

}  // namespace
}  // namespace ringleader::lifecycle
