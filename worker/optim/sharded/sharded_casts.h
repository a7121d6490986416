// The e4m3 casts of layers' weights, made by the ranks that own their master weights, once for each
// version of them: codes travel in place of parameters. Rows' scales, norms and biases come to all
// ranks for all layers at once.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
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
  // Of `layers`. `master`: this rank's range of the flat buffer, layout.ShardElements elements in
  // fp32, whose contents change; type: the model's, in which they are cast. ops and device outlive
  // this. A weight's width is a multiple of 16 (CheckPrecision).
  ShardedCasts(const model::ParameterLayout& layout, model::CastLayers layers,
               const model::TokenOps& ops, ShardDevice& device, const torch::Tensor& master,
               torch::ScalarType type);

  const model::CastLayers& layers() const { return layers_; }
  // The flat elements [begin(), end()) are this rank's of the layers.
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  // Where the codes of flat elements [begin, end) belong, which are this rank's and of one weight:
  // bytes.
  using PlaceOfCodes = absl::FunctionRef<torch::Tensor(int64_t begin, int64_t end)>;
  // Casts what the shard holds, codes into their places, and takes all ranks' scales, norms and
  // biases; unless `version` is the one that was cast last. All ranks take part.
  absl::Status Update(int64_t version, PlaceOfCodes place_of);

  // What products read of a layer whose codes, [block.elements] bytes, have been gathered.
  model::CastBlock Block(int64_t layer, const torch::Tensor& gathered) const;

 private:
  // Elements [begin, end) of the flat buffer: rows of a weight, or a part of one.
  struct Rows {
    int64_t begin = 0, end = 0, width = 0;
    int64_t row_begin = 0;  // where the first row begins
    bool has_beginning() const { return begin == row_begin; }
    bool is_part() const { return !has_beginning() || end - begin < width; }
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
  model::ScaledRows CastOf(const Rows& rows) const;

  const model::CastLayers layers_;
  const model::CastBlockPlaces places_;
  const int64_t first_block_, block_elements_;  // of the first layer that is cast, and of each
  const model::TokenOps& ops_;
  ShardDevice& device_;
  const torch::Tensor master_;
  const torch::ScalarType type_;
  const int64_t shard_elements_, shard_begin_;
  int64_t begin_ = 0, end_ = 0;  // what this rank has of the layers

  // In order: a part of a row that an earlier rank has the beginning of, whole rows, a part of one
  // that a later rank has the end of.
  std::vector<Rows> rows_;
  SharedValues scales_, vectors_;
  torch::Tensor largest_;  // [ranks, 2] fp32: the largest magnitudes in ranks' heads and tails
  int64_t version_ = -1;   // that was cast last
};

}  // namespace ringleader::optim
