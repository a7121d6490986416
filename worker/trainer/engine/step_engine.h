// What computes a step: the model, its attention and its optimizer on one kind of device. The seam
// that keeps the step loop the same on CPU (cpu_engine.h) and GPU (cuda_engine.h).
#pragma once

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
#include "worker/attention/stats/attention_stats.h"
#include "worker/comm/communicator.h"
#include "worker/data/loader.h"
#include "worker/optim/adamw.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

struct LossSum {
  double loss = 0;    // summed over labelled tokens
  double tokens = 0;  // with a label
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
  uint64_t peak_memory_bytes = 0;  // of the device, since the start
};

// All ranks make the same calls in the same order, from one thread. LibTorch's exceptions pass
// through.
class StepEngine {
 public:
  virtual ~StepEngine() = default;

  virtual const model::ModelConfig& config() const = 0;
  virtual const model::ParameterLayout& layout() const = 0;
  // How the engine has set itself up, for people: name and value.
  virtual std::vector<std::pair<std::string, std::string>> Settings() const = 0;

  // From the next step on; layers behind the end keep the job's.
  virtual absl::Status SetBudgets(std::span<const patterns::LayerBudget> budgets) = 0;

  // A step: begin, this rank's micro-batches, update. Update is where the step's one wait for the
  // device is; with no labelled token on any rank it changes nothing and returns a sum of 0.
  virtual void BeginStep() = 0;
  virtual absl::Status ForwardBackward(const data::LocalSequence& sequence) = 0;
  virtual absl::StatusOr<StepUpdate> Update(double learning_rate) = 0;

  // This rank's part of the loss, without gradients.
  virtual absl::StatusOr<LossSum> Loss(const data::LocalSequence& sequence) = 0;

  // What happened since the last call.
  virtual EngineStats TakeStats() = 0;
  // The first parameter, in layout().slots, whose gradient here is NaN or infinite; -1 if none is.
  virtual int64_t NonFiniteParameter() const = 0;

  // This rank's range of the parameters with its optimizer state as they are now, to be copied to
  // host memory while training goes on. Calling it may outlast no call but ForwardBackward.
  virtual absl::StatusOr<optim::ShardSource> Snapshot() = 0;
  virtual int64_t shard_begin() const = 0;
  virtual int64_t shard_elements() const = 0;
  virtual int64_t updates() const = 0;
  virtual absl::Status Restore(optim::OptimizerShard shard, int64_t updates) = 0;
  // Rank 0 writes a Hugging Face folder.
  virtual absl::Status ExportModel(const std::string& folder) = 0;
};

}  // namespace ringleader::trainer
