// The folder that all ranks of a job save into.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace ringleader::checkpoint {

// Collective: creates `directory` and finds out whether all ranks can write into it and whether it
// is the same folder for all of them. Each rank gives its own job's. UNAVAILABLE names
// checkpoint.directory, the first rank that has it otherwise and what to change, for its node may
// have lost a mount that others have; RESOURCE_EXHAUSTED if the disk is full. A rank waits for what
// rank 0 wrote to appear for as long as `patience`: network file systems may show it late.
absl::Status CheckDirectory(const std::string& directory, comm::Communicator& comm,
                            absl::Duration patience = absl::Seconds(10));

}  // namespace ringleader::checkpoint
