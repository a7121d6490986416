// One training step, top to bottom, and one evaluation.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "balance/dealing.h"
#include "patterns/index/head_budgets.h"
#include "worker/comm/communicator.h"
#include "worker/data/loader.h"
#include "worker/trainer/engine/step_engine.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

// What a step works on; all of it outlives the loop. `eval` is null without held-out data.
struct StepParts {
  StepEngine* engine = nullptr;
  const data::Loader* train = nullptr;
  const data::Loader* eval = nullptr;
  comm::Communicator* world = nullptr;
  Host* host = nullptr;
};

// All ranks make the same calls in the same order. LibTorch's exceptions pass through.
class StepLoop {
 public:
  StepLoop(const TrainingJob& job, const StepParts& parts);

  // Takes over a plan, after `trained` steps. INVALID_ARGUMENT if this job cannot run as it says;
  // FAILED_PRECONDITION if it has step `trained` otherwise than it was trained, as a change that
  // came too late would: where it is not known any more how a step was, it cannot be trained again.
  absl::Status Apply(const Plan& plan, uint64_t trained);

  uint64_t plan_version() const { return plan_.version; }

  // Forward and backward over this rank's part of the step's sequences, then the update. The
  // record's checkpoint and evaluation times are left for the caller. `step` counts from 1.
  absl::StatusOr<StepRecord> Train(uint64_t step);

  // Scores the held-out sequences after `step` steps, attending to what training.eval_attention
  // says.
  absl::StatusOr<EvalRecord> Evaluate(uint64_t step);

  // Returns how many steps in a row, up to now, were skipped for a NaN or infinite gradient.
  uint64_t skipped_in_a_row() const { return skipped_in_a_row_; }
  void set_skipped_in_a_row(uint64_t steps) { skipped_in_a_row_ = steps; }

  // What probes have made of the heads' budgets, by layer; empty before the first, and of jobs
  // whose budgets do not follow it.
  const std::vector<patterns::LayerBudgets>& head_budgets() const { return head_budgets_; }
  void set_head_budgets(std::vector<patterns::LayerBudgets> layers);

 private:
  // Reads this rank's part of a micro-batch.
  absl::StatusOr<data::LocalSequence> Read(const data::Loader& loader,
                                           std::span<const data::Sample> samples,
                                           const balance::MicroBatch& batch,
                                           const balance::SampleWeights& weights) const;
  // Lays out the documents of a micro-batch of `padded` tokens.
  absl::StatusOr<ring::DocumentLayout> Lay(const data::Loader& loader,
                                           std::span<const data::Sample> samples, int64_t padded,
                                           const balance::SampleWeights& weights) const;
  // Counts the tokens that fill up the step's micro-batches, of all groups.
  absl::StatusOr<uint64_t> CountPadding(const balance::Dealing& dealing,
                                        std::span<const data::Sample> samples,
                                        const balance::SampleWeights& weights) const;
  // Returns the layout of this rank's part of a sequence of `tokens` tokens.
  kernels::ShardLayout LayoutOf(uint64_t tokens) const;
  int stripe() const { return shape_.stripe != 0 ? shape_.stripe : job_.attention.tile; }
  // Whether sequences can lie and travel so.
  absl::Status CheckShape(const PlanShape& shape) const;
  // Has the engine compute step `step` in its shape.
  absl::Status TakeShape(uint64_t step);
  absl::StatusOr<EvalOutcome> EvaluateOnce(uint64_t step);
  // Returns by how much the attention of this group's micro-batches is moved.
  std::vector<float> MovesOf(const balance::Dealing& dealing, std::span<const data::Sample> samples,
                             uint64_t step) const;
  // Computes forward and backward over this group's micro-batches, and passes those that other
  // groups have more of.
  absl::Status AddGradients(const balance::Dealing& dealing, std::span<const data::Sample> samples,
                            const std::vector<float>& moves, StepRecord* record);
  // Has the optimizer update the model.
  absl::Status Update(StepRecord* record);
  // Counts the documents of a micro-batch.
  static void CountDocuments(const data::LocalSequence& sequence, StepRecord* record);
  // Sets what the record says of this group's micro-batches, and of the lengths of those that
  // visited what their own choice allows (`moves`: 1).
  void CountMicroBatches(const std::vector<balance::MicroBatch>& mine,
                         const std::vector<float>& moves, const EngineStats& stats,
                         StepRecord* record) const;
  // Sets the record's probed_recall, from its layers' where they have been probed, and its layers'
  // recall, which stays that of the newest step that estimated it.
  void KeepProbe(StepRecord* record);
  // Has the next steps' budgets follow what step `step` probed, over all groups.
  absl::Status FollowProbes(uint64_t step, const std::vector<attention::LayerStats>& layers);
  // Counts the skipped steps in a row, and fails if they are too many.
  absl::Status CountSkipped(const StepRecord& record);
  // Returns the error of too many skipped steps, which names the rank and the parameter.
  absl::Status NonFiniteGradient(uint64_t step);

  const TrainingJob& job_;
  const StepParts parts_;
  const uint32_t group_;
  Plan plan_;
  PlanShape shape_;                    // the engine's
  std::vector<double> probed_recall_;  // StepRecord's
  std::vector<double> recall_;         // by layer, the newest; -1 before the first
  std::vector<patterns::LayerBudgets> head_budgets_;
  uint64_t skipped_in_a_row_ = 0;
  double last_loss_ = 0;  // which stands for that of a step without a token to predict
};

}  // namespace ringleader::trainer
