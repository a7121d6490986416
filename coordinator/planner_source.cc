#include "coordinator/planner_source.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <new>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/checksum.h"
#include "base/net/message_size.h"
#include "base/process/task_threads.h"
#include "base/status_macros.h"
#include "coordinator/planner/cost/measured.h"
#include "coordinator/planner/deal/reweigh.h"
#include "coordinator/planner/live/live_plan.h"
#include "coordinator/planner/live/reshape.h"
#include "google/protobuf/util/message_differencer.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/model_config.h"
#include "proto/timestamps.h"
#include "spdlog/spdlog.h"

namespace ringleader {
namespace {

// Reports that say what a job's patterns keep: enough to even out one step's chance.
constexpr size_t kRecentSteps = 16;

using MeasuredList = std::shared_ptr<const store::MeasurementList>;

std::vector<std::string> DevicesOf(const v1::JobSpec& spec,
                                   const std::vector<v1::NodeInventory>& nodes) {
  std::vector<std::string> devices;
  for (const v1::NodeInventory& node : nodes) devices.push_back(planner::DeviceOf(spec, node));
  return devices;
}

planner::ClusterShape ClusterOf(const v1::JobSpec& spec,
                                const std::vector<v1::Placement>& placements,
                                const std::vector<v1::NodeInventory>& nodes,
                                const store::MeasurementList& measured) {
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
  planner::UseLinks(measured.links, DevicesOf(spec, nodes), &cluster);
  return cluster;
}

// Whether all runs of the job on such trainers have the same losses to the last bit: they must not
// be planned by what was measured between them.
bool HasFixedSums(const v1::JobSpec& spec) {
  return spec.training().deterministic() || spec.resources().engine() != v1::ResourcesSpec::CUDA;
}

// Whether the plan may change, with the order of sums, while the job runs.
bool MayChange(const v1::JobSpec& spec) {
  const v1::ParallelismSpec::Replan replan = spec.parallelism().replan();
  if (replan == v1::ParallelismSpec::ALWAYS) return true;
  return replan != v1::ParallelismSpec::NEVER && !HasFixedSums(spec);
}

// LearnedShapes.machines.
uint64_t MachinesOf(const google::protobuf::RepeatedPtrField<v1::Placement>& placements) {
  ChecksumStream nodes;
  for (const v1::Placement& placement : placements) {
    nodes.Update(placement.node().c_str(), placement.node().size() + 1);
  }
  return nodes.Digest();
}

// What a look for a better shape came to, on its way between threads.
struct Mailbox {
  absl::Mutex mutex;
  std::optional<planner::Reshaping> found ABSL_GUARDED_BY(mutex);
  uint64_t version ABSL_GUARDED_BY(mutex) = 0;  // of the plan for which it was looked for
};

// Jobs whose plans may take seconds, all others, and previews have a thread each: none waits for
// another kind. Of the first two the controller asks for few at a time. Owners take turns.
constexpr size_t kMaxQueued = 1000, kMaxPreviews = 4;
constexpr uint32_t kManyRanks = 1024;

bool MayTakeLong(const v1::JobSpec& spec) {
  return spec.parallelism().context() > kManyRanks;
}

// How long the file of a job of an earlier release may take to be read.
constexpr absl::Duration kFilePatience = absl::Seconds(10);

double ThreadSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// What an earlier attempt taught holds for the next.
struct Learned {
  planner::CostModel costs;
  patterns::PatternHints hints;
};

class PlannerSource : public lifecycle::PlanSource {
 public:
  explicit PlannerSource(const PlannerOptions& options) : options_(options) {}
  ~PlannerSource() override { stopping_ = true; }

  void Plan(lifecycle::PlanRequest request, Done done) override {
    std::optional<Learned> learned;
    if (const auto running = running_.find(request.spec.name()); running != running_.end()) {
      learned = {running->second.costs,
                 planner::HintsFrom(running->second.spec, running->second.recent)};
    }
    const bool is_preview = request.is_preview, may_take_long = MayTakeLong(request.spec);
    const std::string owner = request.owner;
    const MeasuredList measured = MeasuredFor(request.spec);
    const auto work = [this, request = std::move(request), learned = std::move(learned), measured,
                       done] { done(Guarded(request, learned, *measured)); };
    TaskThreads& threads = is_preview ? previews_ : may_take_long ? long_plans_ : plans_;
    if (threads.TryRun(owner, work)) return;
    done(absl::ResourceExhaustedError(
        "the planner is busy with others that you asked for; try again in a moment"));
  }

  void Started(const v1::Job& job, const v1::StepPlan& plan,
               const std::vector<v1::NodeInventory>& nodes) override {
    Begin(job, plan, nodes, nullptr);
  }

  void Restored(const v1::Job& job, const v1::StepPlan& plan,
                const std::vector<v1::NodeInventory>& nodes,
                const std::vector<v1::StepReport>& reports) override {
    running_.erase(job.spec().name());
    Begin(job, plan, nodes, reports.empty() ? nullptr : &reports.back());
    Running& running = running_.at(job.spec().name());
    for (const v1::StepReport& report : reports) {
      Learn(report, &running);
      running.live->Relearn(report);
    }
  }

  void Measured(MeasuredList measured) override { measured_ = std::move(measured); }

  v1::MeasureRequest WhatToMeasure(const v1::Job& job) override {
    const v1::JobSpec& spec = job.spec();
    const bool cuda = spec.resources().engine() == v1::ResourcesSpec::CUDA;
    const model::ModelConfig model = jobspec::ModelOf(job.model_shape());
    v1::MeasureRequest request;
    if (!model.known()) return request;
    request.set_budget_milliseconds(
        static_cast<uint32_t>(options_.measure_seconds * (cuda ? 1000 : 100)));
    const v1::LatencyShape shape = planner::ShapeOf(spec, model);
    for (const v1::LatencyTable& table : measured_->tables) {
      if (!google::protobuf::util::MessageDifferencer::Equals(table.shape(), shape)) continue;
      *request.add_known_layers() = table.machine();
    }
    for (const v1::LinkSpeed& link : measured_->links) {
      *(link.between_nodes() ? request.add_known_links_between()
                             : request.add_known_links_inside()) = link.machine();
    }
    return request;
  }

  absl::StatusOr<v1::Measurements> Check(const v1::Job& job, const v1::NodeInventory& node,
                                         const v1::Measurements& measured) override {
    return planner::CheckMeasurements(
        measured, planner::ShapeOf(job.spec(), jobspec::ModelOf(job.model_shape())),
        planner::DeviceOf(job.spec(), node));
  }

  std::optional<v1::StepPlan> Observe(const v1::Job& job, const v1::StepReport& merged) override {
    // An attempt of an earlier release, which kept no plans, goes on with the plan that it has.
    const auto found = running_.find(job.spec().name());
    if (found == running_.end()) return std::nullopt;
    Running& running = found->second;
    Learn(merged, &running);
    {
      absl::MutexLock lock(&running.mailbox->mutex);
      if (running.mailbox->found.has_value()) {
        running.live->TakeShape(running.mailbox->version, *std::move(running.mailbox->found));
        running.mailbox->found.reset();
      }
    }
    const std::optional<v1::StepPlan> next = running.live->Observe(
        merged, absl::Now() - ToTime(merged.time()), running.densities, running.costs.measured());
    // An attempt's first steps take longer: its rings and buffers are made in them.
    const bool is_warm = running.recent.size() == kRecentSteps;
    if (!next.has_value() && is_warm && running.live->WantsShape(merged)) {
      LookForShape(job, merged, running);
    }
    return next;
  }

  std::vector<v1::SlowRank> SlowRanks(const v1::Job& job) override {
    const auto found = running_.find(job.spec().name());
    return found == running_.end() ? std::vector<v1::SlowRank>() : found->second.live->slow_ranks();
  }

  void Forget(const v1::Job& job) override { running_.erase(job.spec().name()); }

 private:
  struct Running {
    v1::JobSpec spec = {};  // as its plan runs it
    model::ModelConfig model;
    planner::CostModel costs;
    planner::ClusterShape cluster = {};
    uint64_t machines = 0;  // MachinesOf its placements
    std::optional<planner::LivePlan> live = {};
    std::shared_ptr<Mailbox> mailbox = {};
    std::vector<v1::StepReport> recent = {};  // oldest first
    balance::LengthDensities densities = {};
  };

  // What may decide on a job's plan: nothing where sums are in the same order in every run.
  const MeasuredList& MeasuredFor(const v1::JobSpec& spec) const {
    return HasFixedSums(spec) ? nothing_measured_ : measured_;
  }

  // `last`: the newest report of an attempt that began under an earlier coordinator.
  void Begin(const v1::Job& job, const v1::StepPlan& plan,
             const std::vector<v1::NodeInventory>& nodes, const v1::StepReport* last) {
    const v1::JobSpec spec = jobspec::PlannedJob(job.spec(), plan);
    const auto& placements = job.attempts(job.attempts_size() - 1).placements();
    const model::ModelConfig model = jobspec::ModelOf(job.model_shape());
    const planner::ClusterShape cluster =
        ClusterOf(spec, {placements.begin(), placements.end()}, nodes, *MeasuredFor(spec));
    Running& running =
        running_
            .try_emplace(spec.name(),
                         Running{.model = model,
                                 .costs = CostsOf(spec, model, cluster, nodes, *MeasuredFor(spec))})
            .first->second;
    const uint64_t machines = MachinesOf(placements);
    v1::StepPlan with_learned = plan;
    if (plan.learned().machines() != machines) with_learned.clear_learned();
    with_learned.mutable_learned()->set_machines(machines);
    const std::optional<planner::LivePlan> earlier = std::move(running.live);
    running.spec = spec;
    running.cluster = cluster;
    running.live.emplace(spec, std::move(with_learned), last, MayChange(spec));
    if (earlier.has_value() && running.machines == machines) running.live->GoOnFrom(*earlier);
    running.machines = machines;
    running.mailbox = std::make_shared<Mailbox>();
    running.recent.clear();
  }

  // In another thread; what comes of it is in the mailbox of a later report.
  void LookForShape(const v1::Job& job, const v1::StepReport& merged, const Running& running) {
    const v1::JobSpec& spec = running.spec;
    planner::ReshapeRequest request = {.spec = spec,
                                       .model = running.model,
                                       .cluster = running.cluster,
                                       .costs = running.costs,
                                       .hints = planner::HintsFrom(spec, running.recent),
                                       .plan = running.live->plan(),
                                       .taken = planner::MedianOf(running.recent),
                                       .misses = running.live->misses(),
                                       .link_halvings = running.live->link_halvings(),
                                       .steps_left = running.live->StepsLeft(merged),
                                       .change_costs = running.live->change_costs()};
    if (jobspec::TrainsAlikeByDocuments(spec)) {
      request.hints.document_tokens =
          planner::DocumentsFrom(running.recent, spec.data().sequence_length());
    }
    const auto look = [this, request = std::move(request), mailbox = running.mailbox,
                       name = job.name()] {
      const double end = ThreadSeconds() + options_.seconds;
      const absl::StatusOr<planner::Reshaping> found = planner::Reshape(
          request, {.seconds = options_.seconds, .bytes = options_.bytes, .stop = [&] {
                      return stopping_ || ThreadSeconds() > end;
                    }});
      if (!found.ok()) {
        spdlog::info("{}: no other layout was looked for: {}", name,
                     std::string(found.status().message()));
        return;
      }
      absl::MutexLock lock(&mailbox->mutex);
      mailbox->found = *found;
      mailbox->version = request.plan.version();
    };
    // Where the threads are busy with others, a later step looks again.
    (void)(MayTakeLong(spec) ? long_plans_ : plans_).TryRun(job.owner(), look);
  }

  static void Learn(const v1::StepReport& merged, Running* running) {
    running->costs.ObserveStep(running->spec, running->model, merged);
    planner::ObserveLengths(running->spec, running->model, merged, &running->densities);
    if (running->recent.size() == kRecentSteps) running->recent.erase(running->recent.begin());
    running->recent.push_back(merged);
  }

  // Before any report.
  static planner::CostModel CostsOf(const v1::JobSpec& spec, const model::ModelConfig& model,
                                    const planner::ClusterShape& cluster,
                                    const std::vector<v1::NodeInventory>& nodes,
                                    const store::MeasurementList& measured) {
    return {spec, model, cluster,
            planner::SlowestTable(measured.tables, planner::ShapeOf(spec, model),
                                  DevicesOf(spec, nodes))};
  }

  // Everything from here to Make() runs on a thread of the pool.
  absl::StatusOr<lifecycle::MadePlan> Guarded(const lifecycle::PlanRequest& request,
                                              const std::optional<Learned>& learned,
                                              const store::MeasurementList& measured) const {
    if (IsVain(request)) return absl::CancelledError("nobody waits for this plan");
    try {
      return Make(request, learned, measured);
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError(
          "there is not enough memory to make its plan; lower parallelism.context or "
          "data.sequence_length");
    }
  }

  bool IsVain(const lifecycle::PlanRequest& request) const {
    return stopping_ || (request.is_overtaken != nullptr && *request.is_overtaken);
  }

  absl::StatusOr<lifecycle::MadePlan> Make(const lifecycle::PlanRequest& request,
                                           const std::optional<Learned>& learned,
                                           const store::MeasurementList& measured) const {
    const v1::JobSpec& spec = request.spec;
    lifecycle::MadePlan made;
    // Jobs of earlier releases have no shape in their record: it is read now, if it can be.
    made.shape = request.shape ? *request.shape
                               : jobspec::ReadModelShape(spec.model(), request.owner, kFilePatience)
                                     .value_or(v1::ModelShape());
    const model::ModelConfig model = jobspec::ModelOf(made.shape);
    const planner::ClusterShape cluster =
        ClusterOf(spec, request.placements, request.nodes, measured);
    const double end = ThreadSeconds() + options_.seconds;
    bool is_late = false;
    const planner::PlanLimits limits = {
        .seconds = options_.seconds, .bytes = options_.bytes, .stop = [&] {
          is_late = ThreadSeconds() > end;
          return is_late || IsVain(request);
        }};
    const planner::CostModel costs =
        learned ? learned->costs : CostsOf(spec, model, cluster, request.nodes, measured);
    std::optional<v1::StepPlan> kept = request.kept;
    if (kept.has_value() && request.kept_was_missed) {
      kept = planner::WithoutNewestChange(*kept);
      kept->set_version(kept->version() + 1);  // newer than what the checkpoint may hold
    }
    absl::StatusOr<v1::StepPlan> plan = options_.make(
        spec, model, cluster, costs, learned ? learned->hints : patterns::PatternHints(), limits,
        kept.has_value() ? &*kept : nullptr);
    if (is_late) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("its plan took more than %g s of a processor (--plan-seconds); lower "
                          "parallelism.context, or set parallelism.layout and parallelism.ring",
                          options_.seconds));
    }
    if (!plan.ok()) return plan.status();
    if (kept.has_value() && kept->has_learned()) *plan->mutable_learned() = kept->learned();
    if (const size_t bytes = plan->ByteSizeLong(); bytes > kMaxPlanBytes) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "its plan has %d bytes, of which most say who trains which sequence; at most %d are "
          "allowed; lower training.global_batch",
          bytes, kMaxPlanBytes));
    }
    made.plan = *std::move(plan);
    return made;
  }

  const PlannerOptions options_;
  const MeasuredList nothing_measured_ = std::make_shared<store::MeasurementList>();
  MeasuredList measured_ = nothing_measured_;
  std::map<std::string, Running> running_;  // by job id
  std::atomic<bool> stopping_ = false;
  // Last: their threads end before what they use goes.
  TaskThreads plans_{1, kMaxQueued};
  TaskThreads long_plans_{1, kMaxQueued};
  TaskThreads previews_{1, kMaxPreviews};
};

}  // namespace

std::unique_ptr<lifecycle::PlanSource> NewPlannerSource(const PlannerOptions& options) {
  return std::make_unique<PlannerSource>(options);
}

}  // namespace ringleader
