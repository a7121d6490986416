#include "coordinator/lifecycle/job/step_merger.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <span>

#include "base/numbers/mean.h"
#include "proto/phase_fields.h"

namespace ringleader::lifecycle {
namespace {

// More than any model has: what a report says beyond them is cut off.
constexpr uint32_t kMostHeads = 4096;

// Ranks that wait for each other in a layer's ring step: max over them / mean of the time that they
// compute there, by the share of their attention's time that their tiles there take.
struct Meetings {
  double longest = 0, mean = 0;  // sums over ring steps and groups

  void Add(const std::vector<double>& seconds) {
    longest += *std::ranges::max_element(seconds);
    mean +=
        std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
  }
  void Add(const Meetings& other) {
    longest += other.longest;
    mean += other.mean;
  }
  double Imbalance() const { return mean > 0 ? longest / mean : 1; }
};

// What the ranks of one group say of a step.
using Group = std::vector<const v1::StepReport*>;

double SecondsPerTile(const v1::StepReport& report) {
  uint64_t tiles = 0;
  for (const v1::LayerReport& layer : report.layers()) {
    tiles += layer.column_tiles();
    for (const uint64_t in_step : layer.tiles_per_ring_step()) tiles += in_step;
  }
  const double seconds = report.phases().attention_forward() + report.phases().attention_backward();
  // Without times tiles stand for them.
  return tiles == 0 || seconds <= 0 ? 1 : seconds / static_cast<double>(tiles);
}

// By layer.
std::map<uint32_t, Meetings> MeetingsOf(const Group& group) {
  std::map<uint32_t, std::vector<std::vector<double>>> layers;  // [ring step][rank]
  for (const v1::StepReport* const report : group) {
    const double seconds = SecondsPerTile(*report);
    for (const v1::LayerReport& layer : report->layers()) {
      auto& steps = layers[layer.layer()];
      if (steps.size() < static_cast<size_t>(layer.tiles_per_ring_step_size())) {
        steps.resize(layer.tiles_per_ring_step_size());
      }
      for (int i = 0; i < layer.tiles_per_ring_step_size(); ++i) {
        steps[i].push_back(seconds * static_cast<double>(layer.tiles_per_ring_step(i)));
      }
    }
  }
  std::map<uint32_t, Meetings> meetings;
  for (const auto& [layer, steps] : layers) {
    for (const std::vector<double>& ranks : steps) meetings[layer].Add(ranks);
  }
  return meetings;
}

double Computed(const v1::StepReport& report) {
  const v1::PhaseSeconds& phases = report.phases();
  return phases.index() + phases.attention_forward() + phases.attention_backward() +
         phases.linear();
}

// Microseconds for a token of what is not attention; 0: not known.
float PaceOf(const v1::StepReport& report) {
  if (report.rank_tokens() == 0) return 0;
  return static_cast<float>(1e6 * report.phases().linear() /
                            static_cast<double>(report.rank_tokens()));
}

// Sets how unevenly those that wait for each other computed: ranks of rings, and groups.
void SetImbalances(const std::vector<v1::StepReport>& reports, v1::StepReport* merged) {
  std::map<uint32_t, Group> groups;
  for (const v1::StepReport& report : reports) groups[report.group()].push_back(&report);
  std::map<uint32_t, Meetings> layers;
  Meetings all;
  std::vector<double> slowest;
  for (const auto& [number, group] : groups) {
    for (const auto& [layer, meetings] : MeetingsOf(group)) {
      layers[layer].Add(meetings);
      all.Add(meetings);
    }
    double& longest = slowest.emplace_back(0);
    for (const v1::StepReport* const report : group) longest = std::max(longest, Computed(*report));
  }
  for (v1::LayerReport& layer : *merged->mutable_layers()) {
    layer.set_ring_imbalance(layers[layer.layer()].Imbalance());
  }
  merged->set_ring_imbalance(all.Imbalance());
  Meetings of_groups;
  of_groups.Add(slowest);
  merged->set_group_imbalance(of_groups.Imbalance());
}

void AddInto(std::span<const uint64_t> tiles, std::vector<uint64_t>* sums) {
  if (sums->size() < tiles.size()) sums->resize(tiles.size(), 0);
  for (size_t i = 0; i < tiles.size(); ++i) (*sums)[i] += tiles[i];
}

std::span<const uint64_t> Tiles(const v1::LayerReport& layer) {
  return {layer.tiles_per_ring_step().data(),
          static_cast<size_t>(layer.tiles_per_ring_step_size())};
}

// What ranks say of one layer.
class LayerSums {
 public:
  void Add(const v1::LayerReport& layer) {
    ++ranks_;
    density_ += layer.density();
    verticals_ += layer.verticals();
    slashes_ += layer.slashes();
    verticals_at_budget_ += layer.verticals_at_budget();
    slashes_at_budget_ += layer.slashes_at_budget();
    if (layer.recall() >= 0) recall_.Add(layer.recall());
    if (layer.has_probed_recall()) probed_recall_.Add(layer.probed_recall());
    const int heads = layer.probed_recall_by_head_size();
    const size_t first = std::min(layer.first_head(), kMostHeads);
    probed_recall_by_head_.resize(
        std::max(probed_recall_by_head_.size(), heads == 0 ? 0 : first + heads));
    for (int head = 0; head < heads; ++head) {
      probed_recall_by_head_[first + head].Add(layer.probed_recall_by_head(head));
    }
    AddInto(Tiles(layer), &tiles_per_ring_step_);
    column_tiles_ += layer.column_tiles();
    balanced_ += layer.balanced();
    anchor_missed_ += layer.anchor_missed();
  }

  void Write(v1::LayerReport* layer) const {
    layer->set_density(density_ / ranks_);
    layer->set_verticals(verticals_ / ranks_);
    layer->set_slashes(slashes_ / ranks_);
    layer->set_verticals_at_budget(verticals_at_budget_ / ranks_);
    layer->set_slashes_at_budget(slashes_at_budget_ / ranks_);
    layer->set_recall(recall_.count == 0 ? -1 : recall_.value());
    if (probed_recall_.count > 0) layer->set_probed_recall(probed_recall_.value());
    for (const Mean& head : probed_recall_by_head_) {
      layer->add_probed_recall_by_head(static_cast<float>(head.value()));
    }
    layer->mutable_tiles_per_ring_step()->Add(tiles_per_ring_step_.begin(),
                                              tiles_per_ring_step_.end());
    layer->set_column_tiles(column_tiles_);
    layer->set_balanced(balanced_);
    layer->set_anchor_missed(anchor_missed_);
  }

 private:
  int ranks_ = 0;
  double density_ = 0, verticals_ = 0, slashes_ = 0;
  double verticals_at_budget_ = 0, slashes_at_budget_ = 0;
  Mean recall_, probed_recall_;
  std::vector<Mean> probed_recall_by_head_;
  std::vector<uint64_t> tiles_per_ring_step_;
  uint64_t column_tiles_ = 0, balanced_ = 0, anchor_missed_ = 0;
};

// Leaves out what a report says of one rank or one group.
void LeaveOutRank(v1::StepReport* report) {
  report->set_rank(-1);
  report->clear_layers();
  report->clear_lengths();
  report->clear_ring_bytes();
  report->clear_whole_ring_bytes();
  report->clear_documents();
  report->clear_group();
  report->clear_rank_tokens();
  report->clear_rank_tiles();
  report->clear_rank_paces();
  report->clear_most_tiles();
  report->clear_most_tiles_rank();
}

// The figures of a whole report: the most of what ranks take side by side, the sum of what they
// send.
void MergeTotals(const v1::StepReport& report, v1::StepReport* merged) {
  merged->set_step_seconds(std::max(merged->step_seconds(), report.step_seconds()));
  merged->set_peak_memory_bytes(std::max(merged->peak_memory_bytes(), report.peak_memory_bytes()));
  merged->set_skipped(merged->skipped() || report.skipped());
  CombinePhases(
      report.phases(), [](double a, double b) { return std::max(a, b); }, merged->mutable_phases());
  merged->set_group_micro_batches(
      std::max(merged->group_micro_batches(), report.group_micro_batches()));
  merged->set_group_tokens(std::max(merged->group_tokens(), report.group_tokens()));
  merged->set_head_bytes(std::max(merged->head_bytes(), report.head_bytes()));
  merged->set_ring_bytes(merged->ring_bytes() + report.ring_bytes());
  merged->set_whole_ring_bytes(merged->whole_ring_bytes() + report.whole_ring_bytes());
  merged->add_rank_paces(PaceOf(report));
  if (report.time().seconds() > merged->time().seconds()) *merged->mutable_time() = report.time();
}

void MergeLayers(const std::vector<v1::StepReport>& reports, v1::StepReport* merged) {
  std::map<uint32_t, LayerSums> layers;
  for (const v1::StepReport& report : reports) {
    for (const v1::LayerReport& layer : report.layers()) layers[layer.layer()].Add(layer);
  }
  for (const auto& [index, sums] : layers) {
    v1::LayerReport* const layer = merged->add_layers();
    layer->set_layer(index);
    sums.Write(layer);
  }
}

void MergeLengths(const std::vector<v1::StepReport>& reports, v1::StepReport* merged) {
  std::map<uint64_t, v1::LengthReport> lengths;  // by tokens
  for (const v1::StepReport& report : reports) {
    for (const v1::LengthReport& bin : report.lengths()) {
      v1::LengthReport& sum = lengths[bin.tokens()];
      sum.set_tokens(bin.tokens());
      sum.set_micro_batches(sum.micro_batches() + bin.micro_batches());
      sum.set_visited_tiles(sum.visited_tiles() + bin.visited_tiles());
      sum.set_causal_tiles(sum.causal_tiles() + bin.causal_tiles());
    }
  }
  for (auto& [tokens, bin] : lengths) *merged->add_lengths() = std::move(bin);
}

void MergeDocuments(const std::vector<v1::StepReport>& reports, v1::StepReport* merged) {
  std::map<uint64_t, uint64_t> documents;  // by tokens
  std::set<uint32_t> counted;              // groups whose documents these are
  for (const v1::StepReport& report : reports) {
    // All ranks of a group say the same of them.
    if (report.documents().empty() || !counted.insert(report.group()).second) continue;
    for (const v1::DocumentReport& bin : report.documents()) {
      documents[bin.tokens()] += bin.count();
    }
  }
  for (const auto& [tokens, count] : documents) {
    v1::DocumentReport* const bin = merged->add_documents();
    bin->set_tokens(tokens);
    bin->set_count(count);
  }
}

// Sets how many tiles each rank visited, and how unevenly they lay among ranks and ring steps.
void SetLoads(const std::vector<v1::StepReport>& reports, v1::StepReport* merged) {
  std::vector<uint64_t> rank_tiles;
  double step_imbalance = 1;
  for (const v1::StepReport& report : reports) {
    // A worker that ran out of room sends reports without layers: no word about the load.
    if (report.layers().empty()) continue;
    std::vector<uint64_t> ring_steps;
    uint64_t column_tiles = 0;
    for (const v1::LayerReport& layer : report.layers()) {
      AddInto(Tiles(layer), &ring_steps);
      column_tiles += layer.column_tiles();
    }
    const uint64_t tiles = std::accumulate(ring_steps.begin(), ring_steps.end(), column_tiles);
    if (rank_tiles.empty() || tiles > merged->most_tiles()) {
      merged->set_most_tiles(tiles);
      merged->set_most_tiles_rank(static_cast<uint32_t>(report.rank()));
    }
    rank_tiles.push_back(tiles);
    step_imbalance = std::max(step_imbalance, MaxOverMean(ring_steps));
  }
  merged->mutable_rank_tiles()->Add(rank_tiles.begin(), rank_tiles.end());
  merged->set_worker_imbalance(MaxOverMean(rank_tiles));
  merged->set_step_imbalance(step_imbalance);
}

// A fresh copy, for what was cleared keeps its memory.
void LeaveOutDetails(v1::StepReport* report) {
  report->clear_layers();
  report->clear_lengths();
  report->clear_documents();
  *report = v1::StepReport(*report);
}

size_t BytesOf(const v1::StepReport& report, const StepMerger::Origin& origin) {
  // Nodes of the maps by step and rank, and the sequence that its worker's log holds.
  constexpr size_t kAround = 256;
  return report.SpaceUsedLong() + sizeof(origin) + origin.node.capacity() +
         origin.incarnation.capacity() + kAround;
}

}  // namespace

v1::StepReport MergeSteps(const std::vector<v1::StepReport>& reports) {
  v1::StepReport merged = reports.front();
  LeaveOutRank(&merged);
  for (const v1::StepReport& report : reports) MergeTotals(report, &merged);
  MergeLayers(reports, &merged);
  MergeLengths(reports, &merged);
  MergeDocuments(reports, &merged);
  SetImbalances(reports, &merged);
  SetLoads(reports, &merged);
  return merged;
}

std::optional<v1::StepReport> StepMerger::Add(v1::StepReport report, Origin origin,
                                              std::vector<Origin>* released) {
  const uint64_t step = report.step();
  const bool from_a_rank = report.rank() >= 0 && static_cast<uint32_t>(report.rank()) < world_size_;
  if (step <= last_step_ || !from_a_rank) {
    released->push_back(std::move(origin));
    return std::nullopt;
  }
  const auto partial = partials_.try_emplace(step).first;
  if (step <= bare_until_) LeaveOutDetails(&report);
  const size_t bytes = BytesOf(report, origin);
  Reported& reported = partial->second[report.rank()];
  if (reported.bytes > 0 && reported.origin != origin) {
    released->push_back(std::move(reported.origin));
  }
  bytes_ += bytes - reported.bytes;
  reported = {std::move(report), std::move(origin), bytes};
  if (partial->second.size() < world_size_) {
    MakeRoom(released);
    return std::nullopt;
  }
  last_step_ = step;
  // An earlier step that is still incomplete will stay so: ranks report in order.
  while (partials_.begin() != partial) Take(partials_.begin(), released);
  return MergeSteps(Take(partial, released));
}

std::vector<v1::StepReport> StepMerger::Take(std::map<uint64_t, Partial>::iterator partial,
                                             std::vector<Origin>* released) {
  std::vector<v1::StepReport> reports;
  for (auto& [rank, reported] : partial->second) {
    bytes_ -= reported.bytes;
    released->push_back(std::move(reported.origin));
    reports.push_back(std::move(reported.report));
  }
  partials_.erase(partial);
  return reports;
}

void StepMerger::MakeRoom(std::vector<Origin>* released) {
  for (auto it = partials_.upper_bound(bare_until_); bytes_ > most_bytes_ && it != partials_.end();
       ++it) {
    for (auto& [rank, reported] : it->second) {
      LeaveOutDetails(&reported.report);
      const size_t bytes = BytesOf(reported.report, reported.origin);
      bytes_ -= reported.bytes - bytes;
      reported.bytes = bytes;
    }
    bare_until_ = it->first;
  }
  while (bytes_ > most_bytes_) Take(partials_.begin(), released);
}

std::vector<StepMerger::Unfinished> StepMerger::Finish(uint64_t trained,
                                                       std::vector<Origin>* released) {
  std::vector<Unfinished> unfinished;
  while (!partials_.empty()) {
    const auto& [step, partial] = *partials_.begin();
    const bool is_believed = step == trained + 1 || partial.contains(0);
    last_step_ = step;
    unfinished.push_back({MergeSteps(Take(partials_.begin(), released)), is_believed});
  }
  return unfinished;
}

}  // namespace ringleader::lifecycle
