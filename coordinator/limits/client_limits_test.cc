#include "coordinator/limits/client_limits.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

namespace ringleader::limits {
namespace {

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

}  // namespace
}  // namespace ringleader::limits
