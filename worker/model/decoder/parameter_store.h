// Where a decoder that is trained layer by layer finds its parameters and leaves its gradients: the
// seam between worker/model and the sharded optimizer (worker/optim), which knows who owns what.
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "model_shape/precision.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

// A layer's block as its owners cast it, at half of a parameter's bytes and less (cast_block.h has
// the places of its slots).
struct CastBlock {
  // [elements] Float8_e4m3fn: a weight's, as TokenOps::CastRows gives them, at its offset in the
  // block.
  torch::Tensor codes;
  torch::Tensor scales;   // [rows] fp32, of the weights' rows, in the order of slots
  torch::Tensor vectors;  // [elements], norms and biases in the model's type, in the order of slots
};

// Blocks are those of ParameterLayout::blocks: the embedding, each layer, the final norm with the
// head. On a GPU calls are enqueued on LibTorch's current stream and wait for nothing on the
// host; errors surface as c10::Error and end the step.
class ParameterStore {
 public:
  virtual ~ParameterStore() = default;

  // The block's parameters: [elements], on the model's device and of its type. `next` is the block
  // that will be asked for after this one, or -1; a store that has to fetch blocks begins with it.
  // Readable until the next call but one for a layer; embedding and final block until the step
  // ends.
  virtual torch::Tensor Parameters(int block, int next) = 0;

  // Products read casts of these layers' weights, as `ops` makes them, which outlives this. Called
  // once, before blocks are asked for, and as SetReadsCasts by all ranks that share the model.
  virtual void HoldCasts(const TokenOps& ops, CastLayers layers) = 0;
  // As Parameters, of a layer whose products read casts: of the parameters as they are now.
  virtual CastBlock CastParameters(int block, int next) = 0;
  // Whether products read casts from here on; they do unless this is told otherwise. Between steps.
  virtual void SetReadsCasts(bool reads_casts) = 0;

  // A buffer of the block's gradient to add to: [elements] fp32; the same again while it is open.
  // The buffers of at most two layers are open at a time, besides the embedding's and the final
  // block's.
  virtual torch::Tensor OpenGradient(int block) = 0;
  // Everything that this backward adds to the block's buffer is enqueued.
  virtual void CloseGradient(int block) = 0;
};

}  // namespace ringleader::model
