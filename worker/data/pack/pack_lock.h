// The output folder of `ringctl data pack`, into which one pack at a time writes.
#pragma once

#include <filesystem>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::data {

class PackLock {
 public:
  // Makes `output` where it is not there. UNAVAILABLE where another process packs into it.
  static absl::StatusOr<PackLock> Take(const std::filesystem::path& output);
  PackLock(PackLock&& other) noexcept;
  PackLock& operator=(PackLock&&) = delete;
  // Leaves no file behind, and of the folders that it made those that hold something.
  ~PackLock();

 private:
  PackLock() = default;
  // Whether this has the lock now; false: another pack that ended took folder or file away, so that
  // both are to be made anew.
  absl::StatusOr<bool> Try(const std::filesystem::path& output);
  absl::Status MakeFolders(const std::filesystem::path& output);

  std::filesystem::path file_;               // empty: this has no lock
  int fd_ = -1;                              // of the file
  std::vector<std::filesystem::path> made_;  // the outermost first
};

}  // namespace ringleader::data
