#include "worker/attention/runner/ring_runner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/carried/carried_rows.h"
#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "patterns/probe.h"
#include "ring/band_tiles.h"

namespace ringleader::attention {

using kernels::ShardLayout;

namespace {

// Documents by themselves that are remembered: one has 4 bytes for each of this rank's tokens.
constexpr size_t kMostKnownDocuments = 64;
// Sequences whose rows are remembered, of forward and of backward, in dense and in other layers.
constexpr size_t kMostKnownRows = 4 * kMostKnownDocuments;

absl::Status StartFirstHops(const ring::RingSchedule& schedule, ring::RingLink link,
                            RingSlots& kv) {
  for (const ring::RingHop& hop : schedule.first_hops) {
    if (hop.link == link) RETURN_IF_ERROR(kv.Start(hop));
  }
  return absl::OkStatus();
}

// Tokens of the sequence that `rank` holds, of whose ranks one holds `local_tokens`.
int64_t HeldTokens(const DeviceDocuments* documents, int rank, int64_t local_tokens) {
  if (documents == nullptr || documents->host == nullptr) return local_tokens;
  const std::vector<int64_t>& shards = documents->host->shard_tokens;
  return shards.empty() ? local_tokens : shards[rank];
}

// The most that a rank holds.
int64_t SlotTokens(const DeviceDocuments* documents, int64_t local_tokens) {
  if (documents == nullptr || documents->host == nullptr) return local_tokens;
  const std::vector<int64_t>& shards = documents->host->shard_tokens;
  return shards.empty() ? local_tokens : *std::ranges::max_element(shards);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RingRunner>> RingRunner::Create(
    const patterns::AttentionOptions& options, AttentionDevice* device) {
  patterns::AttentionOptions resolved = options;
  if (resolved.stripe == 0) resolved.stripe = resolved.tile;
  RETURN_IF_ERROR(patterns::CheckOptions(resolved, device->ranks()));
  std::unique_ptr<RingRunner> runner(new RingRunner(resolved, device));
  ASSIGN_OR_RETURN(runner->forward_, ring::ForwardSchedule(options.ring, device->rank()));
  ASSIGN_OR_RETURN(runner->backward_, ring::BackwardSchedule(options.ring, device->rank()));
  return runner;
}

RingRunner::RingRunner(const patterns::AttentionOptions& options, AttentionDevice* device)
    : options_(options), device_(*device) {}

ShardLayout RingRunner::LayoutOf(int rank, int64_t local_tokens) const {
  return patterns::LayoutOf(options_, device_.ranks(), rank, local_tokens);
}

ShardLayout RingRunner::Mine(const DeviceDocuments* documents, const AttentionCall& call) const {
  const bool is_uneven =
      documents != nullptr && documents->host != nullptr && !documents->host->shard_tokens.empty();
  return LayoutOf(device_.rank(),
                  is_uneven ? documents->host->tokens / device_.ranks() : call.shape().tokens);
}

absl::Status RingRunner::SetDocuments(int64_t tokens, std::span<const int64_t> firsts,
                                      int64_t padding, std::span<const int64_t> prefix_ends) {
  // The layers of a micro-batch turn from one of its documents to the next.
  const bool is_single = padding > 0 && firsts.size() == 2 && firsts[0] == 0 &&
                         firsts[1] == tokens - padding && prefix_ends.empty();
  for (const KnownDocument& known : known_documents_) {
    if (!is_single || known.tokens != tokens || known.padding != padding) continue;
    probed_.reset();
    documents_ = known.documents;
    return absl::OkStatus();
  }
  const ShardLayout mine = LayoutOf(device_.rank(), tokens / device_.ranks());
  std::shared_ptr<const SequenceDocuments> documents;
  if (options_.mask == patterns::Mask::kCausal) {
    ASSIGN_OR_RETURN(documents, patterns::MakeDocuments(mine, firsts, padding));
  } else {
    const patterns::MaskRule rule = {.mask = options_.mask,
                                     .block = options_.mask_block,
                                     .prefix_ends = prefix_ends,
                                     .padding = padding};
    const bool has_window = options_.pattern == patterns::Pattern::kSlidingWindow;
    ASSIGN_OR_RETURN(documents,
                     patterns::MakeMasked(mine, firsts, rule, has_window ? options_.window : 0));
  }
  UseDocuments(std::move(documents), tokens);
  if (is_single) {
    if (known_documents_.size() >= kMostKnownDocuments) known_documents_.clear();
    known_documents_.push_back({tokens, padding, documents_});
  }
  return absl::OkStatus();
}

absl::Status RingRunner::SetVisible(std::span<const kernels::KeyIntervals> queries) {
  if (options_.pattern != patterns::Pattern::kDense || options_.mask != patterns::Mask::kFull) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "what queries see can be listed for attention.pattern: dense under attention.mask: full, "
        "not for %s under %s",
        std::string(patterns::DefinitionOf(options_.pattern).name),
        std::string(patterns::MaskName(options_.mask))));
  }
  const int64_t tokens = std::ssize(queries);
  ASSIGN_OR_RETURN(
      std::shared_ptr<const SequenceDocuments> documents,
      patterns::MakeListed(LayoutOf(device_.rank(), tokens / device_.ranks()), queries));
  UseDocuments(std::move(documents), tokens);
  return absl::OkStatus();
}

absl::Status RingRunner::SetSpread(const ring::DocumentLayout& layout) {
  if (options_.pattern != patterns::Pattern::kDense || layout.is_apart()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "documents: a ring of several spread ones goes with attention.pattern: dense alone, not "
        "with %s: places that no rank holds lie between their tokens",
        std::string(patterns::DefinitionOf(options_.pattern).name)));
  }
  const int64_t tokens = layout.ring_tokens();
  ASSIGN_OR_RETURN(std::shared_ptr<const SequenceDocuments> documents,
                   patterns::MakeUneven(LayoutOf(device_.rank(), tokens / device_.ranks()),
                                        layout.RingFirsts(), layout.spread_tokens()));
  UseDocuments(std::move(documents), tokens);
  return absl::OkStatus();
}

void RingRunner::UseDocuments(std::shared_ptr<const SequenceDocuments> documents, int64_t tokens) {
  documents_ = nullptr;
  probed_.reset();
  // Rows of sequences that do not come again would keep their documents alive.
  std::erase_if(known_rows_, [&](const KnownRows& rows) {
    return rows.documents != nullptr &&
           std::ranges::find(known_documents_, rows.documents, &KnownDocument::documents) ==
               known_documents_.end();
  });
  if (documents == nullptr) return;
  const patterns::EstimateQueries queries = patterns::ChooseEstimateQueries(
      tokens, options_.estimate_queries, options_.estimate_at == patterns::EstimateAt::kSpread,
      documents.get());
  documents_ = device_.Upload(std::move(documents), queries);
}

void RingRunner::SetStep(uint64_t step) {
  step_ = step;
  probed_.reset();
}

AttentionStats RingRunner::TakeStats() {
  AttentionStats stats = device_.TakeStats(forward_);
  stats.ring_bytes = std::exchange(ring_bytes_, {});
  return stats;
}

bool RingRunner::is_dense(int layer) const {
  return all_dense_ ||
         std::ranges::find(options_.dense_layers, layer) != options_.dense_layers.end();
}

RingRunner::Known RingRunner::KnownOf(int layer) const {
  return patterns::KnownKeysOf(options_, is_dense(layer));
}

std::shared_ptr<const ring::TravellingRows> RingRunner::RowsOf(
    const ring::RingSchedule& schedule, const std::shared_ptr<const DeviceDocuments>& documents,
    const Known& known, int64_t local_tokens) {
  const SequenceDocuments* const host = documents == nullptr ? nullptr : documents->host.get();
  if (!known.has_value() || device_.most_carried() <= 0.0 ||
      !patterns::CarriesRows(schedule.shape)) {
    return nullptr;
  }
  // Without documents nobody said what the mask shows, which choosing tiles complains of.
  if (options_.mask != patterns::Mask::kCausal && host == nullptr) return nullptr;
  const std::span<const int64_t> held =
      host == nullptr ? std::span<const int64_t>() : std::span(host->shard_tokens);
  if (!held.empty()) local_tokens = host->tokens / schedule.ranks;
  const bool is_backward = schedule.grad_slots > 0;
  for (const KnownRows& rows : known_rows_) {
    if (rows.documents == documents && rows.keys == *known && rows.local_tokens == local_tokens &&
        rows.is_backward == is_backward) {
      return rows.rows;
    }
  }
  patterns::RingSequence sequence = {.tokens = local_tokens * schedule.ranks};
  if (host != nullptr) {
    sequence.firsts = host->firsts;
    sequence.prefix_ends = host->prefix_ends;
    sequence.padding = host->tokens - host->content;
    sequence.held = host->shard_tokens;
    sequence.listed = host->listed;
  }
  auto rows = std::make_shared<ring::TravellingRows>(
      patterns::FindCarriedRows(options_, schedule, sequence, *known));
  // Hops that all carry whole shards are those of slots, unless a shard is less than a slot: other
  // ranks of this ring may carry less.
  if (!ring::CarryAllAbove(device_.most_carried(), rows.get()) && held.empty()) rows = nullptr;
  if (known_rows_.size() >= kMostKnownRows) known_rows_.clear();
  known_rows_.push_back({documents, *known, local_tokens, is_backward, rows});
  return rows;
}

void RingRunner::CountHops(const ring::RingSchedule& schedule, bool gradients,
                           const ring::TravellingRows* rows, int64_t slot_tokens,
                           const AttentionCall& call) {
  if (schedule.ranks == 1) return;
  int64_t hops = Gathers(schedule) ? schedule.ranks - 1 : 0;
  if (!Gathers(schedule) && !gradients) hops += std::ssize(schedule.first_hops);
  for (const ring::RingStep& step : schedule.steps) {
    if (!gradients) hops += std::ssize(step.kv_hops);
    for (const ring::GradAction& action : step.grad_actions) {
      hops += gradients && action.kind == ring::GradAction::Kind::kHop ? 1 : 0;
    }
  }
  int64_t sent = hops * slot_tokens;
  if (rows != nullptr) {
    sent = 0;
    for (const ring::HopRows& hop : gradients ? rows->gradients : rows->keys) {
      sent += ring::CountRows(hop.sent);
    }
  }
  const int64_t element = !gradients ? call.element_bytes() : options_.bf16_gradients ? 2 : 4;
  const auto row = static_cast<uint64_t>(2 * element * call.kv_row());
  ring_bytes_.sent += static_cast<uint64_t>(sent) * row;
  ring_bytes_.whole += static_cast<uint64_t>(hops * slot_tokens) * row;
}

absl::StatusOr<std::unique_ptr<RingSlots>> RingRunner::PlaceKv(
    const ring::RingSchedule& schedule, const std::shared_ptr<const DeviceDocuments>& documents,
    const Known& known, AttentionCall& call) {
  const int64_t slot_tokens = SlotTokens(documents.get(), call.tokens());
  ASSIGN_OR_RETURN(std::unique_ptr<RingSlots> kv, call.PlaceKv(schedule, slot_tokens));
  const auto rows = RowsOf(schedule, documents, known, call.tokens());
  if (rows != nullptr) kv->Carry({rows, &rows->keys});
  CountHops(schedule, /*gradients=*/false, rows.get(), slot_tokens, call);
  return kv;
}

Step RingRunner::OwnStep(const LayerIndex& index, const AttentionCall& call) const {
  const ShardLayout mine = Mine(index.documents.get(), call);
  return {.index = index, .mine = mine, .owner = mine, .keys = call.shape().tokens};
}

absl::StatusOr<Step> RingRunner::Arrive(const ring::RingSchedule& schedule, size_t number,
                                        const Step& own, RingSlots& kv) {
  const ring::RingStep& now = schedule.steps[number];
  for (const ring::RingHop& hop : now.kv_hops) RETURN_IF_ERROR(kv.Start(hop));
  Step step = own;
  step.number = number;
  if (now.owner == schedule.rank) return step;
  RETURN_IF_ERROR(kv.AwaitContent(now.kv_slot));
  step.owner.rank = now.owner;
  step.keys = HeldTokens(own.index.documents.get(), now.owner, own.keys);
  step.slot = kv.memory(now.kv_slot);
  return step;
}

absl::StatusOr<std::shared_ptr<const LayerIndex>> RingRunner::Forward(AttentionCall& call,
                                                                      AttentionCall* next) {
  if (started_ != nullptr) {
    return absl::FailedPreconditionError("forward between a backward's start and its call");
  }
  const CallShape shape = call.shape();
  const ShardLayout mine = Mine(documents_.get(), call);
  if (HeldTokens(documents_.get(), device_.rank(), shape.tokens) != shape.tokens) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "documents: rank %d holds %d tokens of those that are spread, q has %d", device_.rank(),
        documents_->host->shard_tokens[device_.rank()], shape.tokens));
  }
  RETURN_IF_ERROR(patterns::CheckLength(options_, device_.ranks(), mine.local_tokens()));
  RETURN_IF_ERROR(patterns::CheckDocuments(documents_ == nullptr ? nullptr : documents_->host.get(),
                                           mine.tokens));
  LayerStats& stats = device_.StatsOf(call.layer());
  stats.tiles_per_ring_step.resize(forward_.steps.size());
  stats.causal_tiles += ring::CausalTiles(mine, options_.tile) * shape.heads;
  ++stats.calls;

  // A hop between nodes travels while the index is built. One inside a node travels during the
  // first step, and beside the index would slow its collectives and take multiprocessors from its
  // kernels.
  const Known known = KnownOf(call.layer());
  const bool was_started = started_forward_.has_value();
  if (was_started &&
      (started_forward_->documents != documents_ || started_forward_->known != known)) {
    return absl::FailedPreconditionError(
        "the documents, or whether attention is dense, changed between a forward's start and its "
        "call: what its hops carry is of before");
  }
  std::unique_ptr<RingSlots> kv;
  if (was_started) {
    kv = std::move(started_forward_->kv);
    started_forward_.reset();
  } else {
    RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
    ASSIGN_OR_RETURN(kv, PlaceKv(forward_, documents_, known, call));
    RETURN_IF_ERROR(StartFirstHops(forward_, ring::RingLink::kOuter, *kv));
    RETURN_IF_ERROR(device_.End());
  }
  if (next != nullptr) RETURN_IF_ERROR(StartForward(*next));
  ASSIGN_OR_RETURN(const std::shared_ptr<const LayerIndex> index, ChooseTiles(call));
  const Step own = OwnStep(*index, call);
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
  if (!was_started) RETURN_IF_ERROR(StartFirstHops(forward_, ring::RingLink::kInner, *kv));
  RETURN_IF_ERROR(call.StartOutput());
  RETURN_IF_ERROR(AttendSteps(own, *kv, call));
  if (index->has_columns()) RETURN_IF_ERROR(call.AttendColumns(own));
  RETURN_IF_ERROR(call.FinishOutput());
  RETURN_IF_ERROR(kv->AwaitAll());
  RETURN_IF_ERROR(device_.End());
  const bool is_chosen = index->pattern != kernels::TilePattern::kCausal;
  if (is_chosen && patterns::ProbesAt(options_, step_)) RETURN_IF_ERROR(Probe(call));
  return index;
}

absl::Status RingRunner::Probe(AttentionCall& call) {
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::index));
  const Probed& probed = ProbedBy(call);
  RETURN_IF_ERROR(ProbeQueries(*probed.queries, ProbedRows::kApart, call));
  if (probed.heard != nullptr) {
    RETURN_IF_ERROR(ProbeQueries(*probed.heard, ProbedRows::kHeard, call));
  }
  return device_.End();
}

absl::Status RingRunner::ProbeQueries(const DeviceDocuments& queries, ProbedRows rows,
                                      AttentionCall& call) {
  const patterns::IndexInputs inputs = InputsOf(call);
  patterns::VerticalSlash work = {
      .layout = inputs.layout,
      .heads = inputs.heads,
      .tile = options_.tile,
      .blocks = (inputs.layout.tokens + options_.tile - 1) / options_.tile,
      .scale = inputs.scale,
      .queries = static_cast<int32_t>(queries.estimate_positions.size),
      .documents = &queries};
  RETURN_IF_ERROR(patterns::EstimateRows(work, inputs, call));
  return call.CountProbe(work, rows);
}

const RingRunner::Probed& RingRunner::ProbedBy(AttentionCall& call) {
  const ShardLayout mine = Mine(documents_.get(), call);
  if (probed_.has_value() && probed_->tokens == mine.tokens) return *probed_;
  std::shared_ptr<const SequenceDocuments> documents =
      documents_ == nullptr ? nullptr : documents_->host;
  const patterns::EstimateQueries queries =
      patterns::ChooseProbeQueries(options_, mine.tokens, step_, documents.get());
  const patterns::EstimateQueries heard =
      patterns::ChooseHeardQueries(options_, mine.tokens, step_, documents.get());
  if (documents == nullptr) {
    documents = std::make_shared<SequenceDocuments>(
        SequenceDocuments{.tokens = mine.tokens, .firsts = {0}, .local_starts = {}});
  }
  std::vector<int64_t> rows;
  for (const int64_t position : queries.positions) {
    if (mine.Owner(position) == mine.rank) rows.push_back(mine.LocalIndex(position));
  }
  probed_ = {.tokens = mine.tokens,
             .queries = device_.Upload(documents, queries),
             .rows = rows.empty() ? DeviceArray<int64_t>() : patterns::UploadArray(call, rows),
             .heard = heard.positions.empty() ? nullptr : device_.Upload(documents, heard)};
  return *probed_;
}

patterns::IndexInputs RingRunner::InputsOf(const AttentionCall& call) const {
  const CallShape shape = call.shape();
  std::span<const int32_t> head_halves;
  if (call.layer() < std::ssize(head_budgets_)) head_halves = head_budgets_[call.layer()].halves;
  return {.layout = Mine(documents_.get(), call),
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .scale = shape.scale(),
          .documents = documents_,
          .is_balanced = step_ > 0,
          .move = move_,
          .head_halves = head_halves};
}

absl::StatusOr<std::shared_ptr<LayerIndex>> RingRunner::ChooseTiles(AttentionCall& call) {
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::index));
  patterns::AttentionOptions options = options_;
  if (is_dense(call.layer())) options.pattern = patterns::Pattern::kDense;
  const std::optional<float> silence =
      patterns::ProbesAt(options, step_) ? patterns::SilenceOf(options) : std::nullopt;
  if (silence.has_value()) RETURN_IF_ERROR(call.Silence(ProbedBy(call).rows, *silence));
  absl::StatusOr<std::shared_ptr<LayerIndex>> index =
      patterns::BuildIndex(options, InputsOf(call), call);
  if (silence.has_value()) RETURN_IF_ERROR(call.LetSpeak());
  RETURN_IF_ERROR(index.status());
  RETURN_IF_ERROR(device_.End());
  return index;
}

absl::Status RingRunner::AttendSteps(const Step& own, RingSlots& kv, AttentionCall& call) {
  for (size_t t = 0; t < forward_.steps.size(); ++t) {
    ASSIGN_OR_RETURN(const Step step, Arrive(forward_, t, own, kv));
    if (step.index.has_columns()) RETURN_IF_ERROR(call.GatherColumns(step));
    RETURN_IF_ERROR(call.Attend(step));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RingSlots>> RingRunner::Start(
    const ring::RingSchedule& schedule, const std::shared_ptr<const DeviceDocuments>& documents,
    const Known& known, AttentionCall& call) {
  if (started_ != nullptr || started_forward_.has_value()) {
    return absl::FailedPreconditionError("a pass has been started and not been called");
  }
  ASSIGN_OR_RETURN(std::unique_ptr<RingSlots> kv, PlaceKv(schedule, documents, known, call));
  RETURN_IF_ERROR(StartFirstHops(schedule, ring::RingLink::kOuter, *kv));
  RETURN_IF_ERROR(StartFirstHops(schedule, ring::RingLink::kInner, *kv));
  return kv;
}

absl::Status RingRunner::StartForward(AttentionCall& call) {
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::forward));
  const Known known = KnownOf(call.layer());
  ASSIGN_OR_RETURN(std::unique_ptr<RingSlots> kv, Start(forward_, documents_, known, call));
  started_forward_ = {.kv = std::move(kv), .documents = documents_, .known = known};
  return device_.End();
}

absl::Status RingRunner::StartBackward(const LayerIndex& index, AttentionCall& call) {
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::backward));
  ASSIGN_OR_RETURN(started_, Start(backward_, index.documents, index.known, call));
  return device_.End();
}

absl::Status RingRunner::Backward(const LayerIndex& index, AttentionCall& call,
                                  AttentionCall* next) {
  if (started_ == nullptr) RETURN_IF_ERROR(StartBackward(index, call));
  const std::unique_ptr<RingSlots> kv = std::move(started_);
  if (next != nullptr) RETURN_IF_ERROR(StartBackward(index, *next));
  const int64_t slot_tokens = SlotTokens(index.documents.get(), call.tokens());
  const Step own = OwnStep(index, call);
  RETURN_IF_ERROR(device_.Begin(&AttentionSeconds::backward));
  ASSIGN_OR_RETURN(const std::unique_ptr<RingSlots> gradients,
                   call.PlaceGradients(backward_, slot_tokens));
  const auto rows = RowsOf(backward_, index.documents, index.known, call.tokens());
  if (rows != nullptr) gradients->Carry({rows, &rows->gradients});
  CountHops(backward_, /*gradients=*/true, rows.get(), slot_tokens, call);
  RETURN_IF_ERROR(call.StartGradients());
  // Gradients of the columns are ready before their owners' keys pass by.
  if (index.has_columns()) RETURN_IF_ERROR(call.ColumnsBackward(own));
  RETURN_IF_ERROR(BackwardSteps(own, *kv, *gradients, call));
  RETURN_IF_ERROR(call.FinishQueries());
  RETURN_IF_ERROR(gradients->AwaitAll());
  RETURN_IF_ERROR(call.ReturnGradients(backward_, slot_tokens, *gradients));
  RETURN_IF_ERROR(kv->AwaitAll());
  return device_.End();
}

absl::Status RingRunner::BackwardSteps(const Step& own, RingSlots& kv, RingSlots& gradients,
                                       AttentionCall& call) {
  for (size_t t = 0; t < backward_.steps.size(); ++t) {
    const ring::RingStep& now = backward_.steps[t];
    ASSIGN_OR_RETURN(const Step step, Arrive(backward_, t, own, kv));
    RETURN_IF_ERROR(gradients.Zero(now.grad_slot));
    void* const slot = gradients.memory(now.grad_slot);
    RETURN_IF_ERROR(call.AttendBackward(step, slot));
    if (step.index.has_columns()) RETURN_IF_ERROR(call.ScatterColumns(step, slot));
    for (const ring::GradAction& action : now.grad_actions) {
      switch (action.kind) {
        case ring::GradAction::Kind::kAdd:
          RETURN_IF_ERROR(gradients.Add(action.to_slot, action.from_slot));
          break;
        case ring::GradAction::Kind::kHop:
          RETURN_IF_ERROR(gradients.Start(action.hop));
          break;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ringleader::attention
