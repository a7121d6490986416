// What a checkpoint holds, and reading it back. The format, docs/formats.md, does not depend on the
// number of ranks: a checkpoint is a folder of shards that together cover the flat parameter space,
// and a manifest, written last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/parameter_layout.h"
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
};

struct CheckpointInfo {
  std::string path;
  TrainingState state;
};

// The newest checkpoint in `directory` whose files are all whole. NOT_FOUND if there is none.
// Damaged newer ones are passed over; what is wrong with each goes to `problems` (one sentence,
// naming the file).
absl::StatusOr<CheckpointInfo> FindNewestCheckpoint(const std::string& directory,
                                                    const model::ParameterLayout& layout,
                                                    std::vector<std::string>* problems);

// Reads elements [begin, begin + elements) of the flat space; what lies past the layout's end
// becomes 0. Any number of ranks may read at once. DATA_LOSS names a damaged file;
// FAILED_PRECONDITION if the checkpoint is of another model.
absl::StatusOr<optim::OptimizerShard> ReadShard(const CheckpointInfo& checkpoint,
                                                const model::ParameterLayout& layout, int64_t begin,
                                                int64_t elements);

}  // namespace ringleader::checkpoint
