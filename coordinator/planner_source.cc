#include "coordinator/planner_source.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "coordinator/planner/planner.h"
#include "model_shape/model_config.h"

namespace ringleader {
namespace {

// Reports that a change of budgets is decided on: enough to even out one step's chance.
constexpr size_t kRecentSteps = 16;

planner::ClusterShape ShapeOf(const v1::JobSpec& spec, const std::vector<v1::Placement>& placements,
                              const std::vector<v1::NodeInventory>& nodes) {
  const uint32_t trainers = placements.empty() ? 1 : placements.front().trainers();
  const bool even =
      std::all_of(placements.begin(), placements.end(),
                  [&](const v1::Placement& placement) { return placement.trainers() == trainers; });
  planner::ClusterShape cluster =
      planner::TypicalCluster(spec.resources().engine(), static_cast<int>(placements.size()),
                              even ? static_cast<int>(trainers) : 0);
  // The slowest and the smallest node count: no rank gets ahead of the others.
  for (const v1::NodeInventory& node : nodes) {
    const uint32_t slots = std::max(1u, node.trainers());
    const double threads = spec.resources().threads() > 0
                               ? spec.resources().threads()
                               : std::max(1.0, static_cast<double>(node.cpu_cores()) / slots);
    const uint64_t share = node.memory_bytes() / slots;
    uint64_t memory = share;
    if (spec.resources().engine() == v1::ResourcesSpec::CUDA) {
      memory = node.gpus().empty() ? 0 : node.gpus(0).memory_bytes();
    }
    const bool first = &node == &nodes.front();
    cluster.host_memory_bytes_per_trainer =
        first ? share : std::min(cluster.host_memory_bytes_per_trainer, share);
    cluster.threads_per_trainer = first ? threads : std::min(cluster.threads_per_trainer, threads);
    cluster.memory_bytes_per_trainer =
        first ? memory : std::min(cluster.memory_bytes_per_trainer, memory);
  }
  return cluster;
}

model::ModelConfig ModelOf(const v1::JobSpec& spec) {
  const v1::ModelSpec& model = spec.model();
  return model::LoadModelConfig(model.config().empty() ? model.init() + "/config.json"
                                                       : model.config())
      .value_or(model::ModelConfig());
}

class PlannerSource : public lifecycle::PlanSource {
 public:
  absl::StatusOr<v1::StepPlan> Plan(const v1::JobSpec& spec,
                                    const std::vector<v1::Placement>& placements,
                                    const std::vector<v1::NodeInventory>& nodes) override {
    const planner::ClusterShape cluster = ShapeOf(spec, placements, nodes);
    const model::ModelConfig model = ModelOf(spec);
    // What an earlier attempt taught holds for the next.
    const auto running = running_.find(spec.name());
    if (running == running_.end()) {
      return planner::MakePlan(spec, model, cluster, planner::CostModel(spec, model, cluster));
    }
    return planner::MakePlan(spec, model, cluster, running->second.costs,
                             planner::HintsFrom(running->second.recent));
  }

  void Started(const v1::Job& job, const v1::StepPlan& plan,
               const std::vector<v1::NodeInventory>& nodes) override {
    const v1::JobSpec& spec = job.spec();
    const auto& placements = job.attempts(job.attempts_size() - 1).placements();
    const model::ModelConfig model = ModelOf(spec);
    const planner::ClusterShape cluster =
        ShapeOf(spec, {placements.begin(), placements.end()}, nodes);
    Running& running =
        running_
            .try_emplace(spec.name(),
                         Running{model, {}, planner::CostModel(spec, model, cluster), {}})
            .first->second;
    running.plan = plan;
    running.recent.clear();
  }

  std::optional<v1::StepPlan> Observe(const v1::Job& job, const v1::StepReport& merged) override {
    // An attempt that began under an earlier coordinator keeps the plan that it has.
    const auto found = running_.find(job.spec().name());
    if (found == running_.end()) return std::nullopt;
    Running& running = found->second;
    running.costs.ObserveStep(job.spec(), running.model, running.plan, merged);
    if (running.recent.size() == kRecentSteps) running.recent.erase(running.recent.begin());
    running.recent.push_back(merged);
    std::optional<v1::StepPlan> next = planner::Replan(job.spec(), running.plan, running.recent);
    if (next.has_value()) {
      running.plan = *next;
      running.recent.clear();  // the next change is decided on what this one brings
    }
    return next;
  }

  void Forget(const v1::Job& job) override { running_.erase(job.spec().name()); }

 private:
  struct Running {
    model::ModelConfig model;
    v1::StepPlan plan;
    planner::CostModel costs;
    std::vector<v1::StepReport> recent;  // oldest first
  };

  std::map<std::string, Running> running_;  // by job id
};

}  // namespace

std::unique_ptr<lifecycle::PlanSource> NewPlannerSource() {
  return std::make_unique<PlannerSource>();
}

}  // namespace ringleader
