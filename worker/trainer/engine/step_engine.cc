#include "worker/trainer/engine/step_engine.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/check_options.h"
#include "patterns/pattern.h"
#include "ring/head_shares.h"
#include "worker/attention/documents/chosen_document_attention.h"
#include "worker/attention/documents/document_attention.h"
#include "worker/attention/documents/short_document_attention.h"
#include "worker/trainer/engine/model_source.h"

namespace ringleader::trainer {
namespace {

int64_t CountLabels(const data::LocalSequence& sequence) {
  return std::count_if(sequence.labels.begin(), sequence.labels.end(),
                       [](int64_t label) { return label != data::kIgnoreLabel; });
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepEngine>> StepEngine::Create(const TrainingJob& job,
                                                               comm::Communicator& world,
                                                               Host& host) {
  ASSIGN_OR_RETURN(std::unique_ptr<EngineDevice> device, job.engine == Engine::kCuda
                                                             ? CreateCudaDevice(job, world, host)
                                                             : CreateCpuDevice(job, world, host));
  auto engine = std::unique_ptr<StepEngine>(new StepEngine(job, world, std::move(device)));
  RETURN_IF_ERROR(engine->SetUp(host));
  return engine;
}

absl::StatusOr<std::unique_ptr<attention::ContextAttention>> AttentionOf(
    const patterns::AttentionOptions& options, int rank, EngineDevice& device) {
  ASSIGN_OR_RETURN(std::unique_ptr<attention::ContextAttention> ring, device.MakeRing(options));
  if (options.by_documents) {
    const patterns::AttentionOptions by_itself = attention::AloneOptions(options);
    ASSIGN_OR_RETURN(std::unique_ptr<attention::ContextAttention> alone,
                     device.MakeAttentionAlone(by_itself));
    if (patterns::AreApart(options)) {
      ASSIGN_OR_RETURN(std::unique_ptr<attention::ContextAttention> dense,
                       device.MakeAttentionAlone(attention::DenseOptions(by_itself)));
      return std::make_unique<attention::ChosenDocumentAttention>(
          options, std::move(ring), std::move(alone), std::move(dense), rank);
    }
    return std::make_unique<attention::DocumentAttention>(options, std::move(ring),
                                                          std::move(alone), rank);
  }
  if (options.dense_below > 0 && options.pattern != patterns::Pattern::kDense) {
    ASSIGN_OR_RETURN(std::unique_ptr<attention::ContextAttention> dense,
                     device.MakeRing(attention::DenseOptions(options)));
    return std::make_unique<attention::ShortDocumentAttention>(options, std::move(ring),
                                                               std::move(dense), rank);
  }
  return ring;
}

absl::Status StepEngine::SetUp(Host& host) {
  host.SetPlace(0, "loading the model");
  ASSIGN_OR_RETURN(const model::ModelConfig config, LoadConfig(job_));
  RETURN_IF_ERROR(model::CheckPrecision(config, job_.precision));
  const model::ParameterLayout layout = model::MakeParameterLayout(config);
  RETURN_IF_ERROR(PlanMemory(config));
  ASSIGN_OR_RETURN(const std::vector<float> start, StartWeights(config, layout));
  ASSIGN_OR_RETURN(shards_, device_->MakeShardDevice());
  ASSIGN_OR_RETURN(optimizer_,
                   optim::ShardedAdamW::Create(job_.adamw, layout, *shards_, device_->type(), start,
                                               memory_plan_.sharding));
  if (MaySumOnceAStep(layout)) optimizer_->SumOnceAStep();
  const model::RecomputePlan& plan = memory_plan_.recompute;
  model::DecoderOptions options;
  options.recompute = plan;
  options.precision = job_.precision;
  if (plan.host_layers > 0) {
    host.SetPlace(0, "pinning host memory");
    const int64_t element = static_cast<int64_t>(c10::elementSize(device_->type()));
    ASSIGN_OR_RETURN(options.host_copies,
                     device_->PinHostMemory(plan.host_layers,
                                            LocalTokens() * model::KeptBytesPerToken(
                                                                config, element, plan.recompute)));
  }
  decoder_ = std::make_unique<model::Decoder>(config, device_->token_ops(), *optimizer_, options);
  return absl::OkStatus();
}

absl::Status StepEngine::PlanMemory(const model::ModelConfig& config) {
  RETURN_IF_ERROR(patterns::CheckHeads(job_.attention, config.heads, config.kv_heads));
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(device_->type()));
  const ring::HeadShares shares = {
      .ranks = job_.attention.head_ranks, .heads = config.heads, .kv_heads = config.kv_heads};
  const patterns::IndexMemory choice =
      patterns::IndexMemoryOf(job_.attention,
                              {.tokens = LocalTokens() * job_.context,
                               .ranks = job_.ring_ranks(),
                               .heads = shares.local_heads(),
                               .kv_heads = shares.local_kv_heads(),
                               .head_dim = config.head_dim,
                               .element_bytes = element_bytes},
                              config.layers);
  const model::TrainingShape shape = {
      .ranks = world_.size(),
      .tokens = LocalTokens(),
      .element_bytes = element_bytes,
      .precision = job_.precision,
      .always_casts = job_.first_cast_step <= 1 && job_.last_cast_step >= job_.steps,
      .ranks_per_node = job_.ranks_per_node,
      .device_is_host = device_->is_host(),
      .choice_bytes = choice.kept,
      .choice_working_bytes = choice.working,
      .head_ranks = job_.attention.head_ranks};
  ASSIGN_OR_RETURN(const model::MemoryLimits free, device_->FreeMemory());
  // Every rank must plan alike: all take the least that any has. None takes anything before all
  // have looked.
  float least[2] = {-static_cast<float>(free.device), -static_cast<float>(free.host)};
  RETURN_IF_ERROR(world_.AllReduceMax(comm::Channel::kControl, least, 2));
  free_bytes_ = static_cast<int64_t>(-least[0]);
  ASSIGN_OR_RETURN(memory_plan_, model::PlanTraining(config, shape, job_.memory,
                                                     {.device = free_bytes_,
                                                      .host = static_cast<int64_t>(-least[1])}));
  return absl::OkStatus();
}

bool StepEngine::MaySumOnceAStep(const model::ParameterLayout& layout) const {
  // Sums in one order and in the other end in other bits, and what memory is free decides here.
  if (job_.deterministic) return false;
  if (!job_.batching.samples || job_.deals_in_order || job_.data == 1 ||
      memory_plan_.sharding != model::ParameterSharding::kWhole) {
    return false;
  }
  const int64_t buffer = layout.PaddedElements(world_.size()) * static_cast<int64_t>(sizeof(float));
  const model::TrainingMemory& memory = memory_plan_.memory;
  return static_cast<double>(memory.total() - memory.buckets + buffer) <=
         model::ComfortableShare(device_->is_host()) * static_cast<double>(free_bytes_);
}

absl::StatusOr<std::vector<float>> StepEngine::StartWeights(
    const model::ModelConfig& config, const model::ParameterLayout& layout) const {
  const int64_t shard = layout.ShardElements(world_.size());
  const int64_t begin = std::min(shard * world_.rank(), layout.elements);
  const int64_t end = std::min(begin + shard, layout.elements);
  std::vector<float> start(shard, 0.0f);
  if (HasRandomInit(job_)) {
    DrawWeights(job_, config, layout, begin, end - begin, start.data());
    return start;
  }
  RETURN_IF_ERROR(model::LoadWeights(job_.model_init, config, layout, begin, shard, start.data()));
  return start;
}

std::vector<std::pair<std::string, std::string>> StepEngine::Settings() const {
  return {{"engine", device_->Describe()},
          {"parameters", memory_plan_.sharding == model::ParameterSharding::kWhole
                             ? "whole on every rank"
                             : "sharded, two layers at a time"},
          {"gradients", sums_once_a_step() ? "summed over ranks once a step"
                                           : "summed over ranks in every micro-batch"},
          {"linear layers", DescribePrecision()},
          {"recompute", model::DescribeRecompute(config(), memory_plan_.recompute)},
          {"kept for backward", model::DescribeKept(config(), memory_plan_.recompute)},
          {"memory of a rank", model::DescribeMemory(memory_plan_.memory)}};
}

std::string StepEngine::DescribePrecision() const {
  const model::CastLayers cast = model::CastLayersOf(config().layers, job_.precision);
  if (cast.count() == 0) return "the model's type";
  std::string steps;
  if (job_.first_cast_step > 1 || job_.last_cast_step < job_.steps) {
    steps = absl::StrFormat(" of steps %d to %d", job_.first_cast_step,
                            std::min(job_.last_cast_step, job_.steps));
  }
  return absl::StrFormat("fp8 (e4m3) in %d of %d layers%s", cast.count(), config().layers, steps);
}

absl::Status StepEngine::SetDocuments(const data::LocalSequence& sequence) {
  if (sequence.layout != nullptr) return device_->attention().SetLayout(*sequence.layout);
  if (job_.document_mask || job_.batching.samples) {
    return device_->attention().SetDocuments(sequence.sequence_length, sequence.document_firsts,
                                             sequence.sequence_length - sequence.content,
                                             sequence.prefix_ends);
  }
  if (job_.attention.mask == patterns::Mask::kCausal) return absl::OkStatus();
  return device_->attention().SetDocuments(sequence.sequence_length, {});
}

model::TokenBatch StepEngine::Batch(const data::LocalSequence& sequence) const {
  return {.tokens = device_->Upload(sequence.tokens),
          .positions = device_->Upload(sequence.positions),
          .labels = device_->Upload(sequence.labels),
          .sequence_length = sequence.rotary_length};
}

void StepEngine::SetPrecisionOf(uint64_t step) {
  decoder_->SetReadsCasts(job_.first_cast_step <= step && step <= job_.last_cast_step);
}

void StepEngine::BeginStep(uint64_t step) {
  const torch::NoGradGuard no_grad;
  SetPrecisionOf(step);
  device_->attention().SetStep(step);
  device_->Begin(EngineDevice::Interval::kModel);
  optimizer_->ZeroGradients();
  loss_sum_ = torch::Tensor();
  labels_ = 0;
}

absl::Status StepEngine::ForwardBackward(const data::LocalSequence& sequence, bool is_last,
                                         float move) {
  const torch::NoGradGuard no_grad;
  if (is_last) optimizer_->LastMicroBatch();
  RETURN_IF_ERROR(SetDocuments(sequence));
  device_->attention().SetMove(move);
  const torch::Tensor loss = decoder_->ForwardBackward(Batch(sequence), device_->attention());
  if (job_.batching.samples) device_->attention().MarkMicroBatch();
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + loss : loss;
  labels_ += CountLabels(sequence);
  return absl::OkStatus();
}

void StepEngine::PassMicroBatch() {
  const torch::NoGradGuard no_grad;
  optimizer_->PassMicroBatch();
}

void StepEngine::PassScore() {
  const torch::NoGradGuard no_grad;
  optimizer_->PassForward();
}

absl::StatusOr<StepUpdate> StepEngine::Update(double learning_rate) {
  const torch::NoGradGuard no_grad;
  device_->End(EngineDevice::Interval::kModel);
  const double waited = optimizer_->AwaitSnapshot();
  device_->Begin(EngineDevice::Interval::kUpdate);
  if (!loss_sum_.defined()) loss_sum_ = torch::zeros({}, shards_->device());  // no sequence at all
  ASSIGN_OR_RETURN(const optim::ShardedStep step,
                   optimizer_->Step(learning_rate, loss_sum_, labels_));
  device_->End(EngineDevice::Interval::kUpdate);
  return StepUpdate{.sum = {.loss = step.loss * step.tokens, .tokens = step.tokens},
                    .gradient_norm = step.gradient_norm,
                    .skipped = step.skipped,
                    .snapshot_seconds = waited};
}

absl::StatusOr<RankScores> StepEngine::Score(const data::LocalSequence& sequence) {
  const torch::NoGradGuard no_grad;
  device_->attention().SetStep(0);
  RETURN_IF_ERROR(SetDocuments(sequence));
  const model::TokenScores scores = decoder_->Score(Batch(sequence), device_->attention());
  const torch::Tensor losses = scores.losses.cpu(), right = scores.right.cpu();
  const auto* first_loss = losses.const_data_ptr<float>();
  const auto* first_right = right.const_data_ptr<bool>();
  return RankScores{.losses = {first_loss, first_loss + losses.numel()},
                    .right = {first_right, first_right + right.numel()}};
}

absl::StatusOr<EngineStats> StepEngine::TakeStats() {
  ASSIGN_OR_RETURN(const optim::ShardDevice::Waits waits, shards_->TakeWaits());
  attention::AttentionStats stats = device_->attention().TakeStats();
  EngineStats result;
  PhaseSeconds& phases = result.phases;
  phases.index = stats.seconds.index;
  phases.attention_forward = stats.seconds.forward;
  phases.attention_backward = stats.seconds.backward;
  phases.exposed_communication = stats.seconds.exposed_communication;
  phases.exposed_offload = device_->TakeOffloadSeconds();
  phases.exposed_exchange = waits.model + waits.update;
  phases.linear =
      std::max(0.0, device_->TakeSeconds(EngineDevice::Interval::kModel) - stats.seconds.index -
                        stats.seconds.forward - stats.seconds.backward -
                        phases.exposed_communication - phases.exposed_offload - waits.model);
  phases.optimizer =
      std::max(0.0, device_->TakeSeconds(EngineDevice::Interval::kUpdate) - waits.update);
  result.layers = std::move(stats.layers);
  result.micro_batches = std::move(stats.micro_batches);
  result.head_bytes = stats.head_bytes;
  result.ring_bytes = stats.ring_bytes;
  result.peak_memory_bytes = device_->PeakBytes();
  return result;
}

absl::Status StepEngine::ExportModel(const std::string& folder,
                                     const model::ExportOptions& options) {
  const bool first = world_.rank() == 0;
  std::vector<float> whole(first ? layout().elements : 0);
  RETURN_IF_ERROR(optimizer_->GatherMaster(first ? whole.data() : nullptr));
  if (!first) return absl::OkStatus();
  return model::ExportModel(folder, config(), layout(), whole.data(), options);
}

}  // namespace ringleader::trainer
