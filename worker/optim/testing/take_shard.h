// A rank's shard at once, for tests that look at it.
#pragma once

#include <utility>

#include "base/status_macros.h"
#include "worker/optim/sharded_adamw.h"

namespace ringleader::optim {

inline absl::StatusOr<OptimizerShard> TakeShard(ShardedAdamW& adamw) {
  ASSIGN_OR_RETURN(ShardSource source, adamw.Snapshot());
  return std::move(source)();
}

}  // namespace ringleader::optim
