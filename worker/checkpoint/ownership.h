// Who may change a checkpoint folder: one job, by the newest of its attempts.
//
// The file owner.json (docs/formats.md) names the job, whose it is, and the fencing token of its
// newest attempt.
// It is read and written under a lock that all nodes see, and so is every change of what the folder
// holds: an attempt that was replaced, however late it wakes up, changes nothing any more.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ringleader::checkpoint {

struct FolderOwner {
  std::string job;     // its id: a name that another job may have later
  std::string uid;     // that no other job ever has
  uint64_t token = 0;  // fencing token of the attempt; grows over a coordinator's lifetime
  std::string owner =
      {};  // who submitted the job; empty: nobody knows, as where there are no roles
};

// Makes `owner` the owner of `directory`, which exists. ABORTED if an attempt with a newer token
// has owned it; FAILED_PRECONDITION if a job of another name does, or another one of the name that
// is somebody else's, or if the storage has no locks. (An earlier job of the same name is gone: a
// coordinator gives a name again only when nothing runs under it.) DATA_LOSS if owner.json is
// damaged, UNAVAILABLE if somebody held the lock for all of `patience`.
absl::Status ClaimDirectory(const std::string& directory, const FolderOwner& owner,
                            absl::Duration patience = absl::Minutes(1));

// Makes a change while nobody can claim the folder. ABORTED, and no change, if the folder is no
// longer `owner`'s; otherwise what `change` returns, or as above.
absl::Status ChangeAsOwner(const std::string& directory, const FolderOwner& owner,
                           absl::FunctionRef<absl::Status()> change,
                           absl::Duration patience = absl::Minutes(1));

// The contents of owner.json. DATA_LOSS names `source`, FAILED_PRECONDITION says that it is of a
// newer version.
std::string OwnerText(const FolderOwner& owner);
absl::StatusOr<FolderOwner> ParseOwner(std::string_view text, const std::string& source);

}  // namespace ringleader::checkpoint
