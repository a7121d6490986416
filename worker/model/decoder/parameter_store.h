// Where a decoder that is trained layer by layer finds its parameters and leaves its gradients: the
// seam between worker/model and the sharded optimizer (worker/optim), which knows who owns what.
#pragma once

#include <torch/types.h>

#include <cstdint>

namespace ringleader::model {

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

  // Another number whenever parameters may have changed: what was derived from them under the same
  // number is still true.
  virtual int64_t version() const = 0;

  // A buffer of the block's gradient to add to: [elements] fp32; the same again while it is open.
  // The buffers of at most two layers are open at a time, besides the embedding's and the final
  // block's.
  virtual torch::Tensor OpenGradient(int block) = 0;
  // Everything that this backward adds to the block's buffer is enqueued.
  virtual void CloseGradient(int block) = 0;
};

}  // namespace ringleader::model
