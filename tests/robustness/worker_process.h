// The worker's daemon under test, as a process.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/coordinator_process.h"

namespace ringleader::testing {

class WorkerProcessTest : public ::testing::Test {
 protected:
  // `flags` add to those that every worker here needs, or take their place.
  Process Start(std::map<std::string, std::string> flags) {
    flags.merge(std::map<std::string, std::string>{
        {"--data-dir", coordinator_.File("worker")}, {"--name", "n1"}, {"--trainer", "/bin/true"}});
    std::vector<std::string> arguments;
    for (const auto& [flag, value] : flags) {
      arguments.insert(arguments.end(), {flag, value});
    }
    return Process(ProgramPath("ringleader-worker"), arguments,
                   coordinator_.File(absl::StrCat("worker-", ++starts_, ".log")));
  }
  // What it says before it gives up.
  std::string Complaint(const std::map<std::string, std::string>& flags) {
    Process worker = Start(flags);
    EXPECT_NE(worker.Wait().value_or(0), 0) << worker.Log();
    return worker.Log();
  }

  // The path of a trainer, a shell script.
  std::string TrainerThatDoes(const std::string& script) {
    std::string path = coordinator_.File("trainer");
    std::ofstream(path) << "#!/bin/sh\n" << script;
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }

  CoordinatorProcess coordinator_;
  int starts_ = 0;
};

}  // namespace ringleader::testing
