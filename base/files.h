// Files that survive a crash.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringleader {

// What became of a call on a file, as absl::ErrnoToStatus says it; but UNAVAILABLE, and not
// ABORTED, where its server has forgotten it for the moment (ESTALE) or a lock would never come
// (EDEADLK).
absl::Status FileError(int error, absl::string_view what);

// Writes `pieces` one after the other to a temporary file beside `path`, syncs it, renames it to
// `path` and syncs the folder: afterwards `path` holds all of it, or what it held before.
// RESOURCE_EXHAUSTED when the disk is full; errors name the file.
absl::Status WriteFileAtomically(const std::string& path,
                                 std::initializer_list<std::span<const std::byte>> pieces);
absl::Status WriteFileAtomically(const std::string& path,
                                 std::span<const std::span<const std::byte>> pieces);
absl::Status WriteFileAtomically(const std::string& path, const std::string& text);

// Renames a file or folder within one file system and syncs the folder of `to`. An existing file is
// replaced; a folder in the way must be empty.
absl::Status RenameDurably(const std::string& from, const std::string& to);

// Puts the folder `fresh` in the place of `target`, beside it. An earlier `target` steps aside
// first (".NAME.replaced"), for a folder that is not empty cannot be renamed over, and is then
// removed.
absl::Status ReplaceFolder(const std::string& fresh, const std::string& target);

// All of it, or an error.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// The same of a file that somebody else named: a regular file of at most `max_bytes`, or else
// INVALID_ARGUMENT says what it is; NOT_FOUND if the path leads to none. A pipe or a device is
// refused without waiting for its other end; a file on a mount whose server is gone still blocks
// (base/process/time_limit.h).
absl::StatusOr<std::string> ReadRegularFile(const std::string& path, size_t max_bytes);

enum class Pipe { kRefused, kRead };

// The same of what somebody named by `flag` ("--measured"), with which errors begin. Pipe::kRead: a
// pipe will do, such as `<(command)` or /dev/stdin, and is read to its end; to one that nobody
// writes into that is its beginning.
absl::StatusOr<std::string> ReadFlagFile(absl::string_view flag, const std::string& path,
                                         size_t max_bytes, Pipe pipe = Pipe::kRefused);

}  // namespace ringleader
