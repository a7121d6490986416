// The files of a checkpoint: shard and manifest. docs/formats.md describes them byte by byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/checkpoint/checkpoint.h"

namespace ringleader::checkpoint {

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr char kManifestName[] = "manifest.json";

std::string ShardName(int rank, int ranks);  // shard-00000-of-00004.bin

// Writes elements [0, elements) of the shard durably; returns the checksum of the file.
absl::StatusOr<uint64_t> WriteShardFile(const std::string& path, const optim::OptimizerShard& shard,
                                        int64_t elements);

// Reads all of the file. DATA_LOSS, naming it, unless it is what `expected` says; UNAVAILABLE if it
// is there and cannot be read.
absl::Status VerifyShardFile(const std::string& folder, const ShardFile& expected);

// Copies elements [begin, begin + elements), which the file must hold, to the same place of `out`.
absl::Status ReadShardRange(const std::string& folder, const ShardFile& file, int64_t begin,
                            int64_t elements, optim::OptimizerShard& out);

std::string ManifestText(const CheckpointInfo& checkpoint, const model::ParameterLayout& layout);

// DATA_LOSS if `text` is damaged, FAILED_PRECONDITION if it is of another model or a newer version;
// messages start with `source`. `path` of the result is left empty.
absl::StatusOr<CheckpointInfo> ParseManifest(std::string_view text,
                                             const model::ParameterLayout& layout,
                                             const std::string& source);

// Names of the checkpoints in `directory` (complete or damaged, never those still being written),
// newest first.
absl::StatusOr<std::vector<std::string>> ListCheckpoints(const std::string& directory);

// step-0000000010, or step-0000000010.1 if that step was saved before (a run that resumed from an
// earlier one).
std::string CheckpointName(uint64_t step, uint64_t generation);

struct ParsedName {
  uint64_t step = 0, generation = 0;
  // NOLINTNEXTLINE(modernize-use-nullptr): the comparison is not with a pointer.
  auto operator<=>(const ParsedName&) const = default;
};
// False if `name` is not a checkpoint's.
bool ParseCheckpointName(std::string_view name, ParsedName& parsed);

}  // namespace ringleader::checkpoint
