#include "coordinator/planner/planner.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/numbers/mean.h"
#include "base/status_macros.h"
#include "coordinator/planner/candidates.h"
#include "coordinator/planner/cost/memory.h"
#include "coordinator/planner/deal/sample_steps.h"
#include "coordinator/planner/head_choices.h"
#include "coordinator/planner/simulate/pricer.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "model_shape/model_config.h"
#include "patterns/pattern.h"

namespace ringleader::planner {
namespace {

using v1::ParallelismSpec;

// Predictions closer than this are a tie, which the simpler or earlier candidate wins.
constexpr double kTie = 0.005;

template <typename... Args>
absl::Status Invalid(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return absl::InvalidArgumentError(absl::StrFormat(format, args...));
}

absl::Status CheckCluster(const v1::JobSpec& spec, const ClusterShape& cluster) {
  const int64_t slots = int64_t{cluster.nodes} * cluster.trainers_per_node;
  const int64_t needed = spec.resources().trainers();
  if (cluster.trainers_per_node > 0 && slots < needed) {
    return Invalid(
        "resources.trainers: %d trainers do not fit on %d nodes × %d = %d; ask for more nodes or "
        "fewer trainers",
        needed, cluster.nodes, cluster.trainers_per_node, slots);
  }
  const GroupShape group = RingGroupOf(spec, cluster);
  if (spec.parallelism().ring() == ParallelismSpec::HIERARCHICAL && !group.regular &&
      spec.parallelism().ring_window() == 0) {
    const uint32_t heads = jobspec::HeadRanks(spec.parallelism());
    return Invalid(
        "parallelism.ring: hierarchical needs a context (%d) that is a multiple of every node's "
        "trainers (%s)%s; choose flat, place the job on nodes of equal size, or give "
        "parallelism.ring_window",
        spec.parallelism().context(),
        cluster.trainers_per_node > 0 ? absl::StrFormat("%d", cluster.trainers_per_node)
                                      : "unequal",
        heads > 1 ? absl::StrFormat(", which parallelism.heads (%d) divides", heads) : "");
  }
  return absl::OkStatus();
}

void AddReasons(const ParallelismSpec& asked, const GroupShape& group,
                const std::vector<v1::StepPlan>& tried, v1::StepPlan* plan) {
  const bool forced_layout = asked.layout() != ParallelismSpec::LAYOUT_UNSPECIFIED;
  const bool forced_ring = asked.ring() != ParallelismSpec::RING_UNSPECIFIED;
  if (asked.context() == 1) {
    plan->add_reasons("one trainer holds a whole sequence: nothing is dealt and nothing travels");
    return;
  }
  const v1::Prediction& mine = plan->prediction();
  if (const uint32_t heads = jobspec::HeadRanks(asked); heads > 1) {
    plan->add_reasons(
        absl::StrFormat("heads as %s: %d trainers at a time attend to all that they hold with "
                        "1/%d of the heads each; for that each sends %.4g GB in a step, %.4g s",
                        plan->heads() > 0 ? "predicted to be fastest" : "parallelism.heads asks",
                        heads, heads, mine.head_bytes() / 1e9, mine.head_seconds()));
  }
  if (jobspec::RingRanks(asked) == 1) return;
  plan->add_reasons(
      absl::StrFormat("%s: the busiest rank does %.3fx the mean work, the busiest ring step %.3fx",
                      NameOf(*plan), mine.worker_imbalance(), mine.step_imbalance()));
  if (forced_layout) plan->add_reasons("layout as parallelism.layout asks");
  if (forced_ring) plan->add_reasons("ring as parallelism.ring asks");
  if (const uint32_t groups = jobspec::HeadGroups(asked); groups > 1) {
    plan->add_reasons(absl::StrFormat(
        "keys and values are gathered in %d groups of heads, as %s: those of the next group travel "
        "while a group is attended with",
        groups,
        plan->head_groups() > 0 ? "is predicted to be fastest" : "parallelism.head_groups asks"));
  }
  if (asked.ring_window() > 0) {
    plan->add_reasons(
        absl::StrFormat("windows of %d trainers as parallelism.ring_window asks: a hop between "
                        "windows hides behind "
                        "%d steps inside",
                        plan->ring().inner(), plan->ring().inner()));
  } else if (plan->ring().kind() == ParallelismSpec::HIERARCHICAL) {
    const uint32_t window = plan->ring().inner();
    plan->add_reasons(absl::StrFormat(
        "a group spans %d nodes of %d trainers: a hop between %s hides behind %d steps inside",
        group.outer, group.inner,
        window == static_cast<uint32_t>(group.inner)
            ? "nodes"
            : absl::StrFormat("windows of %d trainers, which nodes are divided into,", window),
        window));
  }
  // The best of every other layout, and of this layout every other ring.
  std::map<std::pair<ParallelismSpec::Layout, std::string>, const v1::StepPlan*> rivals;
  for (const v1::StepPlan& other : tried) {
    const bool same_layout = other.layout() == plan->layout();
    if (same_layout && !HasNewRing(*plan, other)) continue;
    const v1::StepPlan*& rival =
        rivals[{other.layout(), same_layout ? NameOf(other) : std::string()}];
    if (rival == nullptr ||
        other.prediction().step_seconds() < rival->prediction().step_seconds()) {
      rival = &other;
    }
  }
  for (const auto& [key, rival] : rivals) {
    plan->add_reasons(absl::StrFormat(
        "%s would take %.4g s a step, not %.4g s (imbalance %.2fx, waits %.4g s)", NameOf(*rival),
        rival->prediction().step_seconds(), mine.step_seconds(),
        rival->prediction().worker_imbalance(), rival->prediction().wait_seconds()));
  }
}

// `candidate` with its price by `cost_model`, as far as it takes to compare; without one, if the
// model is not known.
absl::StatusOr<v1::StepPlan> Try(const Candidate& candidate, const v1::JobSpec& spec,
                                 const model::ModelConfig& model, const ClusterShape& cluster,
                                 const CostModel& cost_model, Pricer* pricer) {
  v1::StepPlan plan;
  plan.set_version(1);
  plan.set_effective_step(1);
  Apply(candidate, spec, &plan);
  if (!model.known()) {
    plan.add_reasons(
        "chosen by pattern and nodes alone: the model's config.json cannot be read here");
    return plan;
  }
  const MemoryEstimate memory = EstimateMemory(spec, model, cluster, candidate.ring);
  RETURN_IF_ERROR(CheckMemory(memory, spec, model, cluster));
  ASSIGN_OR_RETURN(*plan.mutable_prediction(), pricer->Compare(plan, cost_model));
  return plan;
}

// What it costs to compare all candidates, and to price the one that is chosen.
PlanCost CostOfAll(const v1::JobSpec& spec, const model::ModelConfig& model,
                   const std::vector<Candidate>& candidates) {
  std::set<ParallelismSpec::Layout> layouts;
  int compared = 0;
  for (const Candidate& candidate : candidates) {
    layouts.insert(candidate.layout);
    compared += candidate.ring != ParallelismSpec::ALL_GATHER;
  }
  return CostOf(spec, model, static_cast<int>(layouts.size()), compared);
}

// What each layer keeps for backward may lie in host memory.
void AddHostReason(const v1::JobSpec& spec, const model::ModelConfig& model,
                   const ClusterShape& cluster, v1::StepPlan* plan) {
  const MemoryEstimate memory = EstimateMemory(spec, model, cluster, plan->ring().kind());
  const double bytes = HostBytes(memory, spec, cluster);
  if (bytes <= 0) return;
  plan->add_reasons(
      absl::StrFormat("at least %.1f GiB of what a trainer's layers keep for backward wait in host "
                      "memory (resources.offload); the prediction takes its copies for hidden",
                      bytes / (1024.0 * 1024 * 1024)));
}

// Leaves of `candidates` the one that `kept` chose, if it is there.
bool Keep(const v1::StepPlan& kept, std::vector<Candidate>* candidates) {
  for (const Candidate& candidate : *candidates) {
    if (candidate.layout != kept.layout() || candidate.stripe != kept.stripe() ||
        candidate.ring != kept.ring().kind() || candidate.window != kept.ring().inner()) {
      continue;
    }
    *candidates = {Candidate(candidate)};
    return true;
  }
  return false;
}

std::string KeepReason(const v1::StepPlan& kept, bool keeps) {
  return keeps ? "layout, ring and groups are those of the attempt whose checkpoint this one goes "
                 "on from: sums are in the same order"
               : absl::StrFormat(
                     "the attempt whose checkpoint this one goes on from had %s, which "
                     "these nodes do not allow: losses may differ in their last bits",
                     NameOf(kept));
}

void SetMemory(const v1::JobSpec& spec, const model::ModelConfig& model,
               const ClusterShape& cluster, v1::StepPlan* plan) {
  plan->mutable_prediction()->set_memory_bytes(
      static_cast<uint64_t>(EstimateMemory(spec, model, cluster, plan->ring().kind()).total()));
}

// What plans of one job have in common, but for its layout and ring: how many trainers share out
// heads.
struct Way {
  v1::JobSpec spec;
  GroupShape group;
  std::vector<Candidate> candidates = {};
  bool keeps = false;  // what an earlier attempt's plan had
  std::unique_ptr<Pricer> pricer = nullptr;
  std::vector<v1::StepPlan> tried = {};
  absl::Status refused = absl::OkStatus();  // the first of its candidates that cannot be
};

absl::StatusOr<Way> PrepareWay(const v1::JobSpec& spec, const model::ModelConfig& model,
                               const ClusterShape& cluster, const v1::StepPlan* kept) {
  RETURN_IF_ERROR(CheckCluster(spec, cluster));
  RETURN_IF_ERROR(jobspec::CheckModel(spec, model));
  Way way = {.spec = spec, .group = RingGroupOf(spec, cluster)};
  const bool by_documents = kept != nullptr && jobspec::IsByDocuments(kept->layout());
  ASSIGN_OR_RETURN(way.candidates, Candidates(spec, way.group, by_documents));
  way.keeps = kept != nullptr && Keep(*kept, &way.candidates);
  return way;
}

// Prices all candidates; with an unknown model takes the first. `of_data`: hints that come from no
// report; the way's pricer goes on reading them.
absl::Status CompareCandidates(const model::ModelConfig& model, const ClusterShape& cluster,
                               const CostModel& usual, const patterns::PatternHints& of_data,
                               const PlanLimits& limits, Way* way) {
  std::set<Pricer::Layout> layouts;
  for (const Candidate& one : way->candidates) layouts.insert({one.layout, one.stripe});
  way->pricer = std::make_unique<Pricer>(way->spec, model, cluster, of_data, layouts);
  for (const Candidate& candidate : way->candidates) {
    if (limits.stop && limits.stop()) return absl::CancelledError("the planner was stopped");
    absl::StatusOr<v1::StepPlan> plan =
        Try(candidate, way->spec, model, cluster, usual, way->pricer.get());
    if (plan.ok()) {
      way->tried.push_back(*std::move(plan));
      if (!model.known()) break;
    } else if (way->refused.ok()) {
      way->refused = plan.status();
    }
  }
  return absl::OkStatus();
}

// Why so many trainers share out heads, where the planner picked.
void AddHeadReasons(const std::vector<Way>& ways, const std::vector<std::string>& refusals,
                    const v1::StepPlan* kept, v1::StepPlan* plan) {
  if (kept != nullptr && kept->heads() > 0) return;  // KeepReason() says why
  std::map<uint32_t, std::vector<const Way*>> by_heads;
  for (const Way& way : ways) {
    by_heads[jobspec::HeadRanks(way.spec.parallelism())].push_back(&way);
  }
  for (const auto& [heads, alike] : by_heads) {
    if (heads == plan->heads()) continue;
    const v1::StepPlan* fastest = nullptr;
    for (const Way* way : alike) {
      for (const v1::StepPlan& tried : way->tried) {
        if (fastest == nullptr ||
            tried.prediction().step_seconds() < fastest->prediction().step_seconds()) {
          fastest = &tried;
        }
      }
    }
    if (fastest == nullptr) {
      plan->add_reasons(absl::StrFormat("heads are not shared out among %d: %s", heads,
                                        std::string(alike.front()->refused.message())));
      continue;
    }
    const v1::StepPlan& rival = *fastest;
    plan->add_reasons(absl::StrFormat(
        "%s would take %.4g s a step with %s, not %.4g s (the exchange of heads %.4g s, exposed "
        "communication in all %.4g s)",
        heads == 1 ? "heads whole on each trainer"
                   : absl::StrFormat("heads shared out among %d trainers", heads),
        rival.prediction().step_seconds(), NameOf(rival), plan->prediction().step_seconds(),
        rival.prediction().head_seconds(), rival.prediction().exposed_communication_seconds()));
  }
  for (const std::string& refusal : refusals) plan->add_reasons(refusal);
}

// Heads the reasons that compare plans, whose seconds and imbalance are not those of the prediction
// where that goes by another density than the pattern's `assumed` one.
void HeadReasons(const ParallelismSpec& asked, double assumed, v1::StepPlan* plan) {
  constexpr double kShown = 5e-4;  // of a density, as the reason writes it
  const double priced = plan->prediction().density();
  if (asked.context() == 1 || std::abs(priced - assumed) < kShown * assumed) return;
  plan->add_reasons(absl::StrFormat(
      "compared at the pattern's assumed density (%.3g %%), not at the prediction's (%.3g %%):",
      100 * assumed, 100 * priced));
  std::rotate(plan->mutable_reasons()->begin(), std::prev(plan->mutable_reasons()->end()),
              plan->mutable_reasons()->end());
}

// Adds to the plan that was chosen what is not compared: reasons, weights, and the price of all of
// it at `cost_model` and `hints`.
absl::Status CompletePlan(const Way& way, const model::ModelConfig& model,
                          const ClusterShape& cluster, const CostModel& cost_model,
                          const CostModel& usual, const patterns::PatternHints& hints,
                          const v1::StepPlan* kept, v1::StepPlan* plan) {
  const v1::JobSpec& spec = way.spec;
  AddReasons(spec.parallelism(), way.group, way.tried, plan);
  AddHostReason(spec, model, cluster, plan);
  if (kept != nullptr) {
    plan->add_reasons(KeepReason(*kept, way.keeps));
    plan->set_version(kept->version() + (way.keeps ? 0 : 1));
  }
  // The usual speed again: who trains which sample decides the order of sums.
  if (way.keeps) {
    *plan->mutable_sample_weights() = kept->sample_weights();
    *plan->mutable_earlier_weights() = kept->earlier_weights();
    plan->set_weights_from_step(kept->weights_from_step());
    *plan->mutable_group_permille() = kept->group_permille();
    *plan->mutable_earlier_shapes() = kept->earlier_shapes();
    plan->set_shape_from_step(kept->shape_from_step());
  } else {
    RETURN_IF_ERROR(WeighSamples(spec, model, usual, *way.pricer, plan));
  }
  Pricer measured(spec, model, cluster, hints);
  // What was compared was laid out without weights.
  const bool is_weighed = jobspec::IsByDocuments(plan->layout()) && !hints.document_tokens.empty();
  const bool is_measured =
      hints.density > 0 || hints.slashes > 0 || hints.verticals > 0 || is_weighed;
  Pricer& same_tiles = is_measured ? measured : *way.pricer;
  const double assumed = plan->prediction().density();
  ASSIGN_OR_RETURN(*plan->mutable_prediction(), same_tiles.Price(*plan, cost_model));
  HeadReasons(spec.parallelism(), assumed, plan);
  if (const RingBytes& bytes = same_tiles.ring_bytes(); bytes.sent < bytes.whole) {
    plan->add_reasons(absl::StrFormat(
        "hops of the ring carry what their receivers attend to, known before the data: %.4g of "
        "%.4g GB that a trainer would send in a step",
        bytes.sent / 1e9, bytes.whole / 1e9));
  }
  if (jobspec::IsByDocuments(plan->layout())) {
    ASSIGN_OR_RETURN(std::string reason, same_tiles.ReasonByDocuments(*plan));
    plan->add_reasons(std::move(reason));
  }
  if (spec.data().batching() == v1::DataSpec::SAMPLES && !plan->sample_weights().empty()) {
    const v1::SampleWeight &least = plan->sample_weights(0),
                           &most = *plan->sample_weights().rbegin();
    plan->add_reasons(
        absl::StrFormat("samples are dealt to %d group%s by predicted milliseconds (%d tokens "
                        "%.4g, %d tokens %.4g)",
                        spec.parallelism().data(), spec.parallelism().data() == 1 ? "" : "s",
                        least.tokens(), least.milliseconds(), most.tokens(), most.milliseconds()));
  }
  SetMemory(spec, model, cluster, plan);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::StepPlan> MakePlan(const v1::JobSpec& asked, const model::ModelConfig& model,
                                      const ClusterShape& cluster, const CostModel& cost_model,
                                      const patterns::PatternHints& hints, const PlanLimits& limits,
                                      const v1::StepPlan* kept) {
  RETURN_IF_ERROR(jobspec::CheckEnumerators(asked));
  const HeadChoices choices = HeadChoicesOf(asked, model, kept);
  std::vector<Way> ways;
  std::vector<std::string> refusals = choices.refusals;
  PlanCost cost;
  for (const v1::JobSpec& spec : choices.jobs) {
    absl::StatusOr<Way> way = PrepareWay(spec, model, cluster, kept);
    if (!way.ok() && ways.empty()) return way.status();
    if (!way.ok()) {
      refusals.emplace_back(way.status().message());
      continue;
    }
    if (model.known()) cost += CostOfAll(spec, model, way->candidates);
    ways.push_back(*std::move(way));
  }
  if (model.known()) RETURN_IF_ERROR(CheckCost(cost, asked, limits));

  // Not by what reports say: a new attempt from the start adds in the same order as the last.
  const CostModel usual = cost_model.Unfitted();
  const patterns::PatternHints of_data = {.document_tokens = hints.document_tokens};
  Way* chosen = nullptr;
  const v1::StepPlan* best = nullptr;
  for (Way& way : ways) {
    RETURN_IF_ERROR(CompareCandidates(model, cluster, usual, of_data, limits, &way));
    for (v1::StepPlan& plan : way.tried) {
      if (jobspec::PicksHeadGroups(asked.parallelism())) {
        plan.set_head_groups(jobspec::HeadGroups(way.spec.parallelism()));
      }
      const bool is_better = best == nullptr || plan.prediction().step_seconds() <
                                                    best->prediction().step_seconds() * (1 - kTie);
      if (!is_better) continue;
      best = &plan;
      chosen = &way;
    }
  }
  if (best == nullptr) return ways.front().refused;
  v1::StepPlan plan = *best;
  if (jobspec::PicksHeads(asked.parallelism())) {
    plan.set_heads(jobspec::HeadRanks(chosen->spec.parallelism()));
    AddHeadReasons(ways, refusals, kept, &plan);
  }
  if (!model.known()) return plan;
  for (const Way& way : ways) {  // rivals of the plan, in other groups of heads
    if (&way == chosen || jobspec::HeadRanks(way.spec.parallelism()) !=
                              jobspec::HeadRanks(chosen->spec.parallelism())) {
      continue;
    }
    chosen->tried.insert(chosen->tried.end(), way.tried.begin(), way.tried.end());
  }
  RETURN_IF_ERROR(CompletePlan(*chosen, model, cluster, cost_model, usual, hints, kept, &plan));
  return plan;
}

absl::StatusOr<v1::Prediction> Predict(const v1::JobSpec& spec, const model::ModelConfig& model,
                                       const ClusterShape& cluster, const CostModel& cost_model,
                                       const v1::StepPlan& plan,
                                       const patterns::PatternHints& hints) {
  return Pricer(spec, model, cluster, hints).Price(plan, cost_model);
}

patterns::PatternHints HintsFrom(const v1::JobSpec& spec, std::span<const v1::StepReport> recent) {
  const auto attention = jobspec::AttentionOptionsOf(spec.attention());
  if (!attention.ok() || patterns::DefinitionOf(attention->pattern).goes_by_distance()) {
    return {};
  }
  const std::set<uint32_t> dense(attention->dense_layers.begin(), attention->dense_layers.end());
  Mean slashes, verticals, density;
  for (const v1::StepReport& report : recent) {
    for (const v1::LayerReport& layer : report.layers()) {
      if (dense.contains(layer.layer())) continue;
      // A step whose documents are all attended to densely chooses nothing, and tells nothing.
      if (layer.slashes() > 0) {
        slashes.Add(layer.slashes());
        verticals.Add(layer.verticals());
      }
      if (layer.density() > 0) density.Add(layer.density());
    }
  }
  return {.slashes = slashes.value(), .verticals = verticals.value(), .density = density.value()};
}

}  // namespace ringleader::planner
