// AdamW with state sharded over all ranks (ZeRO, Rajbhandari et al. 2020), on CPUs and GPUs: a
// ShardDevice is what they differ in. Every rank holds master weights, moments and the reduced
// gradient of its range of the flat buffer only, and of the model what gathered_parameters.h says:
// all of it (stage 2) or two layers at a time (stage 3), in the working type or in e4m3.
//
// Gradients arrive block by block in fp32 while backward runs: as ranges are contiguous, a block
// belongs to one or two ranks, and one reduction to each owner adds it up where it is needed,
// while the next layer's backward runs (on CPUs before it).
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model_shape/memory_estimate.h"
#include "model_shape/parameter_layout.h"
#include "model_shape/precision.h"
#include "worker/model/decoder/parameter_store.h"
#include "worker/model/token_ops/token_ops.h"
#include "worker/optim/adamw.h"
#include "worker/optim/shard_device.h"

namespace ringleader::optim {

struct ShardedStep {
  double loss = 0.0;           // mean over the labelled tokens of all ranks
  double tokens = 0.0;         // labelled, all ranks
  double gradient_norm = 0.0;  // of the mean's gradient, global, before clipping
  bool skipped = false;        // the norm was NaN or infinite: nothing changed
};

// Not thread-safe. All ranks of the device make the same calls. On a GPU it works on LibTorch's
// current stream; only Step, AwaitSnapshot, Restore and GatherMaster wait for the device.
// ShardedAdamW::State has the state and the private steps.
class ShardedAdamW : public model::ParameterStore {
 public:
  // `master`: this rank's range of the start weights, layout.ShardElements(ranks) from
  // rank * ShardElements(ranks) on, 0 past the end. type: kBFloat16 or kFloat, the model's.
  // `device` spans the ranks that share the model and must outlive this. INVALID_ARGUMENT where the
  // start weights or the type do not fit.
  static absl::StatusOr<std::unique_ptr<ShardedAdamW>> Create(
      const AdamWOptions& options, const model::ParameterLayout& layout, ShardDevice& device,
      torch::ScalarType type, std::span<const float> master,
      model::ParameterSharding sharding = model::ParameterSharding::kWhole);
  ~ShardedAdamW() override;

  // Called once, where ranks have unequal micro-batches and parameters are whole: gradients of a
  // step's micro-batches add up on each rank, in a buffer of the model's size, and ranks sum them
  // in each rank's last alone, instead of meeting in every one.
  void SumOnceAStep();
  bool sums_once_a_step() const;
  // The next micro-batch is this rank's last of the step.
  void LastMicroBatch();

  // Called between steps: the gradient starts at 0.
  void ZeroGradients();

  // ParameterStore. HoldCasts and SetReadsCasts gather what is whole anew: all ranks call them
  // alike, and so make their decoders alike.
  void HoldCasts(const model::TokenOps& ops, model::CastLayers layers) override;
  torch::Tensor Parameters(int block, int next) override;
  model::CastBlock CastParameters(int block, int next) override;
  void SetReadsCasts(bool reads_casts) override;
  torch::Tensor OpenGradient(int block) override;
  void CloseGradient(int block) override;
  // Take part in what ranks do together in a micro-batch to which this rank adds nothing, because
  // others have more of them or, where they sum once a step, this rank has none: sharded parameters
  // are gathered and gradients reduced, in the order of the decoder's forward and backward, or of
  // its forward alone.
  void PassMicroBatch();
  void PassForward();

  // loss_sum: a scalar on the device, over this rank's micro-batches, and `tokens` how many
  // labels it sums; the gradient is taken of the mean over all ranks' tokens. Clips, updates this
  // rank's range and gathers the parameters; returns once the figures are known, while the update
  // is still running.
  absl::StatusOr<ShardedStep> Step(double learning_rate, const torch::Tensor& loss_sum,
                                   int64_t tokens);

  // The first parameter, in layout.slots, whose gradient in this rank's range is NaN or infinite;
  // -1 if none is. Waits for the device.
  int64_t NonFiniteParameter() const;

  // What checkpoints save, in host memory. updates(): steps taken, without skipped ones.
  int64_t shard_begin() const;
  int64_t shard_elements() const;
  // Only the next update waits for the copy, or AwaitSnapshot, which returns the seconds that it
  // waited. What Snapshot returns may outlive this.
  absl::StatusOr<ShardSource> Snapshot();
  double AwaitSnapshot();
  int64_t updates() const;
  // Takes a checkpoint's state for this rank's range and gathers the parameters. INVALID_ARGUMENT
  // unless the shard is this rank's range.
  absl::Status Restore(const OptimizerShard& shard, int64_t updates);

  // All ranks' master weights, into `values` [layout.elements] where it is not null.
  absl::Status GatherMaster(float* values);

 private:
  struct State;
  void PassBlock(int block, int next);
  explicit ShardedAdamW(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ringleader::optim
