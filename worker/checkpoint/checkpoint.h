// What a checkpoint holds, and reading it back. The format, docs/formats.md, does not depend on the
// number of ranks: a checkpoint is a folder of shards that together cover the flat parameter space,
// and a manifest, written last.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model_shape/parameter_layout.h"
#include "patterns/index/head_budgets.h"
#include "worker/comm/communicator.h"
#include "worker/optim/adamw.h"

namespace ringleader::checkpoint {

// Everything but tensors that a run needs to go on as if it had not stopped.
struct TrainingState {
  uint64_t step = 0;           // steps done
  uint64_t updates = 0;        // optimizer updates among them
  uint64_t skipped_steps = 0;  // in a row, up to now
  uint64_t tokens = 0;         // trained on so far
  uint64_t data_position = 0;  // sequences taken from the training set
  uint64_t seed = 0;
  std::string job_digest;  // of the job spec that trained it
  std::string plan = {};   // a serialized StepPlan: that in force; empty: of an earlier release
  // Of each layer, where heads' budgets follow the probe; empty: before the first, or of an earlier
  // release.
  std::vector<patterns::LayerBudgets> head_budgets = {};
};

// One rank's file in a checkpoint.
struct ShardFile {
  std::string name;
  int64_t begin = 0;     // elements of the flat parameter space
  int64_t elements = 0;  // without padding past the end
  uint64_t checksum = 0;
};

struct CheckpointInfo {
  std::string path;  // the folder
  TrainingState state;
  std::vector<ShardFile> shards;  // by rising begin, covering the space without gap or overlap
};

// The newest checkpoint in `directory` whose files are all whole; nullopt if there is none. All
// ranks of `comm` call this and get the same answer; they share the work of reading and checking
// every file. Damaged newer checkpoints are passed over; what is wrong with each goes to `problems`
// (one sentence, naming the file). FAILED_PRECONDITION if the newest readable one is of another
// model, written by a newer version of the format, or in a folder of another step's name.
// UNAVAILABLE if a file that is there cannot be read: nobody knows whether it is whole, and an
// older checkpoint may not take its place.
absl::StatusOr<std::optional<CheckpointInfo>> FindNewestCheckpoint(
    const std::string& directory, const model::ParameterLayout& layout, comm::Communicator& comm,
    std::vector<std::string>* problems);

// Reads elements [begin, begin + elements) of the flat space; what lies past its end becomes 0. The
// number of ranks that wrote the checkpoint does not matter. DATA_LOSS names a file that is not as
// FindNewestCheckpoint saw it, UNAVAILABLE one that cannot be read.
absl::StatusOr<optim::OptimizerShard> ReadShard(const CheckpointInfo& checkpoint, int64_t begin,
                                                int64_t elements);

}  // namespace ringleader::checkpoint
