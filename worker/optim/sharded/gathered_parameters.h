// What a rank holds of a model to read it, gathered from the ranks that own its master weights:
// rounded to the model's type or, of layers whose products read casts, in e4m3 (sharded_casts.h).
// All of it on every rank (ZeRO stage 2), or two layers at a time, each of which owners broadcast
// into one of layers' two buffers while the layer before is computed (stage 3).
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model_shape/parameter_layout.h"
#include "model_shape/precision.h"
#include "worker/model/decoder/parameter_store.h"
#include "worker/model/token_ops/token_ops.h"
#include "worker/optim/shard_device.h"
#include "worker/optim/sharded/sharded_casts.h"

namespace ringleader::optim {

// Not thread-safe. All ranks of the device make the same calls; only a model that is whole may be
// read by some alone. On a GPU it works on LibTorch's current stream and waits for
// nothing on the host. What does not return a status throws c10::Error.
class GatheredParameters {
 public:
  // `master`: this rank's range, layout.ShardElements elements in fp32, whose contents change;
  // layout and device outlive this. Nothing is gathered before Gather.
  GatheredParameters(const model::ParameterLayout& layout, ShardDevice& device,
                     const torch::Tensor& master, torch::ScalarType type, bool is_whole);

  bool is_whole() const { return is_whole_; }

  // Where this rank's master weights are held rounded, [elements]; undefined where they are rounded
  // as they are sent.
  torch::Tensor Own() const;
  // Gathers what is held. The master weights may have changed; Own() holds them as they are.
  absl::Status Gather();

  // Whether the block is read as CastParameters, not as Parameters.
  bool IsCast(int block) const;
  // ParameterStore's.
  void HoldCasts(const model::TokenOps& ops, model::CastLayers layers);
  void SetReadsCasts(bool reads_casts);
  torch::Tensor Parameters(int block, int next);
  model::CastBlock CastParameters(int block, int next);

 private:
  // A block's parameters, or their casts.
  struct Place {
    torch::Tensor buffer;  // bytes, of the larger of the two that has been here
    int block = -1;
    bool is_cast = false;
    std::vector<ShardTransferPtr> broadcasts;
  };

  Place& PlaceFor(int block);
  int64_t BytesOf(bool is_cast) const;
  absl::Status GatherInForm();
  absl::Status UpdateCasts();
  absl::StatusOr<torch::Tensor> RoomFor(int block);
  absl::Status Fetch(int block);
  torch::Tensor Read(int block, int next);

  const model::ParameterLayout& layout_;
  ShardDevice& device_;
  const torch::Tensor master_;
  const torch::ScalarType type_;
  const bool is_whole_;
  const int64_t elements_, begin_;  // of this rank's shard

  torch::Tensor whole_;                      // [ranks * elements]: the whole model, until HoldCasts
  std::vector<ShardTransferPtr> gathering_;  // of whole_
  std::vector<Place> places_;                // without it: of each block or, not whole, kPlaces
  std::optional<ShardedCasts> casts_;        // HoldCasts
  bool reads_casts_ = true;                  // of the layers that have some
  torch::Tensor own_codes_;                  // not whole: casts_->begin() to end(), bytes
  int64_t version_ = 0;                      // another at each Gather
};

}  // namespace ringleader::optim
