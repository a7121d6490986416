#include "bench/planned_job.h"

#include <google/protobuf/util/json_util.h>

#include <filesystem>
#include <string>
#include <vector>

#include "balance/length_densities.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "coordinator/lifecycle/job/step_merger.h"
#include "coordinator/planner/cost/measured.h"
#include "coordinator/planner/deal/reweigh.h"
#include "coordinator/planner/planner.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/model_spec.h"
#include "ringleader/v1/node_service.pb.h"
#include "ringleader/v1/trainer_link.pb.h"
#include "worker/trainer/link/assignment.h"
#include "worker/trainer/link/telemetry.h"

namespace ringleader::bench {
namespace {

struct Job {
  v1::JobSpec spec;
  model::ModelConfig model;
};

absl::StatusOr<Job> Load(const std::string& path) {
  Job job;
  ASSIGN_OR_RETURN(job.spec, jobspec::LoadJobFile(path, {}));
  jobspec::ApplyDefaults(&job.spec);
  RETURN_IF_ERROR(jobspec::Validate(job.spec));
  ASSIGN_OR_RETURN(job.model, model::LoadModelConfig(jobspec::ModelConfigPath(job.spec.model())));
  return job;
}

absl::StatusOr<v1::ListLatencyResponse> Read(const std::string& measured) {
  v1::ListLatencyResponse all;
  if (!std::filesystem::exists(measured)) return all;
  ASSIGN_OR_RETURN(const std::string text, ReadFlagFile("--measured", measured, size_t{256} << 20));
  if (!google::protobuf::util::JsonStringToMessage(text, &all).ok()) {
    return absl::InvalidArgumentError(measured + " is not what `ringctl latency -o json` prints");
  }
  return all;
}

// Of one machine's file.
balance::LatencyTable TableOf(const v1::ListLatencyResponse& all, const Job& job) {
  std::vector<std::string> devices;
  if (!all.tables().empty()) devices.push_back(all.tables(0).machine().device());
  return planner::SlowestTable({all.tables().begin(), all.tables().end()},
                               planner::ShapeOf(job.spec, job.model), devices);
}

absl::StatusOr<v1::StepPlan> PlanOf(const Job& job, const balance::LatencyTable& table) {
  const planner::ClusterShape cluster =
      planner::TypicalCluster(job.spec.resources().engine(), /*nodes=*/1,
                              static_cast<int>(job.spec.resources().trainers()));
  const planner::CostModel costs(job.spec, job.model, cluster, table);
  return planner::MakePlan(job.spec, job.model, cluster, costs);
}

}  // namespace

absl::StatusOr<trainer::TrainingJob> LoadPlannedJob(const std::string& path,
                                                    const std::string& measured) {
  ASSIGN_OR_RETURN(const Job job, Load(path));
  ASSIGN_OR_RETURN(const v1::ListLatencyResponse all, Read(measured));
  v1::TrainerAssignment assignment;
  ASSIGN_OR_RETURN(*assignment.mutable_plan(), PlanOf(job, TableOf(all, job)));
  *assignment.mutable_spec() = job.spec;
  assignment.set_job(job.spec.name());
  assignment.set_attempt(1);
  assignment.set_world_size(job.spec.resources().trainers());
  assignment.set_ranks_per_node(job.spec.resources().trainers());
  return trainer::ToTrainingJob(assignment);
}

absl::StatusOr<balance::SampleWeights> Reweighed(const std::string& path,
                                                 const std::string& measured,
                                                 std::span<const VisitedByLength> steps) {
  ASSIGN_OR_RETURN(const Job job, Load(path));
  ASSIGN_OR_RETURN(const v1::ListLatencyResponse all, Read(measured));
  const balance::LatencyTable table = TableOf(all, job);
  ASSIGN_OR_RETURN(v1::StepPlan plan, PlanOf(job, table));
  balance::LengthDensities densities;
  for (const VisitedByLength& step : steps) {
    v1::StepReport report;
    for (const auto& [tokens, tiles] : step) {
      v1::LengthReport* const bin = report.add_lengths();
      bin->set_tokens(tokens);
      bin->set_visited_tiles(tiles.visited);
      bin->set_causal_tiles(tiles.causal);
    }
    planner::ObserveLengths(job.spec, job.model, report, &densities);
  }
  // Changes wait for some steps since the start; which step this is changes nothing else.
  v1::StepReport last;
  last.set_step(job.spec.training().steps());
  if (auto changed = planner::ReplanWeights(job.spec, plan, last, densities, table)) {
    plan = *std::move(changed);
  }
  ASSIGN_OR_RETURN(const trainer::Plan taken, trainer::ToPlan(plan, /*context=*/1));
  return taken.sample_weights;
}

absl::StatusOr<bool> IsMeasured(const std::string& path, const std::string& measured) {
  ASSIGN_OR_RETURN(const Job job, Load(path));
  ASSIGN_OR_RETURN(const v1::ListLatencyResponse all, Read(measured));
  return !TableOf(all, job).rows.empty();
}

absl::Status KeepMeasured(const std::string& path, const balance::Measurements& rows,
                          const std::string& measured) {
  ASSIGN_OR_RETURN(const Job job, Load(path));
  ASSIGN_OR_RETURN(v1::ListLatencyResponse all, Read(measured));
  ASSIGN_OR_RETURN(
      const v1::Measurements checked,
      planner::CheckMeasurements(trainer::ToProto(rows), planner::ShapeOf(job.spec, job.model),
                                 rows.machine.device));
  *all.add_tables() = checked.layers();
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(all, &text).ok()) {
    return absl::InternalError("what was measured cannot be written as JSON");
  }
  return WriteFileAtomically(measured, text);
}

std::string ToJson(const trainer::StepRecord& record) {
  const std::vector<v1::StepReport> ranks = {trainer::ToProto(record, /*rank=*/0)};
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  // A report has nothing that JSON does not have.
  (void)google::protobuf::util::MessageToJsonString(lifecycle::MergeSteps(ranks), &text, options);
  return text;
}

}  // namespace ringleader::bench
