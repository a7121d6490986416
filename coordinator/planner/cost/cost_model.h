// What a training step costs, by phase: seconds per tile, row, byte and call. Starts from what was
// measured of the machine, where that is known, or from such machines' usual speed, and is fitted
// to StepReports as they come.
#pragma once

#include <array>

#include "balance/latency_table.h"
#include "coordinator/planner/cost/regression.h"
#include "coordinator/planner/cost/shapes.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"
#include "ringleader/v1/telemetry.pb.h"

namespace ringleader::planner {

enum class Phase { kAttentionForward, kAttentionBackward, kIndex, kLinear, kOptimizer };
inline constexpr int kPhases = 5;

// What one rank does in a phase.
struct Work {
  // Over heads: attention tiles visited; index: that dense attention would visit.
  double tiles = 0;
  double rows = 0;   // attention: query rows × heads × calls; linear and index: tokens × layers
  double bytes = 0;  // optimizer: gradient and parameter bytes exchanged
  double calls = 0;  // ring steps; 1 for the optimizer
};

// Not thread-safe; copyable.
class CostModel {
 public:
  // The start for one job: its tile, model and engine. An unknown model counts as a small one.
  // `measured`: of the job's shape; attention starts from it where it has rows.
  CostModel(const v1::JobSpec& spec, const model::ModelConfig& model, const ClusterShape& cluster,
            const balance::LatencyTable& measured = {});
  // As it was before any report.
  CostModel Unfitted() const;

  double Seconds(Phase phase, const Work& work) const;
  void Observe(Phase phase, const Work& work, double seconds);

  // Learns from one merged report. A report of a step that was skipped, or without attention tiles,
  // teaches nothing, nor does one of samples that does not say what its largest group had.
  void ObserveStep(const v1::JobSpec& spec, const model::ModelConfig& model,
                   const v1::StepReport& report);

  // What of the optimizer's seconds is the exchange of gradients and parameters.
  double exchange_share() const { return exchange_share_; }
  // What was measured of the job's shape; empty where nothing was.
  const balance::LatencyTable& measured() const { return measured_; }
  // {seconds per tile, row, byte, call}.
  const NonNegativeRegression::Vector& coefficients(Phase phase) const;
  int observations() const;

 private:
  std::array<NonNegativeRegression, kPhases> phases_;
  double exchange_share_ = 0;
  balance::LatencyTable measured_;
};

}  // namespace ringleader::planner
