#include "worker/checkpoint/checkpointer.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/process/progress.h"
#include "base/status_macros.h"
#include "worker/checkpoint/format.h"
#include "worker/checkpoint/shared_outcome.h"

namespace ringleader::checkpoint {
namespace {

namespace fs = std::filesystem;

// Names that ListCheckpoints does not see.
constexpr char kPartialSuffix[] = ".partial";
constexpr char kRemovedSuffix[] = ".removed";
constexpr char kExportPrefix[] = ".model.";

absl::Status CreateEmptyFolder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (!error) fs::create_directories(path, error);
  return error ? FileError(error.value(), "create folder " + path) : absl::OkStatus();
}

// Removes what an attempt that died left there.
void RemoveLeftovers(const std::string& directory) {
  std::error_code ignored;
  std::vector<fs::path> leftovers;
  for (fs::directory_iterator it(directory, ignored), end; it != end; it.increment(ignored)) {
    const std::string name = it->path().filename();
    if (name.starts_with(kExportPrefix) ||
        (name.starts_with(".step-") &&
         (name.ends_with(kPartialSuffix) || name.ends_with(kRemovedSuffix)))) {
      leftovers.push_back(it->path());
    }
  }
  for (const fs::path& path : leftovers) fs::remove_all(path, ignored);
}

// Names of the checkpoints in `directory` that are later than the one `resumed_from`.
std::set<std::string> LaterThan(const std::string& resumed_from, const std::string& directory) {
  std::set<std::string> later;
  ParsedName from, other;
  if (!ParseCheckpointName(fs::path(resumed_from).filename().string(), from)) return later;
  // Publish reports a folder that cannot be listed.
  for (const std::string& name : ListCheckpoints(directory).value_or(std::vector<std::string>())) {
    if (ParseCheckpointName(name, other) && other > from) later.insert(name);
  }
  return later;
}

// Hidden first, so that a crash on the way never leaves half a checkpoint under its name.
void RemoveCheckpoint(const std::string& directory, const std::string& name) {
  const std::string hidden = absl::StrCat(directory, "/.", name, kRemovedSuffix);
  std::error_code ignored;
  fs::remove_all(hidden, ignored);
  if (RenameDurably(absl::StrCat(directory, "/", name), hidden).ok())
    fs::remove_all(hidden, ignored);
}

absl::StatusOr<optim::OptimizerShard> Take(optim::ShardSource source) {
  try {
    return std::move(source)();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "no host memory for a copy of the optimizer's state; fewer trainers a node need less");
  }
}

}  // namespace

Checkpointer::Checkpointer(CheckpointerOptions options, const model::ParameterLayout& layout,
                           std::unique_ptr<comm::Communicator> comm, SavedCallback on_saved)
    : options_(std::move(options)),
      layout_(layout),
      comm_(std::move(comm)),
      on_saved_(std::move(on_saved)) {
  if (comm_->rank() == 0) {
    // What cannot be removed now waits for a later attempt.
    ChangeAsOwner(options_.directory, options_.owner, [this] {
      RemoveLeftovers(options_.directory);
      return absl::OkStatus();
    }).IgnoreError();
    damaged_ = LaterThan(options_.resumed_from, options_.directory);
  }
  writer_ = std::thread([this] { WriterLoop(); });
}

Checkpointer::~Checkpointer() {
  // A save that is pending or under way is finished first.
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  writer_.join();
}

void Checkpointer::Save(optim::ShardSource shard, int64_t elements, const TrainingState& state) {
  absl::MutexLock lock(&mutex_);
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !pending_ && !writing_; };
  mutex_.Await(absl::Condition(&idle));
  pending_ = Snapshot{.shard = std::move(shard), .elements = elements, .state = state};
}

absl::Status Checkpointer::Wait() {
  absl::MutexLock lock(&mutex_);
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !pending_ && !writing_; };
  mutex_.Await(absl::Condition(&idle));
  return last_;
}

void Checkpointer::WriterLoop() {
  while (true) {
    Snapshot snapshot;
    {
      absl::MutexLock lock(&mutex_);
      const auto work = [this]()
                            ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return pending_ || stopping_; };
      mutex_.Await(absl::Condition(&work));
      if (!pending_) return;
      snapshot = *std::move(pending_);
      pending_.reset();
      writing_ = true;
    }
    const absl::StatusOr<std::string> path = Write(snapshot);
    // The callback comes before `writing_` falls: whoever waits for that must find it done.
    if (comm_->rank() == 0) on_saved_(snapshot.state.step, path);
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    last_ = path.status();
  }
}

absl::StatusOr<std::string> Checkpointer::Write(Snapshot& snapshot) {
  // First of all: training waits for it.
  const absl::StatusOr<optim::OptimizerShard> shard = Take(std::move(snapshot.shard));
  // Every rank takes part in every agreement, whatever failed before: none may be left waiting.
  const bool first = comm_->rank() == 0;
  // Named after the attempt, too: one that was replaced and does not know it yet may write still.
  const std::string partial =
      absl::StrCat(options_.directory, "/.", CheckpointName(snapshot.state.step, 0), ".token-",
                   options_.owner.token, kPartialSuffix);
  RETURN_IF_ERROR(Agree(*comm_, first ? CreateEmptyFolder(partial) : absl::OkStatus()).status());

  CheckpointInfo info;
  info.state = snapshot.state;
  // All ranks' ranges follow from this one's: shards are of one size, the last ones cut at the
  // model's end.
  const int64_t shard_elements = snapshot.elements;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const int64_t begin = std::min(rank * shard_elements, layout_.elements);
    const int64_t end = std::min(begin + shard_elements, layout_.elements);
    info.shards.push_back(
        {.name = ShardName(rank, comm_->size()), .begin = begin, .elements = end - begin});
  }
  const ShardFile& own = info.shards[comm_->rank()];
  const absl::StatusOr<uint64_t> written =
      shard.ok() ? WriteShardFile(absl::StrCat(partial, "/", own.name), *shard, own.elements)
                 : shard.status();
  absl::StatusOr<std::vector<uint64_t>> checksums;
  {
    const Progress::Waiting for_other_ranks;  // which may have slower disks
    checksums = Agree(*comm_, written.status(), written.value_or(0));
  }

  absl::StatusOr<std::string> published = std::string();
  if (!checksums.ok()) {
    published = checksums.status();
  } else if (first) {
    for (size_t i = 0; i < info.shards.size(); ++i) info.shards[i].checksum = (*checksums)[i];
    absl::Status status =
        WriteFileAtomically(absl::StrCat(partial, "/", kManifestName), ManifestText(info, layout_));
    if (status.ok()) {
      status = ChangeAsOwner(options_.directory, options_.owner, [&] {
        published = Publish(partial, info.state.step);
        return published.status();
      });
    }
    if (!status.ok()) published = std::move(status);
  }
  if (first && !published.ok()) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);  // gives a full disk its space back
  }
  RETURN_IF_ERROR(checksums.status());
  RETURN_IF_ERROR(Agree(*comm_, first ? published.status() : absl::OkStatus()).status());
  return ShareText(*comm_, first ? *published : "");
}

absl::StatusOr<std::string> Checkpointer::Publish(const std::string& partial, uint64_t step) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListCheckpoints(options_.directory));
  // A folder cannot be renamed over another; a step saved before gets the next generation.
  ParsedName own{.step = step, .generation = 0};
  ParsedName other;
  for (const std::string& name : names) {
    if (ParseCheckpointName(name, other) && other.step == step) {
      own.generation = std::max(own.generation, other.generation + 1);
    }
  }
  const std::string path =
      absl::StrCat(options_.directory, "/", CheckpointName(own.step, own.generation));
  RETURN_IF_ERROR(RenameDurably(partial, path));

  // The new one and the keep_last - 1 whole ones before it stay. Damaged ones are left for a person
  // to look at until training gets past their step; a later attempt, which resumes from beyond
  // them, would take them for whole.
  int kept = 1;
  for (const std::string& name : names) {
    if (!ParseCheckpointName(name, other) || other > own) continue;
    if (damaged_.contains(name) || ++kept > options_.keep_last) {
      RemoveCheckpoint(options_.directory, name);
    }
  }
  return path;
}

}  // namespace ringleader::checkpoint
