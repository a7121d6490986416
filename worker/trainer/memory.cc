#include "worker/trainer/memory.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/str_format.h"

namespace ringleader::trainer {
namespace {

// "Key:   123 kB" in a file of /proc, in bytes; 0 if it is not there.
uint64_t ReadKilobytes(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    uint64_t kilobytes = 0;
    if (word == key && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

uint64_t ReadNumber(const char* path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : otherwise;  // "max" is no number
}

}  // namespace

MemoryEstimate EstimateMemory(const model::ModelConfig& config,
                              const model::ParameterLayout& layout, int world_size,
                              uint64_t local_tokens, bool recompute) {
  const auto hidden = static_cast<uint64_t>(config.hidden_size);
  const auto inner = static_cast<uint64_t>(config.intermediate_size);
  const auto query = static_cast<uint64_t>(config.heads * config.head_dim);
  const auto key_value = static_cast<uint64_t>(2 * config.kv_heads * config.head_dim);
  // Per token and layer: its input, q, k, v and attention's output; unless recomputed also what
  // follows attention.
  const uint64_t kept =
      hidden + query + key_value + query + (recompute ? 0 : 2 * hidden + 2 * inner);
  // Backward of one layer: gradients of all of the above and the MLP's product; travelling keys,
  // values and theirs.
  const uint64_t in_flight = 4 * hidden + 2 * query + 5 * inner + 6 * key_value;
  const auto padded = static_cast<uint64_t>(layout.PaddedElements(world_size));
  return {.parameters = 2 * padded * sizeof(float),
          .optimizer = 4 * static_cast<uint64_t>(layout.ShardElements(world_size)) * sizeof(float),
          .activations = local_tokens * config.layers * kept * sizeof(float),
          .working = local_tokens * in_flight * sizeof(float)};
}

absl::StatusOr<bool> ChooseRecompute(const model::ModelConfig& config,
                                     const model::ParameterLayout& layout, int world_size,
                                     uint64_t local_tokens, uint64_t available) {
  for (const bool recompute : {false, true}) {
    const MemoryEstimate need = EstimateMemory(config, layout, world_size, local_tokens, recompute);
    if (need.total() <= available) return recompute;
  }
  const MemoryEstimate need = EstimateMemory(config, layout, world_size, local_tokens, true);
  return absl::FailedPreconditionError(absl::StrFormat(
      "the job does not fit: a rank needs %s (weights and gradients %s, optimizer %s, activations "
      "of %d tokens %s, working space %s) and has %s; use more trainers on more nodes, a shorter "
      "data.sequence_length or a smaller model",
      FormatBytes(need.total()), FormatBytes(need.parameters), FormatBytes(need.optimizer),
      local_tokens, FormatBytes(need.activations), FormatBytes(need.working),
      FormatBytes(available)));
}

absl::StatusOr<uint64_t> AvailableMemoryBytes() {
  const uint64_t machine = ReadKilobytes("/proc/meminfo", "MemAvailable:");
  if (machine == 0) return absl::UnavailableError("cannot read MemAvailable of /proc/meminfo");
  const uint64_t limit = ReadNumber("/sys/fs/cgroup/memory.max", UINT64_MAX);
  const uint64_t used = ReadNumber("/sys/fs/cgroup/memory.current", 0);
  return std::min(machine, limit - std::min(limit, used));
}

uint64_t PeakMemoryBytes() {
  return ReadKilobytes("/proc/self/status", "VmHWM:");
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return absl::StrFormat(unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
}

}  // namespace ringleader::trainer
