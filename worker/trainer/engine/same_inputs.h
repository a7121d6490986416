// Whether all ranks of a job read the same: each opens data and weights on its own node.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"

namespace ringleader::trainer {

// What a rank found in a place that the job names.
struct Input {
  std::string field;    // of the job file
  std::string place;    // its value
  uint64_t digest = 0;  // of what lies there
};

// Collective. FAILED_PRECONDITION, on all ranks alike, names the first of `inputs`, which all ranks
// have in the same order, and the first rank that found something else there than rank 0.
absl::Status CheckSameInputs(std::span<const Input> inputs, comm::Communicator& world);

// Digests a folder of weights (model.init) without reading all of it: names and sizes of the files
// that hold them (model::WeightFiles), their headers, and samples of what follows. "random" is 0.
// Errors name the file; DATA_LOSS: it got shorter meanwhile.
absl::StatusOr<uint64_t> DigestOfWeights(const std::string& folder);

}  // namespace ringleader::trainer
