#include "worker/agent/node/run_as.h"

#include <pwd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ringleader::agent {
namespace {

absl::StatusOr<LocalUser> FindUser(const std::string& name) {
  passwd entry{};
  passwd* found = nullptr;
  std::vector<char> buffer(1 << 16);
  const int error = getpwnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("this machine has no user ", name,
                     error == 0 ? "" : absl::StrCat(" that can be found: ", std::strerror(error))));
  }
  if (entry.pw_uid == 0 || entry.pw_gid == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is root, or of its group: give a user without rights of its own"));
  }
  return LocalUser{.name = name, .uid = entry.pw_uid, .gid = entry.pw_gid, .home = entry.pw_dir};
}

}  // namespace

absl::StatusOr<RunAs> RunAs::Parse(const std::vector<std::string>& flags) {
  RunAs parsed;
  if (flags.empty()) return parsed;
  if (geteuid() != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--run-as: only root can start trainers as another user, and this worker runs "
                     "as uid ",
                     geteuid(), ": start it as root, or without --run-as as the trainers' user"));
  }
  for (const std::string& flag : flags) {
    const size_t equals = flag.rfind('=');
    const std::string owner = equals == std::string::npos ? "" : flag.substr(0, equals);
    if (equals == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--run-as ", flag, ": write USER, or OWNER=USER for the jobs of one owner"));
    }
    const absl::StatusOr<LocalUser> user =
        FindUser(equals == std::string::npos ? flag : flag.substr(equals + 1));
    if (!user.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--run-as ", flag, ": ", std::string(user.status().message())));
    }
    if (!parsed.users_.emplace(owner, *user).second) {
      return absl::InvalidArgumentError(absl::StrCat("--run-as ", flag, ": ",
                                                     owner.empty() ? "all other owners" : owner,
                                                     " got a user before; give each one"));
    }
  }
  return parsed;
}

absl::StatusOr<std::optional<LocalUser>> RunAs::UserOf(const std::string& owner) const {
  if (users_.empty()) return std::nullopt;
  auto found = users_.find(owner);
  if (found == users_.end()) found = users_.find("");
  if (found != users_.end()) return found->second;
  return absl::PermissionDeniedError(
      absl::StrCat("this node runs no jobs of ", owner.empty() ? "nobody" : owner,
                   ", for its worker's --run-as names no user for them"));
}

}  // namespace ringleader::agent
