// The user of this machine as whom a job's trainers run (--run-as).
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::agent {

struct LocalUser {
  std::string name;
  uid_t uid = 0;
  gid_t gid = 0;  // the only group: trainers have no others
  std::string home;
};

class RunAs {
 public:
  // Trainers run as the worker's own user.
  RunAs() = default;
  // `flags`: "USER" for all jobs, or "OWNER=USER" for those of one owner. FAILED_PRECONDITION
  // unless this process is root's. INVALID_ARGUMENT names a flag whose user this machine does not
  // have, or is root, and an owner that has two.
  static absl::StatusOr<RunAs> Parse(const std::vector<std::string>& flags);

  // Trainers run as other users.
  bool any() const { return !users_.empty(); }
  // Whose trainers a job of `owner` has; none: the worker's own. PERMISSION_DENIED where no flag
  // says so.
  absl::StatusOr<std::optional<LocalUser>> UserOf(const std::string& owner) const;

 private:
  std::map<std::string, LocalUser> users_;  // by owner; "": of all others
};

}  // namespace ringleader::agent
