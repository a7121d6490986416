#include "coordinator/planner/deal/sample_steps.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "balance/dealing.h"
#include "base/status_macros.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/pattern.h"
#include "ring/division.h"

namespace ringleader::planner {
namespace {

// How many steps are drawn and dealt to predict those of a job by its lengths.
constexpr int kDrawnSteps = 16;

int64_t DenseLayers(const v1::JobSpec& spec, const model::ModelConfig& model) {
  if (spec.attention().pattern() == v1::AttentionSpec::DENSE) return model.layers;
  return std::min<int64_t>(model.layers, spec.attention().dense_layers_size());
}

// What attention of `tokens` at `density` was measured to take, over what the cost model, which was
// fitted to all that was measured, says of it; 1 where nothing was.
double MeasuredFactor(const v1::JobSpec& spec, const model::ModelConfig& model,
                      const CostModel& cost_model, uint64_t tokens, double density) {
  const double measured = cost_model.measured().Predict(static_cast<double>(tokens), density);
  const double tile = spec.attention().tile(), heads = static_cast<double>(model.heads);
  const double blocks = static_cast<double>(tokens) / tile;
  const Work work = {.tiles = density * heads * blocks * (blocks + 1) / 2,
                     .rows = static_cast<double>(tokens) * heads,
                     .calls = 1};
  const double modelled = 1e3 * (cost_model.Seconds(Phase::kAttentionForward, work) +
                                 cost_model.Seconds(Phase::kAttentionBackward, work));
  return measured > 0 && modelled > 0 ? measured / modelled : 1;
}

// Those that trainers deal by.
absl::StatusOr<balance::DealingRules> RulesOf(const v1::JobSpec& spec, const v1::StepPlan& plan) {
  ASSIGN_OR_RETURN(const patterns::AttentionOptions attention,
                   jobspec::AttentionOptionsOf(spec.attention()));
  ring::Division division = {.ranks = jobspec::RingRanks(spec.parallelism()),
                             .tile = attention.tile,
                             .stripe = static_cast<int64_t>(plan.stripe()),
                             .by_documents = jobspec::IsByDocuments(plan.layout()),
                             .heads = jobspec::HeadRanks(spec.parallelism())};
  ASSIGN_OR_RETURN(division.layout, jobspec::LayoutOf(plan.layout()));
  return balance::RulesForSamples(static_cast<int>(spec.parallelism().data()),
                                  static_cast<int64_t>(spec.data().sequence_length()), division,
                                  patterns::DefinitionOf(attention.pattern).goes_by_distance());
}

// Adds `scale` times every figure of `from`.
void AddScaled(const v1::Prediction& from, double scale, v1::Prediction* to) {
  const google::protobuf::Descriptor* const type = v1::Prediction::descriptor();
  const google::protobuf::Reflection* const fields = from.GetReflection();
  for (int i = 0; i < type->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* const field = type->field(i);
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_DOUBLE) continue;
    fields->SetDouble(to, field,
                      fields->GetDouble(*to, field) + scale * fields->GetDouble(from, field));
  }
}

// What samples take alone, without the optimizer, between the lengths that were priced. Shares are
// times what they are shares of, so that sums over samples are those of a step.
class PricedLengths {
 public:
  static absl::StatusOr<PricedLengths> Create(const v1::JobSpec& spec, const v1::StepPlan& plan,
                                              const CostModel& cost_model, Pricer& pricer) {
    PricedLengths priced;
    for (const uint64_t length : WeighedLengths(spec, plan.layout())) {
      ASSIGN_OR_RETURN(v1::Prediction alone,
                       pricer.PriceAlone(plan, cost_model, length, /*find_exposed=*/true));
      alone.set_density(alone.density() * Square(length));
      alone.set_worker_imbalance(alone.worker_imbalance() * alone.attention_seconds());
      alone.set_step_imbalance(alone.step_imbalance() * alone.attention_seconds());
      priced.rows_.emplace_back(length, std::move(alone));
    }
    return priced;
  }

  static double Square(uint64_t tokens) {
    return static_cast<double>(tokens) * static_cast<double>(tokens);
  }

  void AddTo(uint64_t tokens, double scale, v1::Prediction* sum) const {
    const auto above =
        std::lower_bound(rows_.begin(), rows_.end(), tokens,
                         [](const auto& row, uint64_t wanted) { return row.first < wanted; });
    const auto at = static_cast<double>(tokens);
    if (above == rows_.begin()) {
      AddScaled(above->second, scale * at / static_cast<double>(above->first), sum);
      return;
    }
    const auto& [low, below] = *(above - 1);
    // What a token takes runs along a line, so that what grows with the square is met.
    const double share = (at - static_cast<double>(low)) / static_cast<double>(above->first - low);
    AddScaled(below, scale * (1 - share) * at / static_cast<double>(low), sum);
    AddScaled(above->second, scale * share * at / static_cast<double>(above->first), sum);
  }

 private:
  std::vector<std::pair<uint64_t, v1::Prediction>> rows_;  // by length
};

using Batches = std::span<const balance::MicroBatch>;

// What each group computes until they meet: all, or micro-batch by micro-batch.
std::vector<std::vector<Batches>> MeetingsOf(const balance::Dealing& dealing, bool at_each) {
  if (!at_each) return {{dealing.groups.begin(), dealing.groups.end()}};
  std::vector<std::vector<Batches>> meetings(dealing.MostMicroBatches());
  for (const std::vector<balance::MicroBatch>& group : dealing.groups) {
    for (size_t i = 0; i < group.size(); ++i) meetings[i].push_back(Batches(group).subspan(i, 1));
  }
  return meetings;
}

absl::Status CheckLengths(std::span<const uint64_t> lengths, uint64_t most) {
  if (lengths.empty()) return absl::InvalidArgumentError("there is no length of a sample");
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] > 0 && lengths[i] <= most) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "length %d of the samples is %d tokens; from 1 to data.sequence_length (%d) "
        "fit a micro-batch",
        i + 1, lengths[i], most));
  }
  return absl::OkStatus();
}

}  // namespace

double SparseDensity(const v1::JobSpec& spec, const model::ModelConfig& model, double density) {
  const auto dense = static_cast<double>(DenseLayers(spec, model)),
             layers = static_cast<double>(model.layers);
  return dense < layers ? std::max(0.0, (density * layers - dense) / (layers - dense)) : 0;
}

absl::Status WeighSamples(const v1::JobSpec& spec, const model::ModelConfig& model,
                          const CostModel& cost_model, Pricer& pricer, v1::StepPlan* plan) {
  plan->clear_sample_weights();
  double milliseconds = 0, travel = 0;
  if (jobspec::IsByDocuments(plan->layout())) {
    ASSIGN_OR_RETURN(travel, pricer.TravelSeconds(*plan));
  }
  for (const uint64_t length : WeighedLengths(spec, plan->layout())) {
    ASSIGN_OR_RETURN(const v1::Prediction alone,
                     pricer.PriceAlone(*plan, cost_model, length, /*find_exposed=*/false));
    const double density = SparseDensity(spec, model, alone.density());
    const double factor =
        density > 0 ? MeasuredFactor(spec, model, cost_model, length, density) : 1;
    const double attention = 1e3 * alone.attention_seconds();
    // Sampled patterns vary; weights ascend.
    milliseconds = std::max(milliseconds, 1e3 * alone.step_seconds() + (factor - 1) * attention);
    v1::SampleWeight* const row = plan->add_sample_weights();
    row->set_tokens(length);
    row->set_milliseconds(milliseconds);
    row->set_attention_milliseconds(std::min(milliseconds, factor * attention));
    row->set_density(density);
    row->set_travel_milliseconds(1e3 * travel * static_cast<double>(length));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Prediction> PredictSamples(const v1::JobSpec& spec, const CostModel& cost_model,
                                              const v1::StepPlan& plan,
                                              std::span<const uint64_t> lengths, Pricer& pricer) {
  RETURN_IF_ERROR(CheckLengths(lengths, spec.data().sequence_length()));
  ASSIGN_OR_RETURN(const balance::SampleWeights weights, WeightsOf(plan));
  ASSIGN_OR_RETURN(const balance::DealingRules rules, RulesOf(spec, plan));
  ASSIGN_OR_RETURN(const PricedLengths priced,
                   PricedLengths::Create(spec, plan, cost_model, pricer));
  // By documents a sample is priced on one of the ranks that share the micro-batch.
  const double share =
      jobspec::IsByDocuments(plan.layout()) ? 1.0 / spec.parallelism().context() : 1.0;
  std::mt19937_64 random(spec.training().seed());
  const bool in_order = spec.data().dealing() == v1::DataSpec::IN_ORDER;
  const bool meets_at_each = in_order || spec.training().deterministic();
  v1::Prediction sum;
  double tokens = 0, squares = 0, flops = 0;
  for (int step = 0; step < kDrawnSteps; ++step) {
    std::vector<uint64_t> batch;
    for (uint32_t i = 0; i < spec.training().global_batch(); ++i) {
      batch.push_back(lengths[random() % lengths.size()]);
      tokens += static_cast<double>(batch.back());
    }
    const balance::Dealing dealing = in_order ? balance::DealInOrder(batch, weights, rules)
                                              : balance::Deal(batch, weights, rules);
    for (const std::vector<Batches>& groups : MeetingsOf(dealing, meets_at_each)) {
      v1::Prediction slowest;
      double slowest_squares = 0;
      for (const Batches& group : groups) {
        v1::Prediction of_group;
        double group_squares = 0;
        for (const balance::MicroBatch& micro_batch : group) {
          for (const uint32_t sample : micro_batch.samples) {
            priced.AddTo(batch[sample], share, &of_group);
            group_squares += share * PricedLengths::Square(batch[sample]);
          }
        }
        flops += of_group.model_flops() / share;
        if (of_group.step_seconds() < slowest.step_seconds()) continue;
        slowest = std::move(of_group);
        slowest_squares = group_squares;
      }
      AddScaled(slowest, 1, &sum);
      squares += slowest_squares;
    }
    sum.set_dealt_imbalance(sum.dealt_imbalance() + dealing.Imbalance());
  }
  v1::Prediction mean;
  AddScaled(sum, 1.0 / kDrawnSteps, &mean);
  mean.set_density(sum.density() / squares);
  if (sum.attention_seconds() > 0) {
    mean.set_worker_imbalance(sum.worker_imbalance() / sum.attention_seconds());
    mean.set_step_imbalance(sum.step_imbalance() / sum.attention_seconds());
  }
  pricer.AddOptimizer(cost_model, &mean);
  mean.set_tokens_per_second(tokens / kDrawnSteps / mean.step_seconds());
  mean.set_model_flops(flops / kDrawnSteps);
  mean.set_memory_bytes(plan.prediction().memory_bytes());
  mean.set_sampled_steps(kDrawnSteps);
  return mean;
}

}  // namespace ringleader::planner
