#include "worker/trainer/engine/cpu_engine.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "worker/attention/runner/ring_attention.h"
#include "worker/attention/stats/stopwatch.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/files/huggingface.h"
#include "worker/trainer/engine/machine_memory.h"
#include "worker/trainer/engine/model_source.h"

namespace ringleader::trainer {
namespace {

using attention::Stopwatch;

// [n] int64 over memory that `values` keeps.
torch::Tensor Tensor(const std::vector<int64_t>& values) {
  return torch::from_blob(const_cast<int64_t*>(values.data()),
                          {static_cast<int64_t>(values.size())}, torch::kInt64);
}

class CpuEngine : public StepEngine {
 public:
  CpuEngine(const TrainingJob& job, comm::Communicator& world) : job_(job), world_(world) {}
  absl::Status SetUp(Host& host);

  const model::ModelConfig& config() const override { return decoder_->config(); }
  const model::ParameterLayout& layout() const override { return decoder_->layout(); }
  std::vector<std::pair<std::string, std::string>> Settings() const override;
  absl::Status SetBudgets(std::span<const patterns::LayerBudget> budgets) override {
    return attention_->SetBudgets(budgets);
  }
  void BeginStep() override;
  absl::Status ForwardBackward(const data::LocalSequence& sequence) override;
  absl::StatusOr<StepUpdate> Update(double learning_rate) override;
  absl::StatusOr<LossSum> Loss(const data::LocalSequence& sequence) override;
  EngineStats TakeStats() override;
  int64_t NonFiniteParameter() const override;
  absl::StatusOr<optim::ShardSource> Snapshot() override {
    return [shard = optimizer_->shard()]() mutable { return std::move(shard); };
  }
  int64_t shard_begin() const override { return optimizer_->shard().begin; }
  int64_t shard_elements() const override { return optimizer_->shard().elements(); }
  int64_t updates() const override { return optimizer_->updates(); }
  absl::Status Restore(optim::OptimizerShard shard, int64_t updates) override {
    return optimizer_->Restore(std::move(shard), updates, decoder_->parameters());
  }
  absl::Status ExportModel(const std::string& folder) override;

 private:
  absl::StatusOr<LossSum> RunModel(const data::LocalSequence& sequence);

  const TrainingJob& job_;
  comm::Communicator& world_;
  std::unique_ptr<comm::Communicator> context_;  // the ranks that share this rank's sequences
  model::Recompute recompute_ = model::Recompute::kNone;
  std::unique_ptr<model::Decoder> decoder_;
  std::unique_ptr<attention::RingAttention> attention_;
  std::unique_ptr<optim::AdamW> optimizer_;
  LossSum sum_;  // of the step's micro-batches so far
  double model_seconds_ = 0, optimizer_seconds_ = 0;
};

absl::Status CpuEngine::SetUp(Host& host) {
  at::set_num_threads(job_.threads);
  ASSIGN_OR_RETURN(context_, world_.Split(ContextRanks(job_)));
  ASSIGN_OR_RETURN(attention_, attention::RingAttention::Create(job_.attention, context_.get()));

  host.SetPlace(0, "loading the model");
  ASSIGN_OR_RETURN(const model::ModelConfig config, LoadConfig(job_));
  const uint64_t local_tokens = job_.sequence_length / job_.context;
  ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  ASSIGN_OR_RETURN(recompute_,
                   ChooseRecompute(config, world_.size(), static_cast<int64_t>(local_tokens),
                                   available / job_.ranks_per_node));
  // Nobody may begin to fill memory before all have looked at what there is.
  RETURN_IF_ERROR(world_.Barrier());

  decoder_ = std::make_unique<model::Decoder>(config, world_.size(), recompute_);
  if (HasRandomInit(job_)) {
    DrawWeights(job_, config, layout(), 0, layout().elements, decoder_->parameters());
  } else {
    RETURN_IF_ERROR(model::LoadWeights(job_.model_init, config, layout(), decoder_->parameters()));
  }
  optimizer_ = std::make_unique<optim::AdamW>(job_.adamw, layout(), world_, decoder_->parameters());
  return absl::OkStatus();
}

std::vector<std::pair<std::string, std::string>> CpuEngine::Settings() const {
  const model::MemoryEstimate memory =
      model::EstimateMemory(config(), world_.size(),
                            static_cast<int64_t>(job_.sequence_length) / job_.context, recompute_);
  return {{"engine", absl::StrFormat("CPU, %d threads each", job_.threads)},
          {"memory of a rank",
           absl::StrFormat("%s estimated, recompute %s", FormatBytes(memory.total()),
                           recompute_ == model::Recompute::kFull ? "full" : "none")}};
}

void CpuEngine::BeginStep() {
  decoder_->ZeroGradients();
  sum_ = {};
}

absl::StatusOr<LossSum> CpuEngine::RunModel(const data::LocalSequence& sequence) {
  if (job_.document_mask) {
    RETURN_IF_ERROR(attention_->SetDocuments(sequence.sequence_length, sequence.document_firsts));
  }
  const torch::Tensor hidden = decoder_->Forward(
      Tensor(sequence.tokens), Tensor(sequence.positions), sequence.sequence_length, *attention_);
  const model::TokenLoss loss = decoder_->Loss(hidden, Tensor(sequence.labels));
  if (loss.sum.requires_grad()) loss.sum.backward();
  return LossSum{.loss = loss.sum.item<double>(), .tokens = static_cast<double>(loss.tokens)};
}

absl::Status CpuEngine::ForwardBackward(const data::LocalSequence& sequence) {
  const Stopwatch timer(&model_seconds_);
  ASSIGN_OR_RETURN(const LossSum part, RunModel(sequence));
  sum_.loss += part.loss;
  sum_.tokens += part.tokens;
  return absl::OkStatus();
}

absl::StatusOr<LossSum> CpuEngine::Loss(const data::LocalSequence& sequence) {
  const torch::NoGradGuard no_grad;
  return RunModel(sequence);
}

absl::StatusOr<StepUpdate> CpuEngine::Update(double learning_rate) {
  const Stopwatch timer(&optimizer_seconds_);
  double values[2] = {sum_.loss, sum_.tokens};
  RETURN_IF_ERROR(world_.AllReduceSum(comm::Channel::kControl, values, 2));
  StepUpdate update{.sum = {.loss = values[0], .tokens = values[1]}};
  if (update.sum.tokens == 0) return update;
  // Gradients are of the sum so far; the step's loss is the mean over all ranks' tokens.
  float* gradients = decoder_->gradients();
  const auto scale = static_cast<float>(1.0 / update.sum.tokens);
  for (int64_t i = 0; i < decoder_->padded_elements(); ++i) gradients[i] *= scale;
  ASSIGN_OR_RETURN(const optim::OptimizerStep step,
                   optimizer_->Step(learning_rate, gradients, decoder_->parameters()));
  update.gradient_norm = step.gradient_norm;
  update.skipped = step.skipped;
  return update;
}

EngineStats CpuEngine::TakeStats() {
  attention::AttentionStats stats = attention_->TakeStats();
  EngineStats result;
  PhaseSeconds& phases = result.phases;
  phases.index = stats.seconds.index;
  phases.attention_forward = stats.seconds.forward;
  phases.attention_backward = stats.seconds.backward;
  phases.exposed_communication = stats.seconds.exposed_communication;
  phases.linear = std::max(0.0, model_seconds_ - stats.seconds.index - stats.seconds.forward -
                                    stats.seconds.backward - stats.seconds.exposed_communication);
  phases.optimizer = optimizer_seconds_;
  model_seconds_ = optimizer_seconds_ = 0;
  result.layers = std::move(stats.layers);
  result.peak_memory_bytes = PeakMemoryBytes();
  return result;
}

int64_t CpuEngine::NonFiniteParameter() const {
  const auto& slots = layout().slots;
  const float* gradients = decoder_->gradients();
  for (size_t s = 0; s < slots.size(); ++s) {
    const float* begin = gradients + slots[s].offset;
    const bool finite = std::all_of(begin, begin + slots[s].elements,
                                    [](float value) { return std::isfinite(value); });
    if (!finite) return static_cast<int64_t>(s);
  }
  return -1;
}

absl::Status CpuEngine::ExportModel(const std::string& folder) {
  if (world_.rank() != 0) return absl::OkStatus();
  return model::ExportModel(folder, config(), layout(), decoder_->parameters());
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepEngine>> CreateCpuEngine(const TrainingJob& job,
                                                            comm::Communicator& world, Host& host) {
  auto engine = std::make_unique<CpuEngine>(job, world);
  RETURN_IF_ERROR(engine->SetUp(host));
  return engine;
}

}  // namespace ringleader::trainer
