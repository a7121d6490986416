// What the fake NVML (fake_nvml.cc) shows, as one test sets it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/testing/temp_dir.h"

namespace ringleader::agent::testing {

class FakeDriver {
 public:
  explicit FakeDriver(const std::string& facts) { Say(facts); }

  // What the driver shows from now on.
  void Say(const std::string& facts) {
    std::ofstream(Folder().File("facts.new")) << facts << "\n";
    std::filesystem::rename(Folder().File("facts.new"), Folder().File("facts"));
  }

 private:
  // The environment says where it is, and that must not change while threads read it.
  static const TempDir& Folder() {
    static const auto* const kFolder = [] {
      const auto* folder = new TempDir;
      setenv("RINGLEADER_FAKE_NVML", folder->File("facts").c_str(), 1);
      return folder;
    }();
    return *kFolder;
  }
};

}  // namespace ringleader::agent::testing
