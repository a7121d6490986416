// An exchange of tensors between the ranks that share out heads (ring/head_shares.h): what a device
// adds to heads/shared_heads.h.
#pragma once

#include <torch/types.h>

#include <memory>

#include "absl/status/statusor.h"

namespace ringleader::attention {

// On its way. It may be dropped without Await where the attempt has failed.
class StartedExchange {
 public:
  virtual ~StartedExchange() = default;
  // [ranks, …]: part r is what rank r sent to this one. On the CPU blocks until it is there; on
  // GPUs makes LibTorch's current stream wait for it. Called once.
  virtual absl::StatusOr<torch::Tensor> Await() = 0;
};

// All ranks start the same exchanges in the same order. Not thread-safe.
class HeadExchange {
 public:
  virtual ~HeadExchange() = default;
  virtual int rank() const = 0;  // among those that share
  virtual int ranks() const = 0;
  // parts: [ranks, …], dense; part r goes to rank r.
  virtual absl::StatusOr<std::unique_ptr<StartedExchange>> Start(torch::Tensor parts) = 0;
};

}  // namespace ringleader::attention
