#include "worker/agent/node/data_dir.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/random/random.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/file_lock.h"
#include "base/status_macros.h"

namespace ringleader::agent {
namespace {

namespace fs = std::filesystem;

// Modes of folders that others may pass through and not list, of sockets to dial, and of what is
// the owner's alone.
constexpr mode_t kPassable = 0711, kWritableByAll = 0666, kPrivate = 0700, kOwnersFile = 0600;
constexpr mode_t kWritableByOthers = S_IWGRP | S_IWOTH;

bool IsTrusted(uid_t uid) {
  return uid == 0 || uid == geteuid();
}

absl::Status CannotBeWritten(const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrFormat("--data-dir %s cannot be written to: %s", path, std::strerror(errno)));
}

// Opens the folder, which is made if there is none. What lies in one that others may write to could
// be theirs: a name under /tmp that can be guessed may be taken before the worker comes.
absl::StatusOr<int> OpenFolder(const std::string& path) {
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  if (mkdir(path.c_str(), kPrivate) != 0 && errno != EEXIST) return CannotBeWritten(path);
  const auto another = [&](const char* what, const struct stat& found) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "--data-dir %s: this %s belongs to another user (uid %d), who may put anything in its "
        "place; give the worker a folder of its own, or \"chown %s%d %s\" once you have made sure "
        "of what is in it",
        path, what, found.st_uid, S_ISLNK(found.st_mode) ? "-h " : "", geteuid(), path));
  };
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0) return CannotBeWritten(path);
  if (S_ISLNK(found.st_mode) && !IsTrusted(found.st_uid)) return another("link", found);
  const int fd = open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return CannotBeWritten(path);
  absl::Cleanup close_it = [fd] { close(fd); };
  if (fstat(fd, &found) != 0) return CannotBeWritten(path);
  if (!IsTrusted(found.st_uid)) return another("folder", found);
  if ((found.st_mode & kWritableByOthers) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "--data-dir %s: other users may write to this folder (mode %o), and put anything in it; "
        "give the worker a folder of its own, or \"chmod go-w %s\" once you have made sure of what "
        "is in it",
        path, found.st_mode & 07777, path));
  }
  std::move(close_it).Cancel();
  return fd;
}

// The process that wrote its id into the lock file; 0 if there is none, or it is dead.
pid_t Holder(int fd) {
  char text[32] = {};
  int pid = 0;
  if (pread(fd, text, sizeof(text) - 1, 0) <= 0 || !absl::SimpleAtoi(text, &pid)) return 0;
  return kill(pid, 0) == 0 || errno == EPERM ? pid : 0;
}

absl::Status Lock(int fd, const std::string& path, absl::Duration patience) {
  const absl::Time deadline = BootNow() + patience;
  while (true) {
    ASSIGN_OR_RETURN(const bool is_ours, TryLockFile(fd, path + "/lock"));
    if (is_ours) break;
    if (const pid_t holder = Holder(fd); holder != 0) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "--data-dir %s belongs to a running ringleader-worker (process %d): stop that one, or "
          "give this one its own folder and --name",
          path, holder));
    }
    if (BootNow() >= deadline) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "--data-dir %s: trainers of an earlier worker are still alive; see \"fuser %s/lock\"",
          path, path));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  const std::string pid = absl::StrFormat("%d\n", getpid());
  if (ftruncate(fd, 0) != 0 || pwrite(fd, pid.data(), pid.size(), 0) < 0) {
    return absl::InternalError(
        absl::StrFormat("--data-dir %s: cannot write: %s", path, std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadOrDrawId(const std::string& path) {
  std::string id;
  if (std::ifstream(path) >> id) return id;
  absl::BitGen random;
  id = absl::StrFormat("%016x", absl::Uniform<uint64_t>(random));
  // The file appears in one step: a worker that is killed in between must not leave half an id.
  const std::string draft = path + ".new";
  std::ofstream file(draft);
  file << id << std::endl;
  std::error_code error;
  fs::rename(draft, path, error);
  if (!file || error) {
    return absl::FailedPreconditionError(absl::StrFormat("%s cannot be written", path));
  }
  return id;
}

absl::Status SetMode(const std::string& path, mode_t mode) {
  if (chmod(path.c_str(), mode) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("the permissions of %s cannot be set: %s", path, std::strerror(errno)));
}

void RemoveUnlessOwnedBy(const fs::path& folder, uid_t uid) {
  struct stat found {};
  std::error_code ignored;
  if (lstat(folder.c_str(), &found) == 0 && found.st_uid != uid) fs::remove_all(folder, ignored);
}

}  // namespace

absl::StatusOr<DataDir> DataDir::Open(const std::string& path, absl::Duration patience) {
  DataDir dir;
  dir.path_ = fs::absolute(path).lexically_normal().string();
  while (dir.path_.size() > 1 && dir.path_.ends_with('/')) dir.path_.pop_back();
  ASSIGN_OR_RETURN(const int folder, OpenFolder(dir.path_));
  const absl::Cleanup close_folder = [folder] { close(folder); };
  dir.lock_fd_ = openat(folder, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, kOwnersFile);
  // Whoever may open a file may lock it: earlier releases let everybody.
  if (dir.lock_fd_ < 0 || fchmod(dir.lock_fd_, kOwnersFile) != 0) return CannotBeWritten(dir.path_);
  RETURN_IF_ERROR(Lock(dir.lock_fd_, dir.path_, patience));
  ASSIGN_OR_RETURN(dir.id_, ReadOrDrawId(dir.path_ + "/id"));
  dir.socket_path_ = dir.path_ + "/trainers.sock";
  if (dir.socket_path_.size() >= sizeof(sockaddr_un::sun_path)) {
    char folder[] = "/tmp/ringleader-XXXXXX";
    if (mkdtemp(folder) == nullptr) {
      return absl::InternalError(absl::StrFormat("/tmp: %s", std::strerror(errno)));
    }
    dir.socket_folder_ = folder;
    dir.socket_path_ = dir.socket_folder_ + "/trainers.sock";
  }
  std::error_code ignored;
  fs::remove(dir.socket_path_, ignored);
  return dir;
}

DataDir::DataDir(DataDir&& other) noexcept
    : path_(std::move(other.path_)),
      id_(std::move(other.id_)),
      socket_path_(std::move(other.socket_path_)),
      socket_folder_(std::exchange(other.socket_folder_, {})),
      lock_fd_(std::exchange(other.lock_fd_, -1)) {}

DataDir::~DataDir() {
  if (lock_fd_ >= 0) close(lock_fd_);
  std::error_code ignored;
  if (!socket_folder_.empty()) fs::remove_all(socket_folder_, ignored);
}

std::string DataDir::DrawIncarnation() const {
  absl::BitGen random;
  return absl::StrFormat("%s.%016x", id_, absl::Uniform<uint64_t>(random));
}

absl::Status DataDir::OpenToOtherUsers() const {
  for (const std::string& folder : {path_, socket_folder_}) {
    if (!folder.empty()) RETURN_IF_ERROR(SetMode(folder, kPassable));
  }
  return SetMode(socket_path_, kWritableByAll);
}

absl::StatusOr<std::string> DataDir::TrainerDirectory(const std::string& job, uint32_t attempt,
                                                      uint32_t rank,
                                                      const std::optional<LocalUser>& user) const {
  const fs::path jobs = fs::path(path_) / "jobs";
  const fs::path parent = jobs / job / absl::StrFormat("attempt-%d", attempt);
  const fs::path folder = parent / absl::StrFormat("rank-%d", rank);
  if (user.has_value()) RemoveUnlessOwnedBy(folder, user->uid);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s cannot be created: %s", folder.string(), error.message()));
  }
  if (!user.has_value()) return folder.string();
  for (const fs::path& above : {jobs, jobs / job, parent}) {
    RETURN_IF_ERROR(SetMode(above.string(), kPassable));
  }
  // Its parent is the worker's, so that nobody else can put another thing in its place.
  if (lchown(folder.c_str(), user->uid, user->gid) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s cannot be given to %s: %s", folder.string(), user->name, std::strerror(errno)));
  }
  RETURN_IF_ERROR(SetMode(folder.string(), kPrivate));
  return folder.string();
}

void DataDir::RemoveEmpty(const std::string& job, uint32_t attempt) const {
  std::error_code ignored;
  const fs::path job_folder = fs::path(path_) / "jobs" / job;
  const fs::path attempt_folder = job_folder / absl::StrFormat("attempt-%d", attempt);
  for (fs::directory_iterator it(attempt_folder, ignored), end; it != end; it.increment(ignored)) {
    fs::remove(it->path(), ignored);  // fails unless empty
  }
  fs::remove(attempt_folder, ignored);
  fs::remove(job_folder, ignored);
}

}  // namespace ringleader::agent
