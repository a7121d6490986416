// Reads the whole database for damage while it is in use: on a large one that takes minutes, which
// nobody should have to wait for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "coordinator/store/sqlite/sqlite_connection.h"

namespace ringleader::store {

class IntegrityCheck {
 public:
  // Begins at once, on a thread and a connection of its own. `on_damage` is called at most once,
  // from that thread, with DATA_LOSS that names the file.
  IntegrityCheck(std::string path, std::function<void(const absl::Status&)> on_damage);
  // Breaks off what is under way.
  ~IntegrityCheck();

 private:
  void Run(const std::function<void(const absl::Status&)>& on_damage) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string path_;
  absl::Mutex mutex_;
  std::unique_ptr<Connection> connection_
      ABSL_GUARDED_BY(mutex_);  // set while it may be broken off
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// DATA_LOSS, with the file's name and the remedy, if its pages do not fit together.
absl::Status CheckIntegrity(Connection& connection);

}  // namespace ringleader::store
