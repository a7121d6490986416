#include "coordinator/api/services/job_history.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "jobspec/values/probed_recall.h"

namespace ringleader::api {
namespace {

constexpr uint32_t kDefaultPoints = 400;
constexpr uint32_t kMaxPoints = 2000;
constexpr uint32_t kDefaultDetailPoints = 60;
constexpr uint32_t kMaxDetailPoints = 200;
constexpr int kProbeLooks =
    8;  // for a step that was probed: reports may be lost, or of dense steps

absl::StatusOr<int> Points(const char* name, uint32_t asked, uint32_t otherwise, uint32_t most) {
  if (asked == 0) return static_cast<int>(otherwise);
  if (asked >= 2 && asked <= most) return static_cast<int>(asked);
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %d is not allowed; give 2 to %d", name, asked, most));
}

void FillDetail(const v1::StepReport& report, v1::StepDetail* detail) {
  detail->set_step(report.step());
  *detail->mutable_rank_tiles() = report.rank_tiles();
  for (const v1::LayerReport& layer : report.layers()) {
    detail->add_layers(layer.layer());
    detail->add_density(static_cast<float>(layer.density()));
    detail->add_recall(static_cast<float>(layer.recall()));
    detail->add_probed_recall(layer.has_probed_recall() ? static_cast<float>(layer.probed_recall())
                                                        : -1);
    for (int i = 0; i < layer.tiles_per_ring_step_size(); ++i) {
      if (i == detail->ring_step_tiles_size()) detail->add_ring_step_tiles(0);
      detail->set_ring_step_tiles(i, detail->ring_step_tiles(i) + layer.tiles_per_ring_step(i));
    }
  }
}

// What the newest of the probes up to the step `last` found; nullopt if there is none among the
// last kProbeLooks that were due.
absl::StatusOr<std::optional<v1::ProbedRecall>> NewestProbe(store::ReadTransaction& transaction,
                                                            const std::string& id,
                                                            const v1::JobSpec& spec,
                                                            uint64_t last) {
  const uint64_t every = spec.attention().probe_every();
  if (every == 0) return std::nullopt;
  // Steps that are multiples of it are probed, and the first (patterns::ProbesAt).
  uint64_t step = std::max<uint64_t>(1, last - last % every);
  for (int looks = 0; looks < kProbeLooks; ++looks) {
    const absl::StatusOr<v1::StepReport> report = transaction.GetStep(id, step);
    if (!report.ok() && !absl::IsNotFound(report.status())) return report.status();
    if (report.ok()) {
      if (auto probe = jobspec::ProbedRecallOf(*report)) return probe;
    }
    if (step == 1) break;
    step = step > every ? step - every : 1;
  }
  return std::nullopt;
}

}  // namespace

absl::Status ReadJobHistory(store::ReadTransaction& transaction,
                            const v1::GetJobHistoryRequest& request, v1::JobHistory* history) {
  ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(request.name()));
  ASSIGN_OR_RETURN(const int points,
                   Points("points", request.points(), kDefaultPoints, kMaxPoints));
  ASSIGN_OR_RETURN(const int detail_points, Points("detail_points", request.detail_points(),
                                                   kDefaultDetailPoints, kMaxDetailPoints));
  ASSIGN_OR_RETURN(const v1::Job job, transaction.GetJob(id));
  ASSIGN_OR_RETURN(std::vector<v1::StepReport> steps, transaction.SampleSteps(id, points));
  if (!steps.empty()) {
    ASSIGN_OR_RETURN(std::optional<v1::ProbedRecall> probe,
                     NewestProbe(transaction, id, job.spec(), steps.back().step()));
    if (probe.has_value()) *history->mutable_probe() = *std::move(probe);
  }
  for (v1::StepReport& step : steps) *history->add_steps() = std::move(step);
  RETURN_IF_ERROR(transaction.VisitStepsWithLayers(
      id, detail_points,
      [&](const v1::StepReport& step) { FillDetail(step, history->add_details()); }));
  ASSIGN_OR_RETURN(std::vector<v1::EvalReport> evals, transaction.SampleEvals(id, points));
  for (v1::EvalReport& eval : evals) *history->add_evals() = std::move(eval);
  ASSIGN_OR_RETURN(const std::vector<v1::CheckpointNotice> checkpoints,
                   transaction.ListCheckpoints(id));
  for (const v1::CheckpointNotice& checkpoint : checkpoints) {
    *history->add_checkpoints() = checkpoint;
  }
  return absl::OkStatus();
}

}  // namespace ringleader::api
