#include "coordinator/planner/simulate/pricer.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "coordinator/planner/simulate/ring_simulator.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/carried/carried_rows.h"
#include "patterns/pattern.h"
#include "ring/head_shares.h"
#include "ring/ring_schedule.h"

namespace ringleader::planner {
namespace {

// A sequence takes, forward and backward, 6 a weight and token, and 12 a query, key that it visits,
// head and element of a head. What is computed again does not count.
double ModelFlops(const model::ModelConfig& model, double tokens, double density) {
  const double visited = density * tokens * (tokens + 1) / 2;
  return 6 * static_cast<double>(model.weights_per_token()) * tokens +
         12 * visited * static_cast<double>(model.layers * model.heads * model.head_dim);
}

}  // namespace

// A plan's part in what is computed.
struct Pricer::Setting {
  patterns::AttentionOptions attention;
  ring::RingShape ring;
  ring::HeadShares heads;
  Layout layout;
  LaidDocuments documents = {};

  int64_t Blocks(uint64_t tokens) const {
    return CeilDiv(static_cast<int64_t>(tokens), attention.tile);
  }
  double LocalTokens(uint64_t tokens) const {
    if (documents.are_apart) return static_cast<double>(documents.local_tokens);
    return static_cast<double>(tokens) / ring.ranks() / heads.ranks;
  }
  double CausalTiles(uint64_t tokens) const {  // of a layer, and of the heads that a rank has
    const auto blocks = static_cast<double>(Blocks(tokens));
    return static_cast<double>(heads.local_heads()) * blocks * (blocks + 1) / 2;
  }
};

absl::StatusOr<LaidDocuments> Pricer::DocumentsOf(const v1::StepPlan& plan,
                                                  const Setting& setting) const {
  const bool is_alone = setting.ring.ranks() == 1;
  const bool in_stripes = plan.layout() == v1::ParallelismSpec::STRIPED ||
                          plan.layout() == v1::ParallelismSpec::DOCUMENTS;
  if (hints_.document_tokens.empty() || !(in_stripes || is_alone)) return LaidDocuments();
  const auto whole = static_cast<int64_t>(spec_.data().sequence_length());
  std::vector<int64_t> tokens;
  for (int64_t left = whole; left > 0; left -= tokens.back()) {
    tokens.push_back(
        std::min(left, hints_.document_tokens[tokens.size() % hints_.document_tokens.size()]));
  }
  if (is_alone && !jobspec::IsByDocuments(plan.layout())) return LayOnOneRank(std::move(tokens));
  if (!jobspec::IsByDocuments(plan.layout()))
    return LayInStripes(std::move(tokens), setting.ring.ranks());
  ASSIGN_OR_RETURN(const balance::SampleWeights weights, WeightsOf(plan));
  return LayByDocuments(std::move(tokens), setting.attention, setting.ring.ranks(), weights);
}

absl::StatusOr<std::string> Pricer::ReasonByDocuments(const v1::StepPlan& plan) const {
  ASSIGN_OR_RETURN(const Setting setting, SettingOf(plan));
  const LaidDocuments& documents = setting.documents;
  if (documents.tokens.empty() && spec_.data().batching() == v1::DataSpec::SAMPLES) {
    return "which samples are spread depends on the lengths of those in a micro-batch: without "
           "lengths (ringctl plan --lengths) each is priced as one sample, all of whose keys "
           "travel, and with them every sample as whole on one rank";
  }
  if (documents.tokens.empty()) {
    return "lengths of documents are not known here: a sequence is priced as one document, all of "
           "whose keys travel (ringctl plan --documents)";
  }
  int64_t spread_tokens = 0;
  for (size_t i = 0; i < documents.tokens.size(); ++i) {
    if (!documents.holders[i].has_value()) spread_tokens += documents.tokens[i];
  }
  return absl::StrFormat(
      "of a sequence's %d documents %d are spread over all ranks (%d of %d tokens), the others lie "
      "whole on one rank: predicted times are even to %.3fx",
      documents.tokens.size(), documents.spread, spread_tokens, spec_.data().sequence_length(),
      documents.imbalance);
}

absl::StatusOr<Pricer::Setting> Pricer::SettingOf(const v1::StepPlan& plan) const {
  Setting setting;
  ASSIGN_OR_RETURN(setting.attention, jobspec::AttentionOptionsOf(spec_.attention()));
  setting.attention.by_documents = jobspec::IsByDocuments(plan.layout());
  setting.attention.stripe = static_cast<int>(plan.stripe());
  setting.attention.sequence_length = static_cast<int64_t>(spec_.data().sequence_length());
  setting.layout = {plan.layout(), plan.stripe()};
  setting.ring.inner = static_cast<int>(plan.ring().inner());
  setting.ring.outer = static_cast<int>(plan.ring().outer());
  ASSIGN_OR_RETURN(setting.ring.kind, jobspec::RingOf(plan.ring().kind()));
  setting.heads = {.ranks = static_cast<int>(jobspec::HeadRanks(spec_.parallelism())),
                   .heads = model_.heads,
                   .kv_heads = model_.kv_heads};
  RETURN_IF_ERROR(ring::ForwardSchedule(setting.ring, 0).status());
  ASSIGN_OR_RETURN(setting.documents, DocumentsOf(plan, setting));
  return setting;
}

absl::Status Pricer::Count(const Setting& setting, uint64_t tokens, bool dense, double count,
                           uint64_t seed) {
  patterns::AttentionOptions attention = setting.attention;
  const patterns::PatternHints hints = dense ? patterns::PatternHints() : hints_;
  const int64_t blocks = setting.Blocks(tokens);
  const int sampled = SampledHeads(attention, setting.ring.ranks(), blocks);
  const auto local_heads = static_cast<double>(setting.heads.local_heads());
  std::vector<ring::HeadPattern> heads;
  if (setting.documents.tokens.empty()) {
    heads = patterns::SampleLayer(attention, dense, blocks, sampled, hints, seed);
  }
  for (const Layout& layout : CountedWith(setting)) {
    ASSIGN_OR_RETURN(attention.layout, jobspec::LayoutOf(layout.first));
    attention.stripe = static_cast<int>(layout.second);
    kernels::ShardLayout shards = patterns::LayoutOf(attention, setting.ring.ranks(), 0, 0);
    shards.tokens = blocks * attention.tile;  // whole tiles
    Layers layers = {
        .are_dense = dense, .count = count, .loads = ring::TileLoads(setting.ring.ranks())};
    if (!setting.documents.tokens.empty()) {
      layers.loads = setting.documents.Loads(
          attention, setting.ring.ranks(), local_heads, [&](int64_t of_document) {
            return patterns::SampleLayer(attention, dense, of_document, sampled, {}, seed);
          });
    }
    for (const ring::HeadPattern& head : heads) {
      layers.loads.AddHead(head, shards, attention.tile,
                           local_heads / static_cast<double>(heads.size()));
    }
    const std::vector<double> totals = layers.loads.RankTotals();
    layers.tiles = std::accumulate(totals.begin(), totals.end(), 0.0);
    layers.largest_tiles = *std::max_element(totals.begin(), totals.end());
    layers.step_imbalance = layers.loads.StepImbalance();
    // Shorter sequences are denser than reports say, by how much is not measured.
    const bool measured = hints.density > 0 && spec_.data().batching() != v1::DataSpec::SAMPLES;
    if (measured && layers.tiles > 0) {
      const double factor = hints.density * setting.CausalTiles(tokens) / layers.tiles;
      layers.loads.Scale(factor);
      layers.tiles *= factor;
      layers.largest_tiles *= factor;
    }
    layers_[{tokens, layout}].push_back(std::move(layers));
  }
  return absl::OkStatus();
}

std::set<Pricer::Layout> Pricer::CountedWith(const Setting& setting) const {
  return hints_.document_tokens.empty() ? layouts_ : std::set<Layout>{setting.layout};
}

absl::StatusOr<const std::vector<Pricer::Layers>*> Pricer::LayersOf(const Setting& setting,
                                                                    uint64_t tokens) {
  layouts_.insert(setting.layout);
  const auto counted = layers_.find({tokens, setting.layout});
  if (counted != layers_.end()) return &counted->second;
  // Counted anew, together.
  for (const Layout& layout : CountedWith(setting)) layers_.erase({tokens, layout});
  const patterns::AttentionOptions& attention = setting.attention;
  const std::set<int> listed(attention.dense_layers.begin(), attention.dense_layers.end());
  const int64_t dense = attention.pattern == patterns::Pattern::kDense
                            ? model_.layers
                            : std::min<int64_t>(model_.layers, std::ssize(listed));
  if (dense > 0) RETURN_IF_ERROR(Count(setting, tokens, true, static_cast<double>(dense), 0));
  const int64_t sparse = model_.layers - dense;
  const int samples = SampledLayers(attention, sparse, setting.ring.ranks());
  for (int i = 0; i < samples; ++i) {
    const double alike = static_cast<double>(sparse) / samples;
    RETURN_IF_ERROR(Count(setting, tokens, false, alike, i + 1));
  }
  return &layers_[{tokens, setting.layout}];
}

Pricer::HeadExchangeCost Pricer::HeadsOf(const Setting& setting, double local_tokens) const {
  if (setting.heads.ranks == 1) return {};
  const bool cuda = cluster_.engine == v1::ResourcesSpec::CUDA;
  const auto tokens = static_cast<int64_t>(local_tokens);
  const int64_t values = setting.heads.ForwardValues(tokens, model_.head_dim) +
                         setting.heads.BackwardValues(tokens, model_.head_dim);
  const Link& link =
      SharesHeadsInNodes(cluster_, setting.heads.ranks) ? cluster_.intra_node : cluster_.inter_node;
  const double bytes = static_cast<double>(values) * (cuda ? 2 : 4);
  // There and back, in forward and in backward.
  return {.bytes = bytes,
          .seconds = 4 * link.latency_seconds +
                     (link.bytes_per_second > 0 ? bytes / link.bytes_per_second : 0)};
}

const CarriedShares* Pricer::CarriedIn(const Setting& setting, uint64_t tokens, bool dense,
                                       bool backward) {
  // How much of what stays away packing takes back on GPUs has not been measured: there all of it
  // is priced.
  if (cluster_.engine == v1::ResourcesSpec::CUDA) return nullptr;
  const LaidDocuments& documents = setting.documents;
  patterns::AttentionOptions attention = setting.attention;
  const std::optional<patterns::KnownKeys> known = patterns::KnownKeysOf(attention, dense);
  if (!known.has_value() || !patterns::CarriesRows(setting.ring) || documents.are_apart) {
    return nullptr;
  }
  if (!documents.tokens.empty() && documents.travelling_tokens == 0) return nullptr;
  const auto [found, is_new] = carried_.try_emplace({.tokens = tokens,
                                                     .layout = setting.layout,
                                                     .kind = setting.ring.kind,
                                                     .inner = setting.ring.inner,
                                                     .dense = dense,
                                                     .backward = backward});
  std::optional<CarriedShares>& carried = found->second;
  const auto result = [&] { return carried.has_value() ? &*carried : nullptr; };
  const auto layout = jobspec::LayoutOf(setting.layout.first);
  if (!is_new || !layout.ok()) return result();  // a layout that is unknown counts no tiles either
  attention.layout = *layout;
  attention.stripe = static_cast<int>(setting.layout.second);
  // Lengths of prefixes are not known here.
  const std::vector<int64_t> prefix_ends =
      documents.tokens.empty() ? std::vector<int64_t>{0} : documents.ring_firsts;
  patterns::RingSequence sequence = {.tokens = static_cast<int64_t>(tokens),
                                     .prefix_ends = prefix_ends};
  if (!documents.tokens.empty()) {
    sequence.tokens = documents.ring_tokens;
    sequence.firsts = documents.ring_firsts;
    if (documents.is_uneven) sequence.held = documents.spread_tokens;
  }
  const ring::HopCounts counts = patterns::CountCarriedRows(attention, setting.ring, backward,
                                                            sequence, *known, /*most_packed=*/1.0);
  const int64_t slot = documents.tokens.empty() ? sequence.tokens / setting.ring.ranks()
                                                : documents.travelling_tokens;
  bool leaves_out = false;
  const auto shares_of = [&](const std::vector<std::vector<int64_t>>& rows) {
    std::vector<std::vector<double>> shares;
    for (const std::vector<int64_t>& hop : rows) {
      std::vector<double>& of_hop = shares.emplace_back();
      for (const int64_t count : hop) {
        of_hop.push_back(static_cast<double>(count) / static_cast<double>(slot));
        leaves_out |= count < slot;
      }
    }
    return shares;
  };
  CarriedShares shares = {.keys = shares_of(counts.keys), .gradients = shares_of(counts.gradients)};
  if (leaves_out) carried = std::move(shares);
  return result();
}

int Pricer::HeadGroupsOf(const Setting& setting) const {
  return setting.ring.kind == ring::RingKind::kAllGather
             ? static_cast<int>(jobspec::HeadGroups(spec_.parallelism()))
             : 1;
}

RingSetup Pricer::RingOf(const Setting& setting, double travelling, bool backward) const {
  const bool cuda = cluster_.engine == v1::ResourcesSpec::CUDA;
  const double kv =
      travelling * 2.0 * static_cast<double>(setting.heads.local_kv_heads() * model_.head_dim);
  // All-gathers sum gradients in float32.
  const bool is_rounded = setting.ring.kind != ring::RingKind::kAllGather &&
                          spec_.parallelism().kv_gradients() == v1::ParallelismSpec::BFLOAT16;
  return {
      .shape = setting.ring,
      .group = GroupOf(cluster_, setting.ring.ranks() * setting.heads.ranks, setting.heads.ranks),
      .intra_node = cluster_.intra_node,
      .inter_node = cluster_.inter_node,
      .kv_bytes = kv * (cuda ? 2 : 4),
      .gradient_bytes = backward ? kv * (is_rounded ? 2 : 4) : 0,
      .head_groups = HeadGroupsOf(setting)};
}

absl::StatusOr<double> Pricer::TravelSeconds(const v1::StepPlan& plan) const {
  ASSIGN_OR_RETURN(const Setting setting, SettingOf(plan));
  if (setting.ring.ranks() == 1) return 0;
  double seconds = 0;
  for (const bool backward : {false, true}) {
    RingSetup ring = RingOf(setting, 1.0 / setting.ring.ranks(), backward);
    // Of a hop that all documents share.
    ring.intra_node.latency_seconds = ring.inter_node.latency_seconds = 0;
    seconds += TransferSeconds(ring);
  }
  return static_cast<double>(model_.layers) * seconds;
}

absl::StatusOr<Pricer::LayerSums> Pricer::PlayLayers(const Setting& setting,
                                                     const CostModel& cost_model, uint64_t tokens,
                                                     bool find_exposed) {
  const bool cuda = cluster_.engine == v1::ResourcesSpec::CUDA;
  const double local_tokens = setting.LocalTokens(tokens);
  // Query rows of a ring step, of all heads: as many, however heads are shared out.
  const auto heads = static_cast<double>(model_.heads);
  const LaidDocuments& documents = setting.documents;
  const double travelling = documents.tokens.empty()
                                ? local_tokens * setting.heads.ranks
                                : static_cast<double>(documents.travelling_tokens);
  // Of others' keys only what is spread sees any; where nothing is, there is no such step.
  Work own_step = {.rows = local_tokens * heads, .calls = 1}, whole = {},
       other_step = {.rows = documents.tokens.empty() ? own_step.rows : travelling * heads,
                     .calls = travelling == 0 ? 0. : 1},
       choice = {.tiles = setting.CausalTiles(tokens) / setting.ring.ranks(),
                 .rows = local_tokens,
                 .calls = 1};
  if (documents.are_apart) {
    own_step = {.rows = travelling * heads, .calls = static_cast<double>(documents.spread)};
    other_step = own_step;
    whole = {.rows = (local_tokens - travelling) * heads,
             .calls = static_cast<double>(documents.whole_calls)};
    choice = {.tiles = documents.ChosenTiles(static_cast<double>(setting.heads.local_heads()),
                                             setting.attention, setting.ring.ranks()),
              .rows = static_cast<double>(documents.chosen_tokens),
              .calls = static_cast<double>(documents.chosen_calls)};
  }
  // Each group of heads has calls of its own, and the others' rows are not its.
  for (Work* const step : {&own_step, &other_step}) step->calls *= HeadGroupsOf(setting);
  // Seconds of a layer's backward pass, with what it computes again.
  const double mlp_backward =
      0.75 * static_cast<double>(model_.layers * model_.mlp_weights()) /
      static_cast<double>(model_.weights_per_token()) *
      cost_model.Seconds(Phase::kLinear, {.rows = local_tokens, .calls = 1});
  LayerSums sums;
  ASSIGN_OR_RETURN(const std::vector<Layers>* const alike_layers, LayersOf(setting, tokens));
  for (const Layers& alike : *alike_layers) {
    const double index =
        alike.are_dense || choice.calls == 0 ? 0 : cost_model.Seconds(Phase::kIndex, choice);
    const RingSimulator simulator(setting.ring, alike.loads);
    for (const bool backward : {false, true}) {
      const Phase phase = backward ? Phase::kAttentionBackward : Phase::kAttentionForward;
      RingSetup ring = RingOf(setting, travelling, backward);
      if (travelling == 0) ring.intra_node.latency_seconds = ring.inter_node.latency_seconds = 0;
      ring.carried = CarriedIn(setting, tokens, alike.are_dense, backward);
      StepSeconds step = {.per_tile = cost_model.Seconds(phase, {.tiles = 1}),
                          .per_own_step = cost_model.Seconds(phase, own_step),
                          .per_other_step = cost_model.Seconds(phase, other_step)};
      const double own = cost_model.Seconds(phase, whole);
      // What a rank computes between the start of the first hops and attention. On GPUs all of
      // backward's travel while the MLP is computed, unless heads are exchanged first, of forward's
      // those between nodes during the index.
      if (cuda && backward && setting.heads.ranks == 1) step.lead = mlp_backward;
      if (cuda && !backward && setting.ring.kind != ring::RingKind::kFlat) step.lead = index;
      const RingTimes times = simulator.Play(ring, step, find_exposed);
      sums.ring.seconds += alike.count * (times.seconds + own - step.lead);
      sums.ring.busy_seconds += alike.count * (times.busy_seconds + own - step.lead);
      sums.ring.transfer_seconds += alike.count * times.transfer_seconds;
      sums.ring.exposed_seconds += alike.count * times.exposed_seconds;
      rank_steps_ += times.rank_steps;
      const RingBytes bytes = BytesOf(ring);
      sums.bytes.sent += alike.count * bytes.sent;
      sums.bytes.whole += alike.count * bytes.whole;
    }
    sums.index_seconds += alike.count * index;
    sums.tiles += alike.count * alike.tiles;
    sums.largest_tiles += alike.count * alike.largest_tiles;
    sums.step_imbalance += alike.count * alike.step_imbalance;
  }
  return sums;
}

absl::StatusOr<v1::Prediction> Pricer::PriceLength(const Setting& setting,
                                                   const CostModel& cost_model, uint64_t tokens,
                                                   double sequences, bool find_exposed) {
  ASSIGN_OR_RETURN(const LayerSums sums, PlayLayers(setting, cost_model, tokens, find_exposed));
  ring_bytes_ = {.sent = sequences * sums.bytes.sent, .whole = sequences * sums.bytes.whole};
  const double local_tokens = setting.LocalTokens(tokens);
  const auto layers = static_cast<double>(model_.layers);
  const HeadExchangeCost exchange = HeadsOf(setting, local_tokens);
  const double exchange_seconds = layers * exchange.seconds;
  const double linear =
      cost_model.Seconds(Phase::kLinear, {.rows = local_tokens * layers, .calls = layers});
  v1::Prediction prediction;
  prediction.set_attention_seconds(sequences * sums.ring.busy_seconds);
  prediction.set_index_seconds(sequences * sums.index_seconds);
  prediction.set_wait_seconds(std::max(
      0.0, sequences * (sums.ring.seconds - sums.ring.busy_seconds - sums.ring.exposed_seconds)));
  prediction.set_linear_seconds(sequences * linear);
  prediction.set_communication_seconds(sequences * (sums.ring.transfer_seconds + exchange_seconds));
  prediction.set_exposed_communication_seconds(sequences *
                                               (sums.ring.exposed_seconds + exchange_seconds));
  prediction.set_head_bytes(sequences * layers * exchange.bytes);
  prediction.set_head_seconds(sequences * exchange_seconds);
  prediction.set_step_seconds(sequences *
                              (sums.ring.seconds + exchange_seconds + sums.index_seconds + linear));
  prediction.set_worker_imbalance(
      sums.tiles > 0 ? sums.largest_tiles * setting.ring.ranks() / sums.tiles : 1.0);
  prediction.set_step_imbalance(sums.step_imbalance / layers);
  prediction.set_density(sums.tiles / (layers * setting.CausalTiles(tokens)));
  prediction.set_model_flops(sequences *
                             ModelFlops(model_, static_cast<double>(tokens), prediction.density()));
  return prediction;
}

void Pricer::AddOptimizer(const CostModel& cost_model, v1::Prediction* prediction) const {
  const double seconds = cost_model.Seconds(
      Phase::kOptimizer, {.bytes = 8.0 * static_cast<double>(model_.parameters()), .calls = 1});
  prediction->set_optimizer_seconds(seconds);
  prediction->set_exchange_seconds(seconds * cost_model.exchange_share());
  prediction->set_step_seconds(prediction->step_seconds() + seconds);
}

absl::StatusOr<v1::Prediction> Pricer::PriceAlone(const v1::StepPlan& plan,
                                                  const CostModel& cost_model, uint64_t tokens,
                                                  bool find_exposed) {
  if (jobspec::IsByDocuments(plan.layout())) {
    v1::StepPlan of_one = plan;
    of_one.set_layout(v1::ParallelismSpec::CONTIGUOUS);
    of_one.set_stripe(0);
    of_one.mutable_ring()->set_kind(v1::ParallelismSpec::FLAT);
    of_one.mutable_ring()->set_inner(1);
    of_one.mutable_ring()->set_outer(1);
    // A document alone is denser than the whole sequence that reports tell of, by how much is not
    // measured.
    patterns::PatternHints hints = hints_;
    hints.density = 0;
    hints.document_tokens.clear();  // it is one
    Pricer one(spec_, model_, cluster_, hints);
    absl::StatusOr<v1::Prediction> alone = one.PriceAlone(of_one, cost_model, tokens, find_exposed);
    rank_steps_ += one.rank_steps_;
    return alone;
  }
  ASSIGN_OR_RETURN(const Setting setting, SettingOf(plan));
  layouts_ = {setting.layout};
  absl::StatusOr<v1::Prediction> alone = PriceLength(setting, cost_model, tokens, 1, find_exposed);
  if (tokens != spec_.data().sequence_length()) layers_.erase({tokens, setting.layout});
  return alone;
}

absl::StatusOr<v1::Prediction> Pricer::Price(const v1::StepPlan& plan,
                                             const CostModel& cost_model) {
  return PriceStep(plan, cost_model, true);
}

absl::StatusOr<v1::Prediction> Pricer::Compare(const v1::StepPlan& plan,
                                               const CostModel& cost_model) {
  return PriceStep(plan, cost_model, false);
}

absl::StatusOr<v1::Prediction> Pricer::PriceStep(const v1::StepPlan& plan,
                                                 const CostModel& cost_model, bool find_exposed) {
  ASSIGN_OR_RETURN(const Setting setting, SettingOf(plan));
  const double batch = static_cast<double>(spec_.training().global_batch());
  const uint64_t tokens = spec_.data().sequence_length();
  ASSIGN_OR_RETURN(
      v1::Prediction prediction,
      PriceLength(setting, cost_model, tokens, batch / spec_.parallelism().data(), find_exposed));
  AddOptimizer(cost_model, &prediction);
  prediction.set_tokens_per_second(static_cast<double>(tokens) * batch / prediction.step_seconds());
  prediction.set_model_flops(prediction.model_flops() * spec_.parallelism().data());
  return prediction;
}

}  // namespace ringleader::planner
