#include "coordinator/api/metrics/job_metrics.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "coordinator/api/metrics/gauge_family.h"
#include "proto/phase_fields.h"

namespace ringleader::api {
namespace {

// The families of all running jobs while they are filled, a job at a time.
class JobFamilies {
 public:
  // `hostnames`: [node's id] → its host's name.
  explicit JobFamilies(std::map<std::string, std::string> hostnames)
      : hostnames_(std::move(hostnames)) {}

  void AddProgress(const v1::Job& job) {
    const Labels labels = {{"job_name", job.spec().name()}};
    const v1::Progress& progress = job.progress();
    Add("ringleader_job_completed_steps", "Steps that a running job completed.", labels,
        static_cast<double>(progress.step()));
    Add("ringleader_job_total_steps", "Steps that a running job is to complete.", labels,
        static_cast<double>(progress.total_steps()));
    if (job.spec().checkpoint().every_steps() > 0) {
      Add("ringleader_job_checkpoint_step", "Step of a running job's newest durable checkpoint.",
          labels, static_cast<double>(progress.checkpoint_step()));
    }
    Add("ringleader_job_attempts", "Attempts of a running job, this one included.", labels,
        job.attempts().empty() ? 0 : job.attempts().rbegin()->number());
    if (job.has_last_eval()) {
      Add("ringleader_job_heldout_loss", "Loss of a running job's last evaluation.", labels,
          job.last_eval().loss());
    }
    if (progress.step() == 0) return;
    Add("ringleader_job_trained_tokens", "Tokens that a running job has trained on.", labels,
        static_cast<double>(progress.tokens()));
    Add("ringleader_job_loss", "Training loss of a running job's last step.", labels,
        progress.loss());
    Add("ringleader_job_tokens_per_second", "Tokens that a running job trains in a second.", labels,
        progress.tokens_per_second());
    Add("ringleader_job_worker_imbalance_ratio",
        "Attention work of a running job's busiest rank over the mean.", labels,
        progress.worker_imbalance());
  }

  // What became of the plan of its attempt, and who holds the others up.
  void AddAttempt(const v1::Job& job) {
    if (job.attempts().empty()) return;
    const v1::Attempt& attempt = *job.attempts().rbegin();
    const std::string& name = job.spec().name();
    for (const auto& [text, state] : {std::pair{"announced", v1::PlanChange::ANNOUNCED},
                                      {"in_force", v1::PlanChange::IN_FORCE},
                                      {"missed", v1::PlanChange::MISSED}}) {
      Add("ringleader_job_plan_changes",
          "Changes of layout or ring in a running job's attempt, by what became of them.",
          {{"job_name", name}, {"state", text}},
          static_cast<double>(
              std::ranges::count(attempt.plan_changes(), state, &v1::PlanChange::state)));
    }
    Add("ringleader_job_slow_ranks",
        "Ranks of a running job that take longer than others for the same work.",
        {{"job_name", name}}, attempt.slow_ranks_size());
    for (const v1::Placement& placement : attempt.placements()) {
      const std::string node(absl::StripPrefix(placement.node(), "nodes/"));
      const auto hostname = hostnames_.find(node);
      Add("ringleader_job_trainers", "Trainers of a running job on a node, with its host's name.",
          {{"job_name", name},
           {"node", node},
           {"hostname", hostname == hostnames_.end() ? node : hostname->second}},
          placement.trainers());
    }
  }

  void AddStep(const std::string& job, const v1::StepReport& step) {
    const Labels labels = {{"job_name", job}};
    Add("ringleader_job_step_seconds", "Time that a running job's last step took.", labels,
        step.step_seconds());
    Add("ringleader_job_gradient_norm", "Norm of the gradient of a running job's last step.",
        labels, step.gradient_norm());
    Add("ringleader_job_learning_rate", "Learning rate of a running job's last step.", labels,
        step.learning_rate());
    Add("ringleader_job_peak_memory_bytes",
        "Peak device memory of a running job's last step, fullest rank.", labels,
        static_cast<double>(step.peak_memory_bytes()));
    Add("ringleader_job_ring_step_imbalance_ratio",
        "Attention work of a running job's busiest ring step over the mean.", labels,
        step.step_imbalance());
    Add("ringleader_job_layer_imbalance_ratio",
        "Attention time of the longest rank over the mean, by layer and ring step of a running "
        "job's "
        "last step, weighted by that time.",
        labels, step.ring_imbalance());
    Add("ringleader_job_group_imbalance_ratio",
        "Time that the longest data-parallel group of a running job computed over the mean, last "
        "step.",
        labels, step.group_imbalance());
    if (step.head_bytes() > 0) {
      Add("ringleader_job_head_exchange_bytes",
          "Bytes that a rank sent in a running job's last step to share out heads, at most.",
          labels, static_cast<double>(step.head_bytes()));
    }
    ForEachPhase(step.phases(), [&](const std::string& phase, double phase_seconds) {
      Add("ringleader_job_phase_seconds",
          "Time by phase of a running job's last step, slowest rank.",
          {{"job_name", job}, {"phase", phase}}, phase_seconds);
    });
    const int series = kSeriesOfLayer * step.layers_size();
    if (layer_series_ + series > kMaxLayerSeries) return;
    layer_series_ += series;
    for (const v1::LayerReport& layer : step.layers()) AddLayer(job, layer);
  }

  void AppendTo(std::vector<prometheus::MetricFamily>* families) {
    for (auto& [name, family] : families_) families->push_back(std::move(family));
  }

 private:
  using Labels = std::vector<prometheus::ClientMetric::Label>;

  void Add(const char* name, const char* help, Labels labels, double number) {
    prometheus::MetricFamily& family = families_[name];
    if (family.name.empty()) family = GaugeFamily(name, help);
    AddGauge(&family, std::move(labels), number);
  }

  static constexpr int kSeriesOfLayer = 5;  // that AddLayer adds, at most
  void AddLayer(const std::string& job, const v1::LayerReport& layer) {
    const Labels labels = {{"job_name", job}, {"layer", absl::StrCat(layer.layer())}};
    Add("ringleader_job_layer_density_ratio",
        "Share of causal tiles that a layer visited, mean over heads.", labels, layer.density());
    if (layer.recall() >= 0) {
      Add("ringleader_job_layer_recall_ratio",
          "Attention mass that a layer kept on the rows it was estimated from.", labels,
          layer.recall());
    }
    if (layer.has_probed_recall()) {
      Add("ringleader_job_layer_probed_recall_ratio",
          "Attention mass that a layer kept on sampled rows, by the newest probe, mean over heads.",
          labels, layer.probed_recall());
    }
    if (layer.balanced() > 0) {
      Add("ringleader_job_layer_anchor_missed_ratio",
          "Share of a layer's micro-batches moved by attention.balance that missed the anchor.",
          labels,
          static_cast<double>(layer.anchor_missed()) / static_cast<double>(layer.balanced()));
    }
    double tiles = static_cast<double>(layer.column_tiles());
    for (const uint64_t of_ring_step : layer.tiles_per_ring_step()) {
      tiles += static_cast<double>(of_ring_step);
    }
    Add("ringleader_job_layer_tiles", "Attention tiles that a layer visited, all ranks and heads.",
        labels, tiles);
  }

  const std::map<std::string, std::string> hostnames_;
  int layer_series_ = 0;
  std::map<std::string, prometheus::MetricFamily> families_;  // by name
};

// Ids of the newest kMaxJobSeries jobs that run. A page holds fewer where their files are long.
absl::StatusOr<std::vector<std::string>> RunningJobs(store::ReadTransaction& transaction) {
  std::vector<std::string> ids;
  store::JobQuery query = {.terms = {{.value = "RUNNING"}}};
  do {
    query.limit = kMaxJobSeries - static_cast<int>(ids.size());
    ASSIGN_OR_RETURN(const store::JobPage page, transaction.ListJobs(query));
    for (const v1::Job& job : page.jobs) ids.push_back(job.spec().name());
    query.before_sequence = page.last_sequence;
  } while (query.before_sequence != 0 && ids.size() < kMaxJobSeries);
  return ids;
}

}  // namespace

absl::Status CollectRunningJobs(store::ReadTransaction& transaction,
                                std::vector<prometheus::MetricFamily>* families) {
  ASSIGN_OR_RETURN(const std::vector<std::string> running, RunningJobs(transaction));
  ASSIGN_OR_RETURN(const std::vector<v1::Node> nodes, transaction.ListNodes());
  std::map<std::string, std::string> hostnames;
  for (const v1::Node& node : nodes) {
    hostnames[std::string(absl::StripPrefix(node.name(), "nodes/"))] = node.inventory().hostname();
  }
  JobFamilies all(std::move(hostnames));
  for (const std::string& id : running) {
    const absl::StatusOr<v1::Job> job = transaction.GetJob(id);
    if (absl::IsDataLoss(job.status())) continue;  // others have theirs
    RETURN_IF_ERROR(job.status());
    all.AddProgress(*job);
    all.AddAttempt(*job);
    if (job->progress().step() == 0) continue;
    const auto step = transaction.GetStep(id, job->progress().step());
    if (step.ok()) all.AddStep(id, *step);
    if (absl::IsNotFound(step.status()) || absl::IsDataLoss(step.status())) continue;
    RETURN_IF_ERROR(step.status());
  }
  all.AppendTo(families);
  return absl::OkStatus();
}

}  // namespace ringleader::api
