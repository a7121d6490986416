// Tensors of attention whose heads are shared out: a rank's own tokens of all heads become its own
// heads of all tokens that the ranks hold together (ring/head_shares.h), and back. The same code
// for all devices.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/attention/heads/head_exchange.h"

namespace ringleader::attention {

// All ranks make the same calls in the same order. Not thread-safe.
class SharedHeads {
 public:
  using Started = std::vector<std::unique_ptr<StartedExchange>>;

  explicit SharedHeads(HeadExchange* exchange) : exchange_(*exchange) {}

  int rank() const { return exchange_.rank(); }
  int ranks() const { return exchange_.ranks(); }

  // Sends [n, heads, d] tensors, of any strides with a dense last dimension. Where there are fewer
  // heads than ranks, neighbours get the same one.
  absl::StatusOr<Started> Start(std::initializer_list<torch::Tensor> tensors);
  // They arrive as [ranks * n, heads of this rank, d], tokens in the order of the ranks.
  static absl::Status Await(const Started& started, std::initializer_list<torch::Tensor*> tensors);
  // Both, in place.
  absl::Status ToHeads(std::initializer_list<torch::Tensor*> tensors);

  // The way back.
  struct Returned {
    torch::Tensor* tensor = nullptr;
    int64_t heads = 0;  // of all ranks
  };
  // What several ranks have of one head is summed in float32, in the order of the ranks.
  absl::Status ToTokens(std::initializer_list<Returned> tensors);

  // Bytes that this rank has sent to others since the last call.
  uint64_t TakeBytes() { return std::exchange(bytes_, 0); }

 private:
  absl::StatusOr<std::unique_ptr<StartedExchange>> StartParts(torch::Tensor parts);

  HeadExchange& exchange_;
  uint64_t bytes_ = 0;
};

}  // namespace ringleader::attention
