#include "worker/checkpoint/ownership.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "worker/checkpoint/checksummed_json.h"

namespace ringleader::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr char kOwnerName[] = "owner.json";
constexpr char kLockName[] = ".owner.lock";
constexpr size_t kMaxOwnerBytes = size_t{64} << 10;
constexpr char kFormatName[] = "ringleader-checkpoint-owner";
constexpr uint64_t kVersion = 1;
// A lock is held while a folder is renamed and old ones are removed.
constexpr absl::Duration kLockInterval = absl::Milliseconds(50);

// The owner that is written down; nullopt in a folder that nobody has claimed.
absl::StatusOr<std::optional<FolderOwner>> ReadOwner(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/", kOwnerName);
  const absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxOwnerBytes);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  RETURN_IF_ERROR(text.status());
  ASSIGN_OR_RETURN(FolderOwner owner, ParseOwner(*text, path));
  return owner;
}

absl::Status Replaced(const std::string& directory, const FolderOwner& owner,
                      const FolderOwner& recorded) {
  return absl::AbortedError(absl::StrFormat(
      "checkpoint.directory %s: an attempt of jobs/%s with token %d has begun since, and this one "
      "has %d; nothing more is written (if that attempt was of a coordinator that is gone for "
      "good, remove %s/%s)",
      directory, recorded.job, recorded.token, owner.token, directory, kOwnerName));
}

// Runs `body` while this process has the folder's lock.
absl::Status WithLock(const std::string& directory, absl::Duration patience,
                      absl::FunctionRef<absl::Status()> body) {
  const std::string path = absl::StrCat(directory, "/", kLockName);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(errno, absl::StrCat("open ", path));
  const absl::Cleanup close_it = [fd] { close(fd); };
  const absl::Time deadline = BootNow() + patience;
  while (true) {
    ASSIGN_OR_RETURN(const bool is_ours, TryLockFile(fd, path));
    if (is_ours) break;
    if (BootNow() >= deadline) {
      return absl::UnavailableError(absl::StrFormat("%s: somebody has held this lock for %s", path,
                                                    absl::FormatDuration(patience)));
    }
    absl::SleepFor(kLockInterval);
  }
  return body();
}

// Whether the folder holds checkpoints, as one of a release that wrote no owner down does.
bool HoldsCheckpoints(const std::string& directory) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; it != end;
       it.increment(error)) {
    if (it->path().filename().string().starts_with("step-")) return true;
  }
  return false;
}

// A folder that no job has claimed: the export takes the place of whatever is called `model` there.
absl::Status MayBeginIn(const std::string& directory) {
  std::error_code error;
  const std::string model = absl::StrCat(directory, "/model");
  if (!std::filesystem::exists(model, error) || HoldsCheckpoints(directory)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "checkpoint.directory %s: %s is there and no job of this folder wrote it, and the job's "
      "export would take its place; choose another folder, or move it away",
      directory, model));
}

absl::Status MayClaim(const std::string& directory, const FolderOwner& owner,
                      const FolderOwner& recorded) {
  if (recorded.job != owner.job) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint.directory %s belongs to jobs/%s (%s)%s, not to jobs/%s; choose another folder, "
        "or remove %s/%s once that job is over for good",
        directory, recorded.job, recorded.uid,
        recorded.owner.empty() ? "" : " of " + recorded.owner, owner.job, directory, kOwnerName));
  }
  // A name is free for others once its job was deleted; the weights stay whose they are.
  if (recorded.uid != owner.uid && !recorded.owner.empty() && recorded.owner != owner.owner) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint.directory %s belongs to %s, whose jobs/%s (%s) had the name that this job has, "
        "which %s; choose another folder, or have %s remove %s/%s",
        directory, recorded.owner, recorded.job, recorded.uid,
        owner.owner.empty() ? "has no owner" : "is of " + owner.owner, recorded.owner, directory,
        kOwnerName));
  }
  const bool replaced =
      recorded.uid == owner.uid ? recorded.token > owner.token : recorded.token >= owner.token;
  return replaced ? Replaced(directory, owner, recorded) : absl::OkStatus();
}

}  // namespace

absl::Status ClaimDirectory(const std::string& directory, const FolderOwner& owner,
                            absl::Duration patience) {
  return WithLock(directory, patience, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const std::optional<FolderOwner> recorded, ReadOwner(directory));
    RETURN_IF_ERROR(recorded ? MayClaim(directory, owner, *recorded) : MayBeginIn(directory));
    return WriteFileAtomically(absl::StrCat(directory, "/", kOwnerName), OwnerText(owner));
  });
}

absl::Status ChangeAsOwner(const std::string& directory, const FolderOwner& owner,
                           absl::FunctionRef<absl::Status()> change, absl::Duration patience) {
  return WithLock(directory, patience, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const std::optional<FolderOwner> recorded, ReadOwner(directory));
    if (!recorded) {
      return absl::AbortedError(absl::StrFormat(
          "%s/%s is gone: nobody can tell whose folder this is, and nothing more is written",
          directory, kOwnerName));
    }
    if (recorded->uid != owner.uid || recorded->token != owner.token) {
      return Replaced(directory, owner, *recorded);
    }
    return change();
  });
}

std::string OwnerText(const FolderOwner& owner) {
  Json root = {{"format", kFormatName},
               {"version", kVersion},
               {"job", owner.job},
               {"uid", owner.uid},
               {"token", owner.token}};
  if (!owner.owner.empty()) root["owner"] = owner.owner;
  root[kChecksumKey] = ChecksumOf(root);
  return root.dump(1) + "\n";
}

absl::StatusOr<FolderOwner> ParseOwner(std::string_view text, const std::string& source) {
  const Json root = ParseJson(text);
  const auto damaged = [&] {
    return absl::DataLossError(absl::StrFormat(
        "%s is damaged; remove it once no trainer of the job runs, and the job goes on from its "
        "checkpoints",
        source));
  };
  if (root.is_discarded() || !root.is_object()) return damaged();
  try {
    if (root.at("format") != kFormatName || root.at(kChecksumKey) != ChecksumOf(root)) {
      return damaged();
    }
    if (root.at("version") > kVersion) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s: format version %d; this program reads up to %d: use a newer one",
                          source, root.at("version").get<uint64_t>(), kVersion));
    }
    return FolderOwner{.job = root.at("job"),
                       .uid = root.at("uid"),
                       .token = root.at("token"),
                       .owner = root.value("owner", "")};
  } catch (const Json::exception&) {
    return damaged();
  }
}

}  // namespace ringleader::checkpoint
