// The worker's folder: one worker at a time, and never while trainers of an earlier one live.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/agent/node/run_as.h"

namespace ringleader::agent {

// Holds `{path}/lock`. The lock's descriptor is inherited by every trainer, so the kernel lets go
// of it only when the worker and all of its trainers are gone: whoever gets it knows that they are.
class DataDir {
 public:
  // Creates the folder, its user's alone. One that is there must be this user's or root's, and
  // nobody else's to write to: else FAILED_PRECONDITION, which says what to do, and so where
  // another worker holds it. If only trainers of a dead worker do, they are on their way out: waits
  // up to `patience` for them.
  static absl::StatusOr<DataDir> Open(const std::string& path, absl::Duration patience);

  DataDir(DataDir&& other) noexcept;
  DataDir& operator=(DataDir&&) = delete;
  ~DataDir();

  const std::string& path() const { return path_; }
  int lock_fd() const { return lock_fd_; }
  // Drawn when the folder was first used, and kept in it.
  const std::string& id() const { return id_; }
  // A name for one worker process of this folder: "{id}.{random}".
  std::string DrawIncarnation() const;
  // Where trainers dial in. Unix sockets have short names: one in a long path lies under /tmp.
  const std::string& socket_path() const { return socket_path_; }
  // Lets trainers that are other users' reach the socket, which must exist, and their folders.
  // Nobody else's are theirs to read.
  absl::Status OpenToOtherUsers() const;
  // Creates and returns the folder in which a trainer runs: `user`'s alone, if there is one. What
  // another user's trainer left in it is removed then.
  absl::StatusOr<std::string> TrainerDirectory(const std::string& job, uint32_t attempt,
                                               uint32_t rank,
                                               const std::optional<LocalUser>& user) const;
  // Removes an attempt's folders, as far as its trainers left nothing in them.
  void RemoveEmpty(const std::string& job, uint32_t attempt) const;

 private:
  DataDir() = default;

  std::string path_;
  std::string id_;
  std::string socket_path_;
  std::string socket_folder_;  // to remove again; empty: path_
  int lock_fd_ = -1;
};

}  // namespace ringleader::agent
