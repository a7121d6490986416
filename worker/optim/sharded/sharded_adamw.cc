#include "worker/optim/sharded/sharded_adamw.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/ops/check_status.h"
#include "worker/optim/decay_ranges.h"
#include "worker/optim/sharded/block_owners.h"
#include "worker/optim/sharded/gathered_parameters.h"

namespace ringleader::optim {
namespace {

using kernels::ops::Check;
using torch::Tensor;

// Copies of master weights pass through device memory a piece at a time.
constexpr int64_t kGatherElements = int64_t{64} << 20;

// A gradient buffer, and the reductions of what it held; of own_sum those of all blocks that took
// their turn.
struct Bucket {
  Tensor buffer;  // fp32
  int block = -1;
  bool open = false;
  std::vector<ShardTransferPtr> reductions;
};

}  // namespace

struct ShardedAdamW::State {
  AdamWOptions options;
  model::ParameterLayout layout;
  ShardDevice* device = nullptr;
  int rank = 0, ranks = 1;
  int64_t begin = 0, elements = 0;  // of this rank's shard
  std::vector<DecayRange> ranges;

  std::unique_ptr<GatheredParameters> parameters;
  Tensor master, first_moment, second_moment;  // [elements] fp32
  Tensor gradient;                             // [elements] fp32, reduced
  Bucket buckets[kPlaces];                     // even layers, odd layers, embedding, final
  Tensor own_sum;        // SumOnceAStep: [ranks * elements] fp32, of this rank's micro-batches
  bool is_last = false;  // the micro-batch in work is this rank's last
  Tensor totals;         // [3] of the device's sum_type()
  int64_t updates = 0;

  absl::Status Open(int block, Bucket& bucket);
  absl::Status Close(Bucket& bucket);
  absl::Status Update(double learning_rate, const Tensor& scale);
  absl::Status GatherMasterWeights();
};

absl::Status ShardedAdamW::State::Open(int block, Bucket& bucket) {
  const model::ParameterBlock& range = layout.blocks[block];
  bucket.block = block;
  bucket.open = true;
  if (ranks == 1) {
    bucket.buffer = gradient.narrow(0, range.begin, range.elements);
    return absl::OkStatus();
  }
  if (own_sum.defined()) {
    // Each block has a place of its own. Whoever waited here for what is reduced of another would
    // wait for a group that may still be in an earlier micro-batch, in the middle of backward.
    bucket.buffer = own_sum.narrow(0, range.begin, range.elements);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(Await(bucket.reductions));
  // Layers differ in nothing, so a bucket that fits one fits all.
  if (!bucket.buffer.defined()) bucket.buffer = torch::empty({range.elements}, gradient.options());
  bucket.buffer.zero_();
  // What earlier micro-batches left with the owner goes through the next reduction again.
  return ForOwners(range, elements, [&](int owner, int64_t from, int64_t to) {
    if (owner == rank) {
      bucket.buffer.narrow(0, from - range.begin, to - from)
          .copy_(gradient.narrow(0, from - begin, to - from));
    }
    return absl::OkStatus();
  });
}

absl::Status ShardedAdamW::State::Close(Bucket& bucket) {
  bucket.open = false;
  if (ranks == 1 || (own_sum.defined() && !is_last)) return absl::OkStatus();
  const model::ParameterBlock& range = layout.blocks[bucket.block];
  return ForOwners(range, elements, [&](int owner, int64_t from, int64_t to) -> absl::Status {
    const Tensor part = bucket.buffer.narrow(0, from - range.begin, to - from);
    const Tensor home = owner == rank ? gradient.narrow(0, from - begin, to - from) : part;
    ASSIGN_OR_RETURN(ShardTransferPtr reduction, device->ReduceSum(part, home, owner));
    bucket.reductions.push_back(std::move(reduction));
    return absl::OkStatus();
  });
}

absl::Status ShardedAdamW::State::Update(double learning_rate, const Tensor& scale) {
  const Tensor own = parameters->Own();
  const bool writes_bf16 = own.defined() && own.scalar_type() == torch::kBFloat16;
  for (const DecayRange& range : ranges) {
    const int64_t at = range.begin - begin;
    ShardUpdate update = {.master = master.mutable_data_ptr<float>() + at,
                          .first_moment = first_moment.mutable_data_ptr<float>() + at,
                          .second_moment = second_moment.mutable_data_ptr<float>() + at,
                          .gradient = gradient.const_data_ptr<float>() + at,
                          .count = range.end - range.begin,
                          .scale = scale,
                          .learning_rate = learning_rate,
                          .weight_decay = range.decayed ? options.weight_decay : 0.0,
                          .step = updates + 1};
    if (writes_bf16) update.parameters = own.mutable_data_ptr<at::BFloat16>() + at;
    RETURN_IF_ERROR(device->Update(options, update));
  }
  if (own.defined() && !writes_bf16) own.copy_(master);
  return parameters->Gather();
}

absl::Status ShardedAdamW::State::GatherMasterWeights() {
  if (const Tensor own = parameters->Own(); own.defined()) own.copy_(master);
  return parameters->Gather();
}

ShardedAdamW::ShardedAdamW(std::unique_ptr<State> state) : state_(std::move(state)) {}
ShardedAdamW::~ShardedAdamW() = default;

absl::StatusOr<std::unique_ptr<ShardedAdamW>> ShardedAdamW::Create(
    const AdamWOptions& options, const model::ParameterLayout& layout, ShardDevice& device,
    torch::ScalarType type, std::span<const float> master, model::ParameterSharding sharding) {
  auto state = std::make_unique<State>();
  state->options = options;
  state->layout = layout;
  state->rank = device.rank();
  state->ranks = device.size();
  state->device = &device;
  state->elements = layout.ShardElements(state->ranks);
  state->begin = state->elements * state->rank;
  if (static_cast<int64_t>(master.size()) != state->elements) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d of %d holds %d elements, but was given %d start weights",
                        state->rank, state->ranks, state->elements, master.size()));
  }
  if (type != torch::kBFloat16 && type != torch::kFloat) {
    return absl::InvalidArgumentError("parameters must be bfloat16 or float32");
  }
  state->ranges = CutByDecay(layout, state->begin, state->begin + state->elements);

  const auto floats = torch::dtype(torch::kFloat).device(device.device());
  state->master = torch::empty({state->elements}, floats);
  state->first_moment = torch::zeros({state->elements}, floats);
  state->second_moment = torch::zeros({state->elements}, floats);
  state->gradient = torch::zeros({state->elements}, floats);
  state->totals = torch::zeros({3}, floats.dtype(device.sum_type()));
  state->master.copy_(torch::from_blob(const_cast<float*>(master.data()), {state->elements}));
  state->parameters = std::make_unique<GatheredParameters>(
      state->layout, device, state->master, type,
      /*is_whole=*/sharding == model::ParameterSharding::kWhole || state->ranks == 1);
  RETURN_IF_ERROR(state->GatherMasterWeights());
  return std::unique_ptr<ShardedAdamW>(new ShardedAdamW(std::move(state)));
}

void ShardedAdamW::SumOnceAStep() {
  TORCH_CHECK(state_->parameters->is_whole(),
              "ranks that gather parameters meet in every micro-batch");
  if (state_->ranks == 1) return;
  state_->own_sum = torch::zeros({state_->elements * state_->ranks}, state_->gradient.options());
}

bool ShardedAdamW::sums_once_a_step() const {
  return state_->own_sum.defined();
}

void ShardedAdamW::LastMicroBatch() {
  state_->is_last = true;
}

void ShardedAdamW::ZeroGradients() {
  // The last reductions write what is zeroed.
  for (Bucket& bucket : state_->buckets) Check(Await(bucket.reductions));
  state_->gradient.zero_();
  if (sums_once_a_step()) state_->own_sum.zero_();
  state_->is_last = false;
}

Tensor ShardedAdamW::Parameters(int block, int next) {
  return state_->parameters->Parameters(block, next);
}

void ShardedAdamW::HoldCasts(const model::TokenOps& ops, model::CastLayers layers) {
  const torch::NoGradGuard no_grad;
  state_->parameters->HoldCasts(ops, layers);
}

model::CastBlock ShardedAdamW::CastParameters(int block, int next) {
  return state_->parameters->CastParameters(block, next);
}

void ShardedAdamW::SetReadsCasts(bool reads_casts) {
  const torch::NoGradGuard no_grad;
  state_->parameters->SetReadsCasts(reads_casts);
}

Tensor ShardedAdamW::OpenGradient(int block) {
  Bucket& bucket = state_->buckets[PlaceOf(state_->layout, block)];
  if (!bucket.open) Check(state_->Open(block, bucket));
  TORCH_CHECK(bucket.block == block, "gradient block ", bucket.block, " is still open");
  return bucket.buffer;
}

void ShardedAdamW::CloseGradient(int block) {
  Bucket& bucket = state_->buckets[PlaceOf(state_->layout, block)];
  TORCH_CHECK(bucket.open && bucket.block == block, "gradient block ", block, " is not open");
  Check(state_->Close(bucket));
}

void ShardedAdamW::PassForward() {
  for (int block = 0; block < LastBlock(state_->layout); ++block) PassBlock(block, block + 1);
}

void ShardedAdamW::PassBlock(int block, int next) {
  if (state_->parameters->IsCast(block)) {
    CastParameters(block, next);
  } else {
    Parameters(block, next);
  }
}

void ShardedAdamW::PassMicroBatch() {
  PassForward();
  LastMicroBatch();
  for (int block = LastBlock(state_->layout); block >= 0; --block) {
    if (IsLayer(state_->layout, block)) PassBlock(block, block - 1);
    OpenGradient(block);
    CloseGradient(block);
  }
}

absl::StatusOr<ShardedStep> ShardedAdamW::Step(double learning_rate, const Tensor& loss_sum,
                                               int64_t tokens) {
  State& state = *state_;
  const torch::NoGradGuard no_grad;
  state.device->BeginUpdate();
  for (Bucket& bucket : state.buckets) RETURN_IF_ERROR(Await(bucket.reductions));

  // [squared norm of the sum's gradient, loss, tokens]
  RETURN_IF_ERROR(state.device->SumOfSquares(state.gradient, state.totals[0]));
  state.totals[1].copy_(loss_sum);
  state.totals[2].fill_(static_cast<double>(tokens));
  if (state.ranks > 1) {
    ASSIGN_OR_RETURN(const ShardTransferPtr transfer, state.device->AllReduceSum(state.totals));
    if (transfer != nullptr) RETURN_IF_ERROR(transfer->Await());
  }
  // Clipping and the mean over tokens in one factor; without a token, or with a bad gradient, it is
  // not finite and the device's update changes nothing.
  const Tensor count = state.totals[2], norm = state.totals[0].sqrt() / count;
  Tensor scale = torch::ones_like(norm);
  if (state.options.clip_norm > 0.0) scale = (state.options.clip_norm / norm).clamp_max(1.0);
  scale = torch::where(norm.isfinite(), scale, norm) / count;
  RETURN_IF_ERROR(state.device->ReadFigures(torch::stack({norm, state.totals[1] / count, count})));
  state.device->AwaitSnapshot();
  RETURN_IF_ERROR(state.Update(learning_rate, scale));

  ASSIGN_OR_RETURN(const auto figures, state.device->TakeFigures());
  const ShardedStep step{.loss = figures[1],
                         .tokens = figures[2],
                         .gradient_norm = figures[0],
                         .skipped = !std::isfinite(figures[0])};
  if (!step.skipped) ++state.updates;
  return step;
}

int64_t ShardedAdamW::NonFiniteParameter() const {
  const State& state = *state_;
  for (size_t i = 0; i < state.layout.slots.size(); ++i) {
    const model::ParameterSlot& slot = state.layout.slots[i];
    const int64_t from = std::max(slot.offset, state.begin);
    const int64_t to = std::min(slot.offset + slot.elements, state.begin + state.elements);
    if (from >= to) continue;
    const Tensor finite = state.gradient.narrow(0, from - state.begin, to - from).isfinite().all();
    if (!finite.item<bool>()) return static_cast<int64_t>(i);
  }
  return -1;
}

int64_t ShardedAdamW::shard_begin() const {
  return state_->begin;
}
int64_t ShardedAdamW::shard_elements() const {
  return state_->elements;
}
int64_t ShardedAdamW::updates() const {
  return state_->updates;
}

absl::StatusOr<ShardSource> ShardedAdamW::Snapshot() {
  const State& state = *state_;
  return state.device->Snapshot(state.begin, state.master, state.first_moment, state.second_moment);
}

double ShardedAdamW::AwaitSnapshot() {
  return state_->device->AwaitSnapshot();
}

absl::Status ShardedAdamW::Restore(const OptimizerShard& shard, int64_t updates) {
  State& state = *state_;
  const auto fits = [&](const std::vector<float>& values) {
    return static_cast<int64_t>(values.size()) == state.elements;
  };
  if (shard.begin != state.begin || !fits(shard.master) || !fits(shard.first_moment) ||
      !fits(shard.second_moment)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "optimizer state for elements [%d, %d) does not fit rank %d, which holds [%d, %d)",
        shard.begin, shard.begin + shard.elements(), state.rank, state.begin,
        state.begin + state.elements));
  }
  state.device->AwaitSnapshot();
  const auto copy = [&](const std::vector<float>& from, const Tensor& to) {
    to.copy_(torch::from_blob(const_cast<float*>(from.data()), {state.elements}));
  };
  copy(shard.master, state.master);
  copy(shard.first_moment, state.first_moment);
  copy(shard.second_moment, state.second_moment);
  state.updates = updates;
  return state.GatherMasterWeights();
}

absl::Status ShardedAdamW::GatherMaster(float* values) {
  State& state = *state_;
  const Tensor piece =
      torch::empty({std::min(kGatherElements, state.elements)}, state.master.options());
  for (int owner = 0; owner < state.ranks; ++owner) {
    for (int64_t at = 0; at < state.elements; at += piece.numel()) {
      const int64_t count = std::min(piece.numel(), state.elements - at);
      const Tensor part = piece.narrow(0, 0, count);
      if (owner == state.rank) part.copy_(state.master.narrow(0, at, count));
      if (state.ranks > 1) {
        ASSIGN_OR_RETURN(const ShardTransferPtr transfer, state.device->Broadcast(part, owner));
        if (transfer != nullptr) RETURN_IF_ERROR(transfer->Await());
      }
      // The last shard may reach past the model.
      const int64_t place = owner * state.elements + at;
      const int64_t kept = std::min(count, state.layout.elements - place);
      if (values != nullptr && kept > 0) {
        torch::from_blob(values + place, {kept}).copy_(part.narrow(0, 0, kept));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ringleader::optim
