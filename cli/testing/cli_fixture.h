// ringctl as a user runs it, against a coordinator in this process.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/testing/fake_clock.h"
#include "cli/context.h"
#include "cli/testing/fake_coordinator.h"
#include "worker/data/token_folder.h"

namespace ringleader::cli {

// What a command leaves behind.
struct Result {
  int code;
  std::string out;
  std::string err;
};

// Characters of its longest line.
int64_t LongestLine(const std::string& text);

// A folder with a job file and what it names, and an environment that points to the coordinator.
class CliTest : public ::testing::Test {
 protected:
  CliTest();
  ~CliTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) const;
  // A folder of tokens: the manifest, and a shard of zeros that it then names.
  void WriteTokens(const std::string& folder, data::Manifest manifest) const;
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  // `columns`: of the terminal that it writes to; 0: none.
  Result Run(const std::vector<std::string>& arguments, int columns = 0);

  // A job of three steps that the coordinator knows.
  v1::Job& AddJob(const std::string& id, v1::Job::State state);
  // A run of three steps: a script for WatchJob that ends in `last`.
  void ScriptRun(const std::string& id, v1::Job::State last);

  KeepalivePolicy keepalive_;
  FakeCoordinator coordinator_;
  std::filesystem::path folder_;
  FakeClock clock_;
  std::map<std::string, std::string> environment_ = {{"RINGLEADER_ADDRESS", coordinator_.address()},
                                                     {"HOME", "/nonexistent"}};
};

}  // namespace ringleader::cli
