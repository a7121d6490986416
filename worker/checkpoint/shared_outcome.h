// Outcomes that all ranks must share: a step that failed on one of them failed on all.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"

namespace ringleader::checkpoint {

// Every rank brings its outcome and a number; all get either every rank's number, or the failure of
// the lowest rank that failed. Messages are cut after a few hundred characters.
absl::StatusOr<std::vector<uint64_t>> Agree(comm::Communicator& comm, const absl::Status& mine,
                                            uint64_t number = 0);

// rank 0's text, on all ranks.
absl::StatusOr<std::string> ShareText(comm::Communicator& comm, const std::string& text);

}  // namespace ringleader::checkpoint
