#include "worker/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/files.h"
#include "base/process/progress.h"
#include "base/status_macros.h"
#include "worker/checkpoint/format.h"
#include "worker/checkpoint/shared_outcome.h"

namespace ringleader::checkpoint {
namespace {

// Of the parameters of ten thousand layers, and of a file for each of as many ranks.
constexpr size_t kMaxManifestBytes = size_t{256} << 20;

// Why a manifest is not read. One that is missing or no file is that of a damaged checkpoint;
// another error says nothing of the checkpoint.
absl::Status OfManifest(const absl::Status& error) {
  return absl::IsNotFound(error) || absl::IsInvalidArgument(error)
             ? absl::DataLossError(error.message())
             : absl::UnavailableError(error.message());
}

// Rank 0 reads the manifest for all: a folder must not look different to two ranks.
absl::StatusOr<CheckpointInfo> OpenCheckpoint(const std::string& path,
                                              const model::ParameterLayout& layout,
                                              comm::Communicator& comm) {
  const std::string manifest = absl::StrCat(path, "/", kManifestName);
  absl::StatusOr<std::string> text = std::string();
  if (comm.rank() == 0) text = ReadRegularFile(manifest, kMaxManifestBytes);
  RETURN_IF_ERROR(Agree(comm, text.ok() ? absl::OkStatus() : OfManifest(text.status())).status());
  ASSIGN_OR_RETURN(const std::string shared, ShareText(comm, *text));
  ASSIGN_OR_RETURN(CheckpointInfo checkpoint, ParseManifest(shared, layout, manifest));
  checkpoint.path = path;
  // A folder that was renamed would have steps trained again, or left out.
  ParsedName name;
  if (ParseCheckpointName(std::filesystem::path(path).filename().string(), name) &&
      name.step != checkpoint.state.step) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: of step %d, in a folder named after step %d; give the folder its name, %s, or move it "
        "out of checkpoint.directory",
        manifest, checkpoint.state.step, name.step,
        CheckpointName(checkpoint.state.step, name.generation)));
  }

  // Files are dealt round: each is read once, by one rank.
  absl::Status whole;
  for (size_t i = comm.rank(); i < checkpoint.shards.size() && whole.ok(); i += comm.size()) {
    whole = VerifyShardFile(path, checkpoint.shards[i]);
  }
  const Progress::Waiting for_other_ranks;  // whose files may be larger
  RETURN_IF_ERROR(Agree(comm, whole).status());
  return checkpoint;
}

}  // namespace

absl::StatusOr<std::optional<CheckpointInfo>> FindNewestCheckpoint(
    const std::string& directory, const model::ParameterLayout& layout, comm::Communicator& comm,
    std::vector<std::string>* problems) {
  absl::StatusOr<std::vector<std::string>> own = std::vector<std::string>();
  if (comm.rank() == 0) own = ListCheckpoints(directory);
  RETURN_IF_ERROR(Agree(comm, own.status()).status());
  ASSIGN_OR_RETURN(const std::string joined, ShareText(comm, absl::StrJoin(*own, "\n")));
  const std::vector<std::string> names = absl::StrSplit(joined, '\n', absl::SkipEmpty());
  for (const std::string& name : names) {
    absl::StatusOr<CheckpointInfo> checkpoint =
        OpenCheckpoint(absl::StrCat(directory, "/", name), layout, comm);
    if (checkpoint.ok()) return std::optional(*std::move(checkpoint));
    // Another model, a newer version, a lost peer: an older checkpoint would not help.
    if (!absl::IsDataLoss(checkpoint.status())) return checkpoint.status();
    problems->emplace_back(checkpoint.status().message());
  }
  return std::nullopt;
}

absl::StatusOr<optim::OptimizerShard> ReadShard(const CheckpointInfo& checkpoint, int64_t begin,
                                                int64_t elements) {
  optim::OptimizerShard shard{.begin = begin,
                              .master = std::vector<float>(elements),
                              .first_moment = std::vector<float>(elements),
                              .second_moment = std::vector<float>(elements)};
  // The ranges that were written and the one that is wanted need not have a border in common.
  for (const ShardFile& file : checkpoint.shards) {
    const int64_t from = std::max(begin, file.begin);
    const int64_t to = std::min(begin + elements, file.begin + file.elements);
    if (from >= to) continue;
    RETURN_IF_ERROR(ReadShardRange(checkpoint.path, file, from, to - from, shard));
  }
  return shard;
}

}  // namespace ringleader::checkpoint
