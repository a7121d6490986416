// Prices the plans of one job: patterns → tiles per rank and owner → seconds per ring step → the
// step.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/planner/cost/cost_model.h"
#include "coordinator/planner/cost/shapes.h"
#include "coordinator/planner/simulate/laid_documents.h"
#include "coordinator/planner/simulate/ring_simulator.h"
#include "coordinator/planner/simulate/stand_ins.h"
#include "model_shape/model_config.h"
#include "patterns/attention_options.h"
#include "patterns/sample.h"
#include "ring/tile_loads.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::planner {

// What ranks visit depends on a sequence's length and on the layout alone: it is counted once and
// kept for all rings and cost models. Not thread-safe.
class Pricer {
 public:
  // A layout of the sequence, with its stripe in tokens.
  using Layout = std::pair<v1::ParallelismSpec::Layout, uint32_t>;

  // All must outlive the pricer. `hints` come from reports, if there are any. `layouts`: those of
  // the plans to come, all of which are counted when one is asked for, from the same samples.
  Pricer(const v1::JobSpec& spec, const model::ModelConfig& model, const ClusterShape& cluster,
         const patterns::PatternHints& hints, std::set<Layout> layouts = {})
      : spec_(spec),
        model_(model),
        cluster_(cluster),
        hints_(hints),
        layouts_(std::move(layouts)) {}

  // What a step is predicted to cost under `plan`; of samples, as if each had as many tokens as
  // fit. INVALID_ARGUMENT names an enumerator of the job or the plan that is unknown.
  absl::StatusOr<v1::Prediction> Price(const v1::StepPlan& plan, const CostModel& cost_model);
  // The same in half the time, to compare plans: waits for links are part of wait_seconds.
  absl::StatusOr<v1::Prediction> Compare(const v1::StepPlan& plan, const CostModel& cost_model);

  // A sequence of `tokens` by itself, without the optimizer; model_flops of it alone. By documents:
  // on one rank. Other layouts than the plan's are counted anew if they are asked for after this.
  // `find_exposed`: Price's, not Compare's.
  absl::StatusOr<v1::Prediction> PriceAlone(const v1::StepPlan& plan, const CostModel& cost_model,
                                            uint64_t tokens, bool find_exposed);
  // What the keys and values of one token that is spread over the plan's ring, and their gradients,
  // take to travel in all layers of a step, hidden or not.
  absl::StatusOr<double> TravelSeconds(const v1::StepPlan& plan) const;
  // Adds what the optimizer takes once a step.
  void AddOptimizer(const CostModel& cost_model, v1::Prediction* prediction) const;

  // What a plan by documents, with its weights, does with those of a sequence, for people.
  absl::StatusOr<std::string> ReasonByDocuments(const v1::StepPlan& plan) const;

  // Of a trainer in the step that was priced last, in the mean: what hops of the ring carry.
  const RingBytes& ring_bytes() const { return ring_bytes_; }

  // Ring steps of single ranks that were played so far: nearly all of the time that prices take.
  int64_t rank_steps() const { return rank_steps_; }

 private:
  // Layers that look alike, of sequences of one length in one layout.
  struct Layers {
    bool are_dense = false;
    double count = 0;
    ring::TileLoads loads;
    double tiles = 0;          // of all ranks
    double largest_tiles = 0;  // of the busiest rank
    double step_imbalance = 0;
  };
  struct Setting;

  // Those of a sequence in the plan's layout; none where their lengths are not known.
  absl::StatusOr<LaidDocuments> DocumentsOf(const v1::StepPlan& plan, const Setting& setting) const;
  absl::StatusOr<Setting> SettingOf(const v1::StepPlan& plan) const;
  // In the setting's layout. Counts those of all layouts first if they are not there.
  absl::StatusOr<const std::vector<Layers>*> LayersOf(const Setting& setting, uint64_t tokens);
  // The layouts that are counted from one sample: all or, where documents lie in each as they do
  // in no other, the setting's.
  std::set<Layout> CountedWith(const Setting& setting) const;
  // Adds `count` layers that look like one sample to layers_, in each of these.
  absl::Status Count(const Setting& setting, uint64_t tokens, bool dense, double count,
                     uint64_t seed);
  // What hops carry where that is known before the data; null: all of it, in such layers.
  const CarriedShares* CarriedIn(const Setting& setting, uint64_t tokens, bool dense,
                                 bool backward);
  // What a trainer sends in one layer, forward and backward, to share out heads.
  struct HeadExchangeCost {
    double bytes = 0, seconds = 0;
  };
  HeadExchangeCost HeadsOf(const Setting& setting, double local_tokens) const;
  // In how many groups of heads a ring's keys are gathered.
  int HeadGroupsOf(const Setting& setting) const;
  // A layer's ring, around which `travelling` tokens of each rank go.
  RingSetup RingOf(const Setting& setting, double travelling, bool backward) const;
  // All layers of one sequence, forward and backward, without what is token by token.
  struct LayerSums {
    RingTimes ring;
    RingBytes bytes;
    double index_seconds = 0;
    double tiles = 0, largest_tiles = 0, step_imbalance = 0;  // as Layers has them
  };
  absl::StatusOr<LayerSums> PlayLayers(const Setting& setting, const CostModel& cost_model,
                                       uint64_t tokens, bool find_exposed);
  absl::StatusOr<v1::Prediction> PriceLength(const Setting& setting, const CostModel& cost_model,
                                             uint64_t tokens, double sequences, bool find_exposed);
  absl::StatusOr<v1::Prediction> PriceStep(const v1::StepPlan& plan, const CostModel& cost_model,
                                           bool find_exposed);

  const v1::JobSpec& spec_;
  const model::ModelConfig& model_;
  const ClusterShape& cluster_;
  const patterns::PatternHints& hints_;
  std::set<Layout> layouts_;
  std::map<std::pair<uint64_t, Layout>, std::vector<Layers>> layers_;  // by tokens and layout
  // By layout and ring of a sequence, and whether layers are dense and it is their backward.
  struct CarriedKey {
    uint64_t tokens = 0;
    Layout layout;
    ring::RingKind kind;
    int inner = 0;
    bool dense = false, backward = false;

    auto Tied() const { return std::tie(tokens, layout, kind, inner, dense, backward); }
    bool operator<(const CarriedKey& other) const { return Tied() < other.Tied(); }
  };
  std::map<CarriedKey, std::optional<CarriedShares>> carried_;
  RingBytes ring_bytes_;
  int64_t rank_steps_ = 0;
};

}  // namespace ringleader::planner
