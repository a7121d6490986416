#include "worker/checkpoint/directory.h"

#include <cstdint>
#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "worker/checkpoint/shared_outcome.h"

namespace ringleader::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kProbePrefix[] = ".probe-";
constexpr absl::Duration kProbeInterval = absl::Milliseconds(100);

uint64_t RandomToken() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

// Named after its token, so that nobody has looked for it before: network file systems remember for
// a while which names were not there.
std::string ProbePath(const std::string& directory, uint64_t token) {
  return absl::StrFormat("%s/%s%016x", directory, kProbePrefix, token);
}

std::string ProbeText(uint64_t token) {
  return absl::StrFormat("%016x", token);
}

absl::Status WriteProbe(const std::string& directory, uint64_t token, int rank) {
  std::error_code error;
  fs::create_directories(directory, error);
  absl::Status status = error ? FileError(error.value(), directory)
                              : WriteFileAtomically(ProbePath(directory, token), ProbeText(token));
  if (status.ok() || absl::IsResourceExhausted(status)) return status;
  return absl::UnavailableError(
      absl::StrFormat("checkpoint.directory cannot be written by rank %d (%s); choose a folder "
                      "that every node reaches and may write",
                      rank, status.message()));
}

// Looks once more when the time is up, and at least once.
absl::Status AwaitProbe(const std::string& directory, uint64_t token, int rank,
                        absl::Duration patience) {
  const std::string path = ProbePath(directory, token);
  const absl::Time deadline = BootNow() + patience;
  while (true) {
    const bool last = BootNow() >= deadline;
    const absl::StatusOr<std::string> text = ReadFile(path);
    if (text.ok() && *text == ProbeText(token)) return absl::OkStatus();
    if (last) {
      return absl::UnavailableError(absl::StrFormat(
          "checkpoint.directory %s is another folder for rank %d than for rank 0; mount the same "
          "storage at this path on every node (what rank 0 wrote there: %s)",
          directory, rank, text.ok() ? "has other content" : text.status().message()));
    }
    absl::SleepFor(kProbeInterval);
  }
}

// Removes the probes of all attempts, those that died included.
void RemoveAllProbes(const std::string& directory) {
  std::error_code ignored;
  std::vector<fs::path> probes;
  for (fs::directory_iterator it(directory, ignored), end; it != end; it.increment(ignored)) {
    if (it->path().filename().string().starts_with(kProbePrefix)) probes.push_back(it->path());
  }
  for (const fs::path& probe : probes) fs::remove(probe, ignored);
}

}  // namespace

absl::Status CheckDirectory(const std::string& directory, comm::Communicator& comm,
                            absl::Duration patience) {
  const uint64_t own = RandomToken();
  const absl::Cleanup remove_own = [&] {
    std::error_code ignored;
    fs::remove(ProbePath(directory, own), ignored);
  };
  ASSIGN_OR_RETURN(const std::vector<uint64_t> tokens,
                   Agree(comm, WriteProbe(directory, own, comm.rank()), own));
  RETURN_IF_ERROR(Agree(comm, AwaitProbe(directory, tokens[0], comm.rank(), patience)).status());
  // Everybody has read what it had to.
  if (comm.rank() == 0) RemoveAllProbes(directory);
  return absl::OkStatus();
}

}  // namespace ringleader::checkpoint
