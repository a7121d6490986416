#include "worker/trainer/engine/cuda_engine.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"
#include "model_shape/memory_estimate.h"
#include "worker/attention/runner/cuda_ring_attention.h"
#include "worker/comm/nccl/device_event_pool.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/model/decoder/cuda_token_ops.h"
#include "worker/model/decoder/sharded_decoder.h"
#include "worker/model/files/huggingface.h"
#include "worker/model/memory/host_activations.h"
#include "worker/optim/sharded_adamw.h"
#include "worker/trainer/engine/device_timer.h"
#include "worker/trainer/engine/machine_memory.h"
#include "worker/trainer/engine/model_source.h"

namespace ringleader::trainer {
namespace {

// Of a GPU's memory, for what the plan leaves out: NCCL's buffers, the attention index, kernels'
// code, and what the allocator loses in fragments where a job comes near the limit.
constexpr double kReservedShare = 0.14;

// One GPU is visible where the worker gave this trainer its own; all of them otherwise.
absl::StatusOr<int> ChooseDevice(const TrainingJob& job) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("resources.engine is cuda, but this machine has no usable GPU (%s); set "
                        "resources.engine: cpu, or install the driver",
                        cudaGetErrorString(error)));
  }
  return job.rank % job.ranks_per_node % count;
}

// Before the libraries that read it start. LibTorch then throws where it has no such operator.
void ComputeDeterministically() {
  // cuBLAS: one workspace a stream. NCCL: sums of all sizes in the order of the ring.
  for (const auto& [name, value] :
       {std::pair{"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}, std::pair{"NCCL_ALGO", "Ring"},
        std::pair{"NCCL_PROTO", "Simple"}}) {
    setenv(name, value, /*overwrite=*/0);
  }
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Everything is written before it is read.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

class CudaEngine : public StepEngine {
 public:
  CudaEngine(const TrainingJob& job, comm::Communicator& world) : job_(job), world_(world) {}
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
  int64_t NonFiniteParameter() const override { return optimizer_->NonFiniteParameter(); }
  absl::StatusOr<optim::ShardSource> Snapshot() override { return optimizer_->Snapshot(); }
  int64_t shard_begin() const override { return optimizer_->shard_begin(); }
  int64_t shard_elements() const override { return optimizer_->shard_elements(); }
  int64_t updates() const override { return optimizer_->updates(); }
  absl::Status Restore(optim::OptimizerShard shard, int64_t updates) override {
    return optimizer_->Restore(shard, updates);
  }
  absl::Status ExportModel(const std::string& folder) override;

 private:
  int64_t LocalTokens() const { return static_cast<int64_t>(job_.sequence_length) / job_.context; }
  absl::Status Connect();
  // Chooses what to recompute; FAILED_PRECONDITION, with the arithmetic, if nothing fits.
  absl::Status PlanMemory(const model::ModelConfig& config);
  // For what the plan keeps on the host. RESOURCE_EXHAUSTED where the system does not give it.
  absl::Status PinHostMemory(const model::ModelConfig& config);
  absl::StatusOr<std::vector<float>> StartWeights(const model::ModelConfig& config,
                                                  const model::ParameterLayout& layout) const;
  // Copies to the device behind the host's back.
  torch::Tensor Upload(const std::vector<int64_t>& values) const;
  model::TokenBatch Batch(const data::LocalSequence& sequence) const;
  absl::Status SetDocuments(const data::LocalSequence& sequence);

  const TrainingJob& job_;
  comm::Communicator& world_;
  int device_ = 0;
  std::string device_name_;
  model::TrainingPlan memory_plan_;
  // Destroyed in this order's reverse: what is split off, then what it came from.
  std::unique_ptr<comm::DeviceCommunicator> gpus_;     // all ranks: gradients
  std::unique_ptr<comm::DeviceCommunicator> context_;  // the ranks that share this rank's sequences
  std::unique_ptr<attention::ContextAttention> attention_;
  std::unique_ptr<optim::ShardedAdamW> optimizer_;
  model::CudaTokenOps token_ops_;
  std::unique_ptr<model::HostActivations> host_activations_;  // null: nothing leaves the GPU
  std::unique_ptr<model::ShardedDecoder> decoder_;

  torch::Tensor loss_sum_;  // of the step's micro-batches so far, fp32 on the device
  int64_t labels_ = 0;      // likewise
  DeviceTimer model_timer_, update_timer_;
};

absl::Status CudaEngine::SetUp(Host& host) {
  host.SetPlace(0, "starting the GPU");
  at::set_num_threads(job_.threads);
  if (job_.deterministic) ComputeDeterministically();
  ASSIGN_OR_RETURN(device_, ChooseDevice(job_));
  RETURN_IF_ERROR(kernels::ops::LoadTorchCuda());
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device_));
  cudaDeviceProp properties;
  RETURN_IF_ERROR(
      comm::CudaError(cudaGetDeviceProperties(&properties, device_), "the GPU's figures"));
  device_name_ = properties.name;
  RETURN_IF_ERROR(Connect());

  host.SetPlace(0, "loading the model");
  ASSIGN_OR_RETURN(const model::ModelConfig config, LoadConfig(job_));
  const model::ParameterLayout layout = model::MakeParameterLayout(config);
  RETURN_IF_ERROR(PlanMemory(config));
  ASSIGN_OR_RETURN(const std::vector<float> start, StartWeights(config, layout));
  ASSIGN_OR_RETURN(optimizer_,
                   optim::ShardedAdamW::Create(job_.adamw, layout, gpus_.get(), torch::kBFloat16,
                                               start, memory_plan_.sharding));
  if (memory_plan_.recompute.host_layers > 0) {
    host.SetPlace(0, "pinning host memory");
    RETURN_IF_ERROR(PinHostMemory(config));
  }
  model::ShardedDecoderOptions decoder_options;
  decoder_options.recompute = memory_plan_.recompute;
  decoder_options.host_copies = host_activations_.get();
  decoder_ =
      std::make_unique<model::ShardedDecoder>(config, token_ops_, *optimizer_, decoder_options);
  return absl::OkStatus();
}

absl::Status CudaEngine::Connect() {
  const comm::NcclOptions options = {
      .device = device_, .transfer_timeout = absl::Seconds(job_.transfer_timeout_seconds)};
  ASSIGN_OR_RETURN(gpus_, comm::CreateNcclCommunicator(options, &world_));
  // Its own, also where it is all ranks: its channels carry nothing else.
  ASSIGN_OR_RETURN(context_, gpus_->Split(ContextRanks(job_)));
  ASSIGN_OR_RETURN(attention_, attention::CreateCudaRingAttention(job_.attention, context_.get()));
  return absl::OkStatus();
}

absl::Status CudaEngine::PlanMemory(const model::ModelConfig& config) {
  const model::ShardedShape shape = {
      .ranks = world_.size(), .tokens = LocalTokens(), .ranks_per_node = job_.ranks_per_node};
  size_t free = 0, total = 0;
  RETURN_IF_ERROR(comm::CudaError(cudaMemGetInfo(&free, &total), "the GPU's free memory"));
  ASSIGN_OR_RETURN(const int64_t host, HostMemoryShare(job_.ranks_per_node));
  // Every rank must plan alike: all take the least that any has. None takes anything before all
  // have looked.
  const double reserved = kReservedShare * static_cast<double>(total);
  float least[2] = {-static_cast<float>(std::max(0.0, static_cast<double>(free) - reserved)),
                    -static_cast<float>(host)};
  RETURN_IF_ERROR(world_.AllReduceMax(comm::Channel::kControl, least, 2));
  ASSIGN_OR_RETURN(memory_plan_, model::PlanTraining(config, shape, job_.memory,
                                                     {.device = static_cast<int64_t>(-least[0]),
                                                      .host = static_cast<int64_t>(-least[1])}));
  return absl::OkStatus();
}

absl::Status CudaEngine::PinHostMemory(const model::ModelConfig& config) {
  const model::RecomputePlan& plan = memory_plan_.recompute;
  const int64_t bytes =
      LocalTokens() * model::KeptBytesPerToken(config, sizeof(c10::BFloat16), plan.recompute);
  ASSIGN_OR_RETURN(host_activations_, model::HostActivations::Create(plan.host_layers, bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> CudaEngine::StartWeights(
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

std::vector<std::pair<std::string, std::string>> CudaEngine::Settings() const {
  return {{"engine", absl::StrFormat("CUDA, bf16, %s%s", device_name_,
                                     job_.deterministic ? ", deterministic" : "")},
          {"parameters", memory_plan_.sharding == model::ParameterSharding::kWhole
                             ? "whole on every GPU"
                             : "sharded, two layers at a time"},
          {"recompute", model::DescribeRecompute(config(), memory_plan_.recompute)},
          {"kept for backward", model::DescribeKept(config(), memory_plan_.recompute)},
          {"memory of a rank", model::DescribeMemory(memory_plan_.memory)}};
}

torch::Tensor CudaEngine::Upload(const std::vector<int64_t>& values) const {
  torch::Tensor pinned =
      torch::empty({static_cast<int64_t>(values.size())},
                   torch::TensorOptions().dtype(torch::kInt64).pinned_memory(true));
  std::copy(values.begin(), values.end(), pinned.mutable_data_ptr<int64_t>());
  return pinned.to(torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(device_)),
                   /*non_blocking=*/true);
}

model::TokenBatch CudaEngine::Batch(const data::LocalSequence& sequence) const {
  return {.tokens = Upload(sequence.tokens),
          .positions = Upload(sequence.positions),
          .labels = Upload(sequence.labels),
          .sequence_length = sequence.sequence_length};
}

void CudaEngine::BeginStep() {
  const torch::NoGradGuard no_grad;
  model_timer_.Start(kernels::ops::Stream());
  optimizer_->ZeroGradients();
  loss_sum_ = torch::Tensor();
  labels_ = 0;
}

absl::Status CudaEngine::SetDocuments(const data::LocalSequence& sequence) {
  if (!job_.document_mask) return absl::OkStatus();
  return attention_->SetDocuments(sequence.sequence_length, sequence.document_firsts);
}

absl::Status CudaEngine::ForwardBackward(const data::LocalSequence& sequence) {
  const torch::NoGradGuard no_grad;
  RETURN_IF_ERROR(SetDocuments(sequence));
  const torch::Tensor loss = decoder_->ForwardBackward(Batch(sequence), *attention_);
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + loss : loss;
  labels_ += std::count_if(sequence.labels.begin(), sequence.labels.end(),
                           [](int64_t label) { return label != data::kIgnoreLabel; });
  return absl::OkStatus();
}

absl::StatusOr<StepUpdate> CudaEngine::Update(double learning_rate) {
  const torch::NoGradGuard no_grad;
  const cudaStream_t stream = kernels::ops::Stream();
  model_timer_.Stop(stream);
  const double waited = optimizer_->AwaitSnapshot();
  update_timer_.Start(stream);
  ASSIGN_OR_RETURN(const optim::ShardedStep step,
                   optimizer_->Step(learning_rate, loss_sum_, labels_));
  update_timer_.Stop(stream);
  return StepUpdate{.sum = {.loss = step.loss * step.tokens, .tokens = step.tokens},
                    .gradient_norm = step.gradient_norm,
                    .skipped = step.skipped,
                    .snapshot_seconds = waited};
}

absl::StatusOr<LossSum> CudaEngine::Loss(const data::LocalSequence& sequence) {
  const torch::NoGradGuard no_grad;
  RETURN_IF_ERROR(SetDocuments(sequence));
  const torch::Tensor loss = decoder_->Loss(Batch(sequence), *attention_);
  const auto labels = std::count_if(sequence.labels.begin(), sequence.labels.end(),
                                    [](int64_t label) { return label != data::kIgnoreLabel; });
  return LossSum{.loss = loss.item<double>(), .tokens = static_cast<double>(labels)};
}

EngineStats CudaEngine::TakeStats() {
  attention::AttentionStats stats = attention_->TakeStats();
  EngineStats result;
  PhaseSeconds& phases = result.phases;
  phases.index = stats.seconds.index;
  phases.attention_forward = stats.seconds.forward;
  phases.attention_backward = stats.seconds.backward;
  phases.exposed_communication = stats.seconds.exposed_communication;
  if (host_activations_ != nullptr) {
    const absl::StatusOr<double> waited = host_activations_->TakeWaitSeconds();
    kernels::ops::Check(waited.status());
    phases.exposed_offload = *waited;
  }
  phases.linear = std::max(0.0, model_timer_.Seconds() - stats.seconds.index -
                                    stats.seconds.forward - stats.seconds.backward -
                                    phases.exposed_communication - phases.exposed_offload);
  phases.optimizer = update_timer_.Seconds();
  result.layers = std::move(stats.layers);
  // What travels lies outside LibTorch's memory, and stays.
  result.peak_memory_bytes = PeakDeviceBytes(device_) + context_->allocated_bytes();
  return result;
}

absl::Status CudaEngine::ExportModel(const std::string& folder) {
  const bool first = world_.rank() == 0;
  std::vector<float> whole(first ? layout().elements : 0);
  RETURN_IF_ERROR(optimizer_->GatherMaster(first ? whole.data() : nullptr));
  if (!first) return absl::OkStatus();
  return model::ExportModel(folder, config(), layout(), whole.data());
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepEngine>> CreateCudaEngine(const TrainingJob& job,
                                                             comm::Communicator& world,
                                                             Host& host) {
  auto engine = std::make_unique<CudaEngine>(job, world);
  RETURN_IF_ERROR(engine->SetUp(host));
  return engine;
}

}  // namespace ringleader::trainer
