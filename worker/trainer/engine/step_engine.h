// What computes a step: the model, its attention and its optimizer, over a device
// (engine_device.h), in which CPU and GPU differ.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "model_shape/parameter_layout.h"
#include "patterns/attention_options.h"
#include "patterns/check_options.h"
#include "patterns/index/head_budgets.h"
#include "ring/document_layout.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/comm/communicator.h"
#include "worker/data/loader.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/files/huggingface.h"
#include "worker/optim/sharded/sharded_adamw.h"
#include "worker/trainer/engine/engine_device.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

struct LossSum {
  double loss = 0;    // summed over labelled tokens
  double tokens = 0;  // with a label
};

// What a rank's tokens of one sequence score, in its local order: [n] each.
struct RankScores {
  std::vector<float> losses;   // 0 without a label
  std::vector<uint8_t> right;  // 1: the label's logit is larger than every other
};

struct StepUpdate {
  LossSum sum;  // of all ranks and micro-batches
  double gradient_norm = 0;
  bool skipped = false;         // the gradient was not finite: nothing changed
  double snapshot_seconds = 0;  // waiting for a snapshot that was still being copied
};

struct EngineStats {
  PhaseSeconds phases;  // without data, checkpoint and evaluation
  std::vector<attention::LayerStats> layers;
  // What each ForwardBackward visited, in their order, where documents are samples.
  std::vector<attention::VisitedTiles> micro_batches;
  uint64_t peak_memory_bytes = 0;  // of the device, since the start
  // attention::AttentionStats'.
  uint64_t head_bytes = 0;
  attention::RingBytes ring_bytes;
};

// All ranks make the same calls in the same order, from one thread. LibTorch's exceptions pass
// through.
class StepEngine {
 public:
  // Loads or draws the model on the job's device. `job`, `world` and `host` outlive the engine.
  // FAILED_PRECONDITION, with the arithmetic, where the job does not fit the device.
  static absl::StatusOr<std::unique_ptr<StepEngine>> Create(const TrainingJob& job,
                                                            comm::Communicator& world, Host& host);

  const model::ModelConfig& config() const { return decoder_->config(); }
  EngineDevice& device() { return *device_; }
  const model::ParameterLayout& layout() const { return decoder_->layout(); }
  // Says how the engine has set itself up, for people: name and value.
  std::vector<std::pair<std::string, std::string>> Settings() const;

  // Has the steps from the next one on lie and travel so. What
  // patterns::CheckOptions refuses is an error.
  absl::Status SetShape(const PlanShape& shape) {
    return device_->SetAttention(shape.Of(job_.attention));
  }
  // Whether the next forwards attend to everything, whatever the job's pattern is.
  void SetDense(bool dense) { device_->attention().SetDense(dense); }

  // attention::ContextAttention's, until SetShape.
  void SetHeadBudgets(std::span<const patterns::LayerBudgets> layers) {
    device_->attention().SetHeadBudgets(layers);
  }

  // A step, 1 being the first: begin, this rank's micro-batches, update. Update is where the step's
  // one wait for the device is; with no labelled token on any rank it changes nothing and returns 0
  // tokens.
  void BeginStep(uint64_t step);
  absl::Status ForwardBackward(const data::LocalSequence& sequence, bool is_last, float move);
  // Stands in for a forward and backward where other ranks have more micro-batches than this one:
  // ranks gather parameters and sum the gradients of each micro-batch together or, where they sum
  // once a step, those of the last alone.
  void PassMicroBatch();
  bool sums_once_a_step() const { return optimizer_->sums_once_a_step(); }
  absl::StatusOr<StepUpdate> Update(double learning_rate);

  // What follows reads what the step reads: it, and evaluations after it.
  void SetPrecisionOf(uint64_t step);
  // Scores this rank's tokens, without gradients. Waits for the device.
  absl::StatusOr<RankScores> Score(const data::LocalSequence& sequence);
  // Stands in for Score likewise.
  void PassScore();

  // Returns what happened since the last call.
  absl::StatusOr<EngineStats> TakeStats();
  // Returns the first of layout().slots whose gradient here is NaN or infinite; -1 if none is.
  int64_t NonFiniteParameter() const { return optimizer_->NonFiniteParameter(); }

  // Returns a source of this rank's range of the parameters and optimizer state as they are now, to
  // be copied to host memory while training goes on: a ForwardBackward may run meanwhile, and no
  // other call.
  absl::StatusOr<optim::ShardSource> Snapshot() { return optimizer_->Snapshot(); }
  int64_t shard_begin() const { return optimizer_->shard_begin(); }
  int64_t shard_elements() const { return optimizer_->shard_elements(); }
  int64_t updates() const { return optimizer_->updates(); }
  absl::Status Restore(const optim::OptimizerShard& shard, int64_t updates) {
    return optimizer_->Restore(shard, updates);
  }
  // Rank 0 writes a Hugging Face folder.
  absl::Status ExportModel(const std::string& folder, const model::ExportOptions& options);

 private:
  StepEngine(const TrainingJob& job, comm::Communicator& world,
             std::unique_ptr<EngineDevice> device)
      : job_(job), world_(world), device_(std::move(device)) {}
  absl::Status SetUp(Host& host);
  // Chooses what to recompute; FAILED_PRECONDITION, with the arithmetic, if nothing fits.
  absl::Status PlanMemory(const model::ModelConfig& config);
  // Whether a buffer of the whole gradient fits, for groups that need not meet then.
  bool MaySumOnceAStep(const model::ParameterLayout& layout) const;
  // Returns this rank's range of the start weights.
  absl::StatusOr<std::vector<float>> StartWeights(const model::ModelConfig& config,
                                                  const model::ParameterLayout& layout) const;
  std::string DescribePrecision() const;
  absl::Status SetDocuments(const data::LocalSequence& sequence);
  model::TokenBatch Batch(const data::LocalSequence& sequence) const;
  // Of the longest micro-batch, as memory is planned for it.
  int64_t LocalTokens() const {
    const int64_t even = static_cast<int64_t>(job_.sequence_length) / job_.context;
    return patterns::AreApart(job_.attention) ? ring::MostLocalTokensApart(even) : even;
  }

  const TrainingJob& job_;
  comm::Communicator& world_;
  const std::unique_ptr<EngineDevice> device_;
  model::TrainingPlan memory_plan_;
  int64_t free_bytes_ = 0;  // of the device, before anything was taken: the least of all ranks
  std::unique_ptr<optim::ShardDevice> shards_;
  std::unique_ptr<optim::ShardedAdamW> optimizer_;
  std::unique_ptr<model::Decoder> decoder_;

  // Over the step's micro-batches so far: the sum of losses, a scalar on the device, and how many
  // labels it sums.
  torch::Tensor loss_sum_;
  int64_t labels_ = 0;
};

}  // namespace ringleader::trainer
