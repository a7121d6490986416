// The seam between the step loop and whoever started it: reports go up, plans and stop requests
// come down.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "balance/measurements.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/data/samples.h"
#include "worker/trainer/phase_seconds.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

struct StepRecord {
  uint64_t step = 0;  // 1 is the first
  double loss = 0;    // mean over the step's labelled tokens, all ranks
  double gradient_norm = 0;
  double learning_rate = 0;
  uint64_t tokens = 0;  // all ranks, without padding
  // How the step was dealt over all groups, where documents are samples; zeros otherwise.
  uint64_t samples = 0;
  uint64_t micro_batches = 0;
  uint64_t padding_tokens = 0;  // of packed sequences, too
  double dealt_imbalance = 0;   // of the predicted times: max over groups / mean
  // What this rank's group trained, padding included; and, where a pattern is chosen for each
  // micro-batch, what those of each length visited (SampleWeights::BinOf), all layers and heads of
  // this rank.
  uint64_t group_micro_batches = 0;
  uint64_t group_tokens = 0;
  struct LengthRecord {
    uint64_t micro_batches = 0;
    attention::VisitedTiles tiles = {};
  };
  std::map<uint64_t, LengthRecord> lengths = {};  // by bin
  uint32_t group = 0;                             // this rank's
  uint64_t rank_tokens = 0;                       // that it computed, padding included
  // Where documents are kept apart: those of this group's sequences, by the power of two that they
  // fit.
  std::map<uint64_t, uint64_t> documents = {};
  data::SampleCounts overlong = {};  // of the training data
  double step_seconds = 0;
  PhaseSeconds phases;
  uint64_t peak_memory_bytes = 0;
  uint64_t head_bytes = 0;  // that this rank sent to those with which it shares out heads
  attention::RingBytes ring_bytes = {};
  std::vector<attention::LayerStats> layers;
  // By layer, of the newest probe of this attempt, mean over heads; -1 before the first.
  std::vector<double> probed_recall = {};
  bool skipped = false;
  bool has_labels = true;  // without, `loss` is that of the step before
  uint64_t plan_version = 0;
};

// How the tokens that the held-out data marks as answers of one task were predicted.
struct TaskAnswers {
  std::string task;
  uint64_t asked = 0;
  uint64_t right = 0;  // of them: the answer's logit was larger than every other
  double loss = 0;     // mean over those asked
};

struct EvalOutcome {
  double loss = 0;                        // mean over labelled tokens
  uint64_t tokens = 0;                    // labelled
  std::vector<TaskAnswers> answers = {};  // in the order of the data's tasks
};

struct EvalRecord {
  uint64_t step = 0;                      // steps trained before it
  EvalOutcome outcome = {};               // dense if the job evaluates dense alone
  std::optional<EvalOutcome> dense = {};  // where the job evaluates both
  double seconds = 0;
};

// Thread-safe; no call blocks.
class Host {
 public:
  virtual ~Host() = default;

  virtual void ReportStep(const StepRecord& record) = 0;
  // The three below are called on rank 0 only.
  virtual void ReportEval(const EvalRecord& record) = 0;
  virtual void ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                                double seconds) = 0;
  virtual void ReportModel(const std::string& path) = 0;

  // What rank 0 is to measure before the first step.
  virtual const balance::MeasureRequest& measure() const = 0;
  virtual void ReportMeasurements(const balance::Measurements& measured) = 0;

  // Says where the step loop is, for pulses. `phase` is a string literal.
  virtual void SetPlace(uint64_t step, const char* phase) = 0;

  // True once this rank was asked to write a checkpoint and leave.
  virtual bool stop_requested() const = 0;

  // Takes the newest plan that arrived and was not taken yet, in a form that travels to other
  // ranks; empty if none.
  virtual std::string TakePlan() = 0;
  // Takes the number of steps that a user asked to have traced since the last call; 0: none.
  virtual uint32_t TakeProfileSteps() = 0;
  virtual absl::StatusOr<Plan> ParsePlan(const std::string& bytes) const = 0;
};

}  // namespace ringleader::trainer
