#include "bench/longca/python_peers.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace ringleader::bench {
namespace {

using Arguments = std::vector<std::string>;

// What this program was pointed to for its own libraries is not for PyTorch's.
std::vector<char*> EnvironmentWithoutLibraries() {
  std::vector<char*> kept;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!absl::StartsWith(*variable, "LD_LIBRARY_PATH=")) kept.push_back(*variable);
  }
  kept.push_back(nullptr);
  return kept;
}

// Returns whether it ended with exit code 0.
absl::StatusOr<bool> RunProgram(Arguments arguments) {
  std::vector<char*> raw;
  raw.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  std::fflush(stdout);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, raw.front(), nullptr, nullptr, raw.data(),
                                 EnvironmentWithoutLibraries().data());
  if (error != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "cannot start %s: %s; --python names a python3", arguments.front(), std::strerror(error)));
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return absl::InternalError(absl::StrCat("waitpid: ", std::strerror(errno)));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

template <typename T>
void Append(const char* option, const std::vector<T>& values, Arguments* arguments) {
  arguments->emplace_back(option);
  for (const T& value : values) arguments->push_back(absl::StrCat(value));
}

}  // namespace

absl::StatusOr<PythonPeers> PythonPeers::Find(const std::string& python) {
  std::error_code error;
  const std::filesystem::path own =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  // In a bundle, a checkout and a package.
  const std::filesystem::path folders[] = {own / "../bench/longca", own / "../../bench/longca",
                                           own / "../share/ringleader/bench/longca"};
  const auto* const programs =
      std::ranges::find_if(folders, [&](const std::filesystem::path& folder) {
        return std::filesystem::exists(folder / "masks/main.py", error);
      });
  if (programs == std::end(folders)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--peers: no masks/main.py in ",
                     absl::StrJoin(folders, ", ",
                                   [](std::string* out, const std::filesystem::path& folder) {
                                     absl::StrAppend(out, folder.lexically_normal().string());
                                   }),
                     "; run it from a checkout, a bundle or a package, or leave --peers out"));
  }
  ASSIGN_OR_RETURN(const bool has_kernels,
                   RunProgram({python, "-c", "import torch, ringleader.kernels"}));
  if (!has_kernels) {
    return absl::FailedPreconditionError(
        absl::StrCat("--peers: ", python,
                     " cannot import torch and ringleader.kernels: install the wheel of "
                     "deploy/python_kernels.sh, or name another with --python"));
  }
  return PythonPeers(python, *programs);
}

absl::StatusOr<int> PythonPeers::Run(const BenchOptions& options, bool on_gpus, int gpus) const {
  const std::string device = on_gpus ? "cuda" : "cpu";
  const std::filesystem::path folder = options.folder;
  Arguments masks = {python_,    programs_ / "masks/main.py",
                     "--folder", folder,
                     "--device", device,
                     "--commit", options.commit};
  Append("--tokens", options.tokens, &masks);
  std::vector<std::string> names;
  for (const kernels::MaskKind mask : options.masks) names.emplace_back(kernels::MaskName(mask));
  Append("--masks", names, &masks);
  Append("--choices", options.densities, &masks);
  masks.emplace_back("all");
  if (!options.lengths_file.empty()) Append("--lengths", std::vector{options.lengths_file}, &masks);
  ASSIGN_OR_RETURN(const bool has_masks, RunProgram(masks));
  int failed = has_masks ? 0 : 1;

  std::vector<int> ranks = options.ranks;
  std::erase_if(ranks, [&](int count) { return count < 2 || (on_gpus && count > gpus); });
  std::erase_if(names, [](const std::string& name) { return name != "full" && name != "causal"; });
  if (ranks.empty() || names.empty()) {
    std::printf(
        "PyTorch's ring attention was not run: it takes several ranks, a GPU for each, and the "
        "masks full and causal\n");
    return failed;
  }
  const std::string most = absl::StrCat(std::ranges::max(ranks));
  Arguments rings = {python_,
                     "-m",
                     "torch.distributed.run",
                     "--standalone",
                     "--nproc-per-node",
                     most,
                     programs_ / "rings/peers.py",
                     "--device",
                     device,
                     "--repetitions",
                     absl::StrCat(options.repetitions),
                     "--commit",
                     options.commit,
                     "--csv",
                     folder / "longca_ring_peers.csv",
                     "--beside",
                     folder / (on_gpus ? "longca_gpu_rings.csv" : "longca_rings.csv")};
  if (!on_gpus) {
    for (const char* argument : {"--heads", "4", "4", "--head-dim", "64"}) {
      rings.emplace_back(argument);
    }
  }
  Append(options.are_tokens_per_rank ? "--tokens-per-gpu" : "--tokens", options.tokens, &rings);
  Append("--masks", names, &rings);
  ASSIGN_OR_RETURN(const bool has_rings, RunProgram(rings));
  return failed + (has_rings ? 0 : 1);
}

}  // namespace ringleader::bench
