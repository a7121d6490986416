// The e4m3 casts of layers' weights where parameters are sharded (ZeRO stage 3): each rank casts
// what it owns, once for each version of the parameters. Codes then travel in place of parameters,
// a layer at a time; rows' scales, norms and biases come to all ranks for all layers at once.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "model_shape/parameter_layout.h"
#include "model_shape/precision.h"
#include "worker/model/decoder/cast_block.h"
#include "worker/model/token_ops/token_ops.h"
#include "worker/optim/shard_device.h"

namespace ringleader::optim {

// Values of which each rank makes a range, in the order of ranks, and which all ranks come to have.
class SharedValues {
 public:
  // Rank r makes [bounds[r], bounds[r + 1]).
  SharedValues(std::vector<int64_t> bounds, const torch::TensorOptions& options);

  // Takes this rank's values, `own` one after another, and the others'.
  absl::Status Share(ShardDevice& device, const std::vector<torch::Tensor>& own);
  // A copy of values [from, to).
  torch::Tensor Copy(int64_t from, int64_t to) const;

 private:
  std::vector<int64_t> bounds_;
  int64_t most_ = 0;   // of a rank
  torch::Tensor all_;  // [ranks * most_]
};

// Not thread-safe. On a GPU it works on LibTorch's current stream and waits for nothing on the
// host.
class ShardedCasts {
 public:
  // Of `layers`. `shard`: this rank's range of the flat buffer, layout.ShardElements elements of
  // the model's type, whose contents change. ops and device outlive this. A weight's width is a
  // multiple of 16 (CheckPrecision).
  ShardedCasts(const model::ParameterLayout& layout, model::CastLayers layers,
               const model::TokenOps& ops, ShardDevice& device, const torch::Tensor& shard);

  const model::CastLayers& layers() const { return layers_; }

  // Casts what the shard holds, unless its version is the one that is cast. All ranks take part.
  absl::Status Update(int64_t version);

  // This rank's codes, a byte each, of flat elements [begin(), begin() + codes().numel()).
  const torch::Tensor& codes() const { return codes_; }
  int64_t begin() const { return begin_; }

  // What products read of a layer whose codes, [block.elements] bytes, have been gathered.
  model::CastBlock Block(int64_t layer, const torch::Tensor& gathered) const;

 private:
  // Elements [begin, end) of the flat buffer: rows of a weight, or a part of one.
  struct Rows {
    int64_t begin = 0, end = 0, width = 0;
    int64_t row_begin = 0;  // of a part: where its row begins
  };

  // body(place, the flat element at which it begins) for all slots of the layers, in order.
  template <typename Body>
  void ForPlaces(Body body) const;
  void FindRows();
  // How many rows of weights, or elements of norms and biases, begin before a flat element.
  int64_t RowsBefore(int64_t element) const;
  int64_t VectorsBefore(int64_t element) const;
  std::vector<int64_t> Bounds(int64_t (ShardedCasts::*before)(int64_t) const) const;

  torch::Tensor Values(const Rows& rows) const;
  absl::Status ShareLargest();
  torch::Tensor LargestOfRow(const Rows& part) const;
  // Each returns the rows' scales.
  torch::Tensor CastWhole(const Rows& rows);
  torch::Tensor CastPart(const Rows& part);
  void Keep(const Rows& rows, const torch::Tensor& codes);

  const model::CastLayers layers_;
  const model::CastBlockPlaces places_;
  const int64_t first_block_, block_elements_;  // of the first layer that is cast, and of each
  const model::TokenOps& ops_;
  ShardDevice& device_;
  const torch::Tensor shard_;
  const int64_t shard_elements_, shard_begin_;
  int64_t begin_ = 0, end_ = 0;  // what this rank has of the layers

  std::vector<Rows> whole_;          // rows that are this rank's alone
  std::optional<Rows> head_, tail_;  // parts of rows that others have parts of
  torch::Tensor codes_;              // [end_ - begin_] bytes
  SharedValues scales_, vectors_;
  torch::Tensor largest_;  // [ranks, 2] fp32: the largest magnitudes in ranks' heads and tails
  int64_t version_ = -1;   // of what is cast
};

}  // namespace ringleader::optim
