#include "worker/optim/sharded_adamw.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/fused/adamw_update.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/ops/cuda_call.h"
#include "worker/optim/decay_ranges.h"
#include "worker/optim/shard_copier.h"

namespace ringleader::optim {
namespace {

using comm::Channel;
using comm::ElementType;
using kernels::fused::AdamwArgs;
using kernels::ops::Stream;
using torch::Tensor;

// Copies of master weights pass through device memory a piece at a time.
constexpr int64_t kGatherElements = int64_t{64} << 20;

// A gradient buffer, and the reductions of what it held last.
struct Bucket {
  Tensor buffer;  // fp32
  int block = -1;
  bool open = false;
  std::vector<comm::DeviceTransfer> reductions;
};

// A block's parameters, gathered from their owners.
struct GatheredBlock {
  Tensor buffer;  // the model's type
  int block = -1;
  std::vector<comm::DeviceTransfer> broadcasts;
};

// Makes the current stream wait for `transfers`.
absl::Status Await(std::vector<comm::DeviceTransfer>& transfers) {
  for (const comm::DeviceTransfer& transfer : transfers) {
    if (transfer != nullptr) RETURN_IF_ERROR(transfer->Order(Stream()));
  }
  transfers.clear();
  return absl::OkStatus();
}

}  // namespace

struct ShardedAdamW::State {
  AdamWOptions options;
  model::ParameterLayout layout;
  comm::DeviceCommunicator* comm = nullptr;  // null: one rank
  int rank = 0, ranks = 1;
  int64_t begin = 0, elements = 0;  // of this rank's shard
  std::vector<DecayRange> ranges;

  bool whole = true;          // every rank holds all parameters
  Tensor parameters;          // [ranks * elements], or this rank's [elements]; the model's type
  GatheredBlock gathered[4];  // not whole: even layers, odd layers, embedding, final block
  Tensor master, first_moment, second_moment;   // [elements] fp32
  Tensor gradient;                              // [elements] fp32, reduced
  Bucket buckets[4];                            // even layers, odd layers, embedding, final
  std::vector<comm::DeviceTransfer> gathering;  // of parameters
  Tensor norm_workspace, totals, figures;       // totals: [3] device, figures: [3] pinned
  cudaEvent_t figures_ready = nullptr;
  int64_t updates = 0;
  std::shared_ptr<ShardCopier> copier = std::make_shared<ShardCopier>();

  ~State() {
    if (figures_ready != nullptr) cudaEventDestroy(figures_ready);
  }

  int last_block() const { return static_cast<int>(layout.blocks.size()) - 1; }
  bool is_layer(int block) const { return block > 0 && block < last_block(); }
  // Layers take turns at two places.
  int PlaceOf(int block) const { return block == 0 ? 2 : block == last_block() ? 3 : block % 2; }
  // This rank's range of the parameters.
  Tensor OwnParameters() const {
    return whole ? parameters.narrow(0, begin, elements) : parameters;
  }

  // body(rank, begin, end) for the owners of [begin, end).
  template <typename Body>
  absl::Status ForOwners(const model::ParameterBlock& block, Body body) const {
    const int64_t block_end = block.begin + block.elements;
    for (int64_t owner = block.begin / elements; owner * elements < block_end; ++owner) {
      const int64_t from = std::max(block.begin, owner * elements);
      const int64_t to = std::min(block_end, (owner + 1) * elements);
      RETURN_IF_ERROR(body(static_cast<int>(owner), from, to));
    }
    return absl::OkStatus();
  }

  absl::Status Open(int block, Bucket& bucket);
  absl::Status Close(Bucket& bucket);
  absl::Status Update(double learning_rate, const float* scale);
  absl::Status GatherParameters();
  absl::Status Fetch(int block);
  absl::Status CopyFromMaster();
};

absl::Status ShardedAdamW::State::Open(int block, Bucket& bucket) {
  const model::ParameterBlock& range = layout.blocks[block];
  bucket.block = block;
  bucket.open = true;
  if (ranks == 1) {
    bucket.buffer = gradient.narrow(0, range.begin, range.elements);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(Await(bucket.reductions));
  // Layers differ in nothing, so a bucket that fits one fits all.
  if (!bucket.buffer.defined()) bucket.buffer = torch::empty({range.elements}, gradient.options());
  bucket.buffer.zero_();
  // What earlier micro-batches left with the owner goes through the next reduction again.
  return ForOwners(range, [&](int owner, int64_t from, int64_t to) {
    if (owner == rank) {
      bucket.buffer.narrow(0, from - range.begin, to - from)
          .copy_(gradient.narrow(0, from - begin, to - from));
    }
    return absl::OkStatus();
  });
}

absl::Status ShardedAdamW::State::Close(Bucket& bucket) {
  bucket.open = false;
  if (ranks == 1) return absl::OkStatus();
  const model::ParameterBlock& range = layout.blocks[bucket.block];
  return ForOwners(range, [&](int owner, int64_t from, int64_t to) -> absl::Status {
    float* part = bucket.buffer.mutable_data_ptr<float>() + (from - range.begin);
    float* home = owner == rank ? gradient.mutable_data_ptr<float>() + (from - begin) : part;
    ASSIGN_OR_RETURN(comm::DeviceTransfer reduction,
                     comm->ReduceSum(Channel::kGradients, part, to - from, home,
                                     ElementType::kFloat32, owner, Stream()));
    bucket.reductions.push_back(std::move(reduction));
    return absl::OkStatus();
  });
}

absl::Status ShardedAdamW::State::Update(double learning_rate, const float* scale) {
  const Tensor own = OwnParameters();
  const bool bf16 = own.scalar_type() == torch::kBFloat16;
  for (const DecayRange& range : ranges) {
    const int64_t at = range.begin - begin;
    AdamwArgs args = {.master = master.mutable_data_ptr<float>() + at,
                      .m = first_moment.mutable_data_ptr<float>() + at,
                      .v = second_moment.mutable_data_ptr<float>() + at,
                      .gradient = gradient.const_data_ptr<float>() + at,
                      .gradient_scale = scale,
                      .count = range.end - range.begin,
                      .step = updates + 1,
                      .learning_rate = static_cast<float>(learning_rate),
                      .beta1 = static_cast<float>(options.beta1),
                      .beta2 = static_cast<float>(options.beta2),
                      .epsilon = static_cast<float>(options.epsilon)};
    if (range.decayed) args.weight_decay = static_cast<float>(options.weight_decay);
    if (bf16) args.parameter = kernels::ops::MutableBf16(own) + at;
    RETURN_IF_ERROR(kernels::fused::AdamwStep(args, Stream()));
  }
  if (!bf16) own.copy_(master);
  return GatherParameters();
}

absl::Status ShardedAdamW::State::GatherParameters() {
  if (ranks == 1) return absl::OkStatus();
  if (!whole) {
    for (GatheredBlock& layer : std::span(gathered).first(2)) layer.block = -1;
    RETURN_IF_ERROR(Fetch(0));
    return Fetch(last_block());
  }
  const size_t bytes = static_cast<size_t>(elements) * parameters.element_size();
  char* whole = static_cast<char*>(parameters.mutable_data_ptr());
  ASSIGN_OR_RETURN(
      comm::DeviceTransfer transfer,
      comm->AllGather(Channel::kGradients, whole + rank * bytes, bytes, whole, Stream()));
  gathering.push_back(std::move(transfer));
  return absl::OkStatus();
}

// Begins to gather a block in its place, behind what is enqueued so far, readers of the place
// included.
absl::Status ShardedAdamW::State::Fetch(int block) {
  const model::ParameterBlock& range = layout.blocks[block];
  GatheredBlock& place = gathered[PlaceOf(block)];
  if (!place.buffer.defined()) place.buffer = torch::empty({range.elements}, parameters.options());
  RETURN_IF_ERROR(Await(place.broadcasts));
  place.block = block;
  return ForOwners(range, [&](int owner, int64_t from, int64_t to) -> absl::Status {
    const Tensor part = place.buffer.narrow(0, from - range.begin, to - from);
    if (owner == rank) part.copy_(parameters.narrow(0, from - begin, to - from));
    ASSIGN_OR_RETURN(
        comm::DeviceTransfer broadcast,
        comm->Broadcast(Channel::kGradients, part.mutable_data_ptr(),
                        static_cast<size_t>(to - from) * part.element_size(), owner, Stream()));
    place.broadcasts.push_back(std::move(broadcast));
    return absl::OkStatus();
  });
}

absl::Status ShardedAdamW::State::CopyFromMaster() {
  OwnParameters().copy_(master);
  return GatherParameters();
}

ShardedAdamW::ShardedAdamW(std::unique_ptr<State> state) : state_(std::move(state)) {}
ShardedAdamW::~ShardedAdamW() = default;

absl::StatusOr<std::unique_ptr<ShardedAdamW>> ShardedAdamW::Create(
    const AdamWOptions& options, const model::ParameterLayout& layout,
    comm::DeviceCommunicator* comm, torch::ScalarType type, std::span<const float> master,
    model::ParameterSharding sharding) {
  auto state = std::make_unique<State>();
  state->options = options;
  state->layout = layout;
  state->rank = comm == nullptr ? 0 : comm->rank();
  state->ranks = comm == nullptr ? 1 : comm->size();
  state->comm = comm;
  state->whole = sharding == model::ParameterSharding::kWhole || state->ranks == 1;
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

  const auto floats = torch::dtype(torch::kFloat).device(torch::kCUDA);
  state->master = torch::empty({state->elements}, floats);
  state->first_moment = torch::zeros({state->elements}, floats);
  state->second_moment = torch::zeros({state->elements}, floats);
  state->gradient = torch::zeros({state->elements}, floats);
  state->parameters = torch::empty(
      {state->whole ? state->elements * state->ranks : state->elements}, floats.dtype(type));
  state->norm_workspace =
      torch::empty({static_cast<int64_t>(kernels::fused::SquaredNormWorkspaceBytes())},
                   floats.dtype(torch::kByte));
  state->totals = torch::zeros({3}, floats);
  state->figures = torch::zeros({3}, torch::dtype(torch::kFloat).pinned_memory(true));
  RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&state->figures_ready, cudaEventDisableTiming),
                       "ShardedAdamW: event");
  state->master.copy_(torch::from_blob(const_cast<float*>(master.data()), {state->elements}));
  RETURN_IF_ERROR(state->CopyFromMaster());
  return std::unique_ptr<ShardedAdamW>(new ShardedAdamW(std::move(state)));
}

void ShardedAdamW::ZeroGradients() {
  // The last reductions write what is zeroed.
  for (Bucket& bucket : state_->buckets) kernels::ops::Check(Await(bucket.reductions));
  state_->gradient.zero_();
}

Tensor ShardedAdamW::Parameters(int block, int next) {
  State& state = *state_;
  if (state.whole) {
    kernels::ops::Check(Await(state.gathering));
    const model::ParameterBlock& range = state.layout.blocks[block];
    return state.parameters.narrow(0, range.begin, range.elements);
  }
  GatheredBlock& place = state.gathered[state.PlaceOf(block)];
  if (place.block != block) kernels::ops::Check(state.Fetch(block));
  kernels::ops::Check(Await(place.broadcasts));
  // The other place's layer has been used: its reader is enqueued.
  if (state.is_layer(next) && state.gathered[state.PlaceOf(next)].block != next) {
    kernels::ops::Check(state.Fetch(next));
  }
  return place.buffer;
}

Tensor ShardedAdamW::OpenGradient(int block) {
  Bucket& bucket = state_->buckets[state_->PlaceOf(block)];
  if (!bucket.open) kernels::ops::Check(state_->Open(block, bucket));
  TORCH_CHECK(bucket.block == block, "gradient block ", bucket.block, " is still open");
  return bucket.buffer;
}

void ShardedAdamW::CloseGradient(int block) {
  Bucket& bucket = state_->buckets[state_->PlaceOf(block)];
  TORCH_CHECK(bucket.open && bucket.block == block, "gradient block ", block, " is not open");
  kernels::ops::Check(state_->Close(bucket));
}

absl::StatusOr<ShardedStep> ShardedAdamW::Step(double learning_rate, const Tensor& loss_sum,
                                               int64_t tokens) {
  State& state = *state_;
  const torch::NoGradGuard no_grad;
  for (Bucket& bucket : state.buckets) RETURN_IF_ERROR(Await(bucket.reductions));

  // [squared norm of the sum's gradient, loss, tokens]
  float* totals = state.totals.mutable_data_ptr<float>();
  RETURN_IF_ERROR(kernels::fused::SquaredNorm(state.gradient.const_data_ptr<float>(),
                                              state.elements, totals,
                                              state.norm_workspace.mutable_data_ptr(), Stream()));
  state.totals[1].copy_(loss_sum);
  state.totals[2].fill_(static_cast<double>(tokens));
  if (state.ranks > 1) {
    ASSIGN_OR_RETURN(
        const comm::DeviceTransfer transfer,
        state.comm->AllReduceSum(Channel::kGradients, totals, 3, ElementType::kFloat32, Stream()));
    RETURN_IF_ERROR(transfer->Order(Stream()));
  }
  // Clipping and the mean over tokens in one factor; without a token, or with a bad gradient, it is
  // not finite and the update's kernel changes nothing.
  const Tensor count = state.totals[2], norm = state.totals[0].sqrt() / count;
  Tensor scale = torch::ones_like(norm);
  if (state.options.clip_norm > 0.0) scale = (state.options.clip_norm / norm).clamp_max(1.0);
  scale = torch::where(norm.isfinite(), scale, norm) / count;
  state.figures.copy_(torch::stack({norm, state.totals[1] / count, count}), /*non_blocking=*/true);
  RETURN_IF_CUDA_ERROR(cudaEventRecord(state.figures_ready, Stream()), "ShardedAdamW: figures");
  state.copier->Wait();
  RETURN_IF_ERROR(state.Update(learning_rate, scale.const_data_ptr<float>()));

  RETURN_IF_CUDA_ERROR(cudaEventSynchronize(state.figures_ready), "a step on the device");
  const float* figures = state.figures.const_data_ptr<float>();
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
  State& state = *state_;
  RETURN_IF_ERROR(state.copier->Begin(Stream()));
  // The tensors and the copier are shared: this object may be gone when the copy is made.
  return [begin = state.begin, master = state.master, first = state.first_moment,
          second = state.second_moment, copier = state.copier,
          end = absl::MakeCleanup([copier = state.copier] {
            copier->End();
          })]() mutable -> absl::StatusOr<OptimizerShard> {
    const auto release = std::move(end);
    OptimizerShard shard;
    shard.begin = begin;
    RETURN_IF_ERROR(copier->Copy(
        std::array<ShardCopier::Section, 3>{
            {{master.const_data_ptr<float>(), &shard.master},
             {first.const_data_ptr<float>(), &shard.first_moment},
             {second.const_data_ptr<float>(), &shard.second_moment}}},
        master.numel()));
    return shard;
  };
}

double ShardedAdamW::AwaitSnapshot() {
  return state_->copier->Wait();
}

absl::StatusOr<OptimizerShard> ShardedAdamW::Shard() {
  ASSIGN_OR_RETURN(ShardSource source, Snapshot());
  return std::move(source)();
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
  state.copier->Wait();
  const auto copy = [&](const std::vector<float>& from, const Tensor& to) {
    to.copy_(torch::from_blob(const_cast<float*>(from.data()), {state.elements}));
  };
  copy(shard.master, state.master);
  copy(shard.first_moment, state.first_moment);
  copy(shard.second_moment, state.second_moment);
  state.updates = updates;
  return state.CopyFromMaster();
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
        ASSIGN_OR_RETURN(const comm::DeviceTransfer transfer,
                         state.comm->Broadcast(Channel::kGradients, part.mutable_data_ptr(),
                                               count * sizeof(float), owner, Stream()));
        RETURN_IF_ERROR(transfer->Order(Stream()));
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
