#include "coordinator/api/services/job_history.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::api {
namespace {

constexpr uint32_t kDefaultPoints = 400;
constexpr uint32_t kMaxPoints = 2000;
constexpr uint32_t kDefaultDetailPoints = 60;
constexpr uint32_t kMaxDetailPoints = 200;

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
    for (int i = 0; i < layer.tiles_per_ring_step_size(); ++i) {
      if (i == detail->ring_step_tiles_size()) detail->add_ring_step_tiles(0);
      detail->set_ring_step_tiles(i, detail->ring_step_tiles(i) + layer.tiles_per_ring_step(i));
    }
  }
}

}  // namespace

absl::Status ReadJobHistory(store::ReadTransaction& transaction,
                            const v1::GetJobHistoryRequest& request, v1::JobHistory* history) {
  ASSIGN_OR_RETURN(const std::string id, store::JobIdFromName(request.name()));
  ASSIGN_OR_RETURN(const int points,
                   Points("points", request.points(), kDefaultPoints, kMaxPoints));
  ASSIGN_OR_RETURN(const int detail_points, Points("detail_points", request.detail_points(),
                                                   kDefaultDetailPoints, kMaxDetailPoints));
  RETURN_IF_ERROR(transaction.GetJob(id).status());
  ASSIGN_OR_RETURN(std::vector<v1::StepReport> steps, transaction.SampleSteps(id, points));
  for (v1::StepReport& step : steps) {
    step.clear_layers();
    step.clear_rank_tiles();
    *history->add_steps() = std::move(step);
  }
  ASSIGN_OR_RETURN(steps, transaction.SampleStepsWithLayers(id, detail_points));
  for (const v1::StepReport& step : steps) FillDetail(step, history->add_details());
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
