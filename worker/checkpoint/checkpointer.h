// Saves checkpoints in the background while training goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "model_shape/parameter_layout.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/ownership.h"
#include "worker/comm/communicator.h"
#include "worker/optim/adamw.h"

namespace ringleader::checkpoint {

struct CheckpointerOptions {
  std::string directory;  // the same folder for all ranks, on storage that all nodes see
  int keep_last = 2;      // whole checkpoints to keep, at least 1
  // Who claimed the folder (ClaimDirectory): nothing is published, or removed, once it is
  // another's.
  FolderOwner owner = {};
  // The folder of the checkpoint that this run goes on from; empty if from none. Later ones that
  // are there already are damaged, or it would be one of them: they take no place of keep_last's,
  // and are removed once a checkpoint of their step or a later one is saved.
  std::string resumed_from = {};
};

// All ranks make the same calls in the same order. Calls come from one thread; `on_saved` runs on
// the writer's.
class Checkpointer {
 public:
  // Called on rank 0 when a checkpoint is durable, or could not be saved (training may go on:
  // earlier ones are kept).
  using SavedCallback = std::function<void(uint64_t step, const absl::StatusOr<std::string>& path)>;

  // `comm` is this object's own (Communicator::Split over all ranks): the writer threads agree on
  // it.
  Checkpointer(CheckpointerOptions options, const model::ParameterLayout& layout,
               std::unique_ptr<comm::Communicator> comm, SavedCallback on_saved);
  // Waits for the save under way; abort the communicator first to give up.
  ~Checkpointer();

  // Returns at once; a writer thread takes this rank's shard, of `elements` padding included, from
  // `shard` and does the rest. Blocks while an earlier save is under way.
  void Save(optim::ShardSource shard, int64_t elements, const TrainingState& state);

  // Waits for the save under way, if any. The result of the last save on this rank; ABORTED if a
  // newer attempt has the folder: this one is over.
  absl::Status Wait();

 private:
  struct Snapshot {
    optim::ShardSource shard;
    int64_t elements = 0;
    TrainingState state;
  };

  void WriterLoop();
  // One save, together with the other ranks' writers; the same result on all of them.
  absl::StatusOr<std::string> Write(Snapshot& snapshot);
  // Rank 0, as the folder's owner: names the finished checkpoint and removes what keep_last allows.
  absl::StatusOr<std::string> Publish(const std::string& partial, uint64_t step);

  const CheckpointerOptions options_;
  const model::ParameterLayout layout_;
  const std::unique_ptr<comm::Communicator> comm_;
  const SavedCallback on_saved_;
  std::set<std::string> damaged_;  // names that resuming passed over; only rank 0's writer reads it

  absl::Mutex mutex_;
  std::optional<Snapshot> pending_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status last_ ABSL_GUARDED_BY(mutex_);
  std::thread writer_;
};

}  // namespace ringleader::checkpoint
