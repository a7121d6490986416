// The engine's device on a GPU: it computes in bf16 with fp32 accumulation and master weights, uses
// NCCL between ranks, and waits for the GPU once a step.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"
#include "worker/attention/cuda/cuda_ring_attention.h"
#include "worker/comm/nccl/device_event_pool.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/model/memory/host_activations.h"
#include "worker/model/token_ops/cuda_token_ops.h"
#include "worker/optim/cuda_shard_device.h"
#include "worker/trainer/engine/device_timer.h"
#include "worker/trainer/engine/engine_device.h"
#include "worker/trainer/engine/machine_memory.h"
#include "worker/trainer/engine/model_source.h"

namespace ringleader::trainer {
namespace {

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

// Sets what the libraries read when they start, and so is called before they do. LibTorch then
// throws where it has no deterministic operator.
void ComputeDeterministically() {
  // cuBLAS keeps one workspace a stream; NCCL adds up sums of all sizes in the order of the ring.
  for (const auto& [name, value] :
       {std::pair{"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}, std::pair{"NCCL_ALGO", "Ring"},
        std::pair{"NCCL_PROTO", "Simple"}}) {
    setenv(name, value, /*overwrite=*/0);
  }
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Everything is written before it is read.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

// LibTorch's allocator then maps pages where they are wanted, in place of keeping blocks of fixed
// sizes, which left 7 to 15 GiB of an H200 in fragments (docs/memory.md). What the user's
// environment says of segments stands, and so does what it sets besides.
void ExpandSegments() {
  std::string settings = c10::CachingAllocator::getAllocatorSettings();
  if (absl::StrContains(settings, "expandable_segments")) return;
  if (!settings.empty()) settings += ',';
  c10::CachingAllocator::setAllocatorSettings(settings + "expandable_segments:True");
}

// What is not planned with of a GPU's memory.
int64_t LeftOut(int64_t total) {
  if (c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments()) {
    return model::ReservedBytes(total);
  }
  constexpr double kShareOfFixedSegments = 0.2;
  return static_cast<int64_t>(kShareOfFixedSegments * static_cast<double>(total));
}

class CudaDevice : public EngineDevice {
 public:
  CudaDevice(const TrainingJob& job, comm::Communicator& world) : job_(job), world_(world) {}
  absl::Status SetUp(Host& host);

  std::string Describe() const override {
    return absl::StrFormat("CUDA, bf16, %s%s", device_name_,
                           job_.deterministic ? ", deterministic" : "");
  }
  torch::ScalarType type() const override { return torch::kBFloat16; }
  bool is_host() const override { return false; }
  absl::StatusOr<model::MemoryLimits> FreeMemory() override;
  const model::TokenOps& token_ops() const override { return *token_ops_; }
  attention::ContextAttention& attention() override { return *attention_; }
  absl::Status SetAttention(const patterns::AttentionOptions& options) override;
  absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeRing(
      const patterns::AttentionOptions& options) override {
    return attention::CreateCudaRingAttention(options, ring_.get(), heads_.get());
  }
  absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeAttentionAlone(
      const patterns::AttentionOptions& options) override;
  absl::StatusOr<std::vector<double>> Exchange(int partner, size_t bytes, int times) override;
  balance::MachineKind Machine() const override;
  absl::StatusOr<std::unique_ptr<optim::ShardDevice>> MakeShardDevice() override {
    return optim::CudaShardDevice::Create(gpus_.get());
  }
  absl::StatusOr<model::HostCopies*> PinHostMemory(int64_t layers, int64_t layer_bytes) override {
    ASSIGN_OR_RETURN(host_activations_, model::HostActivations::Create(layers, layer_bytes));
    return host_activations_.get();
  }
  // Copies to the device while the host goes on.
  torch::Tensor Upload(const std::vector<int64_t>& values) override;
  void Begin(Interval interval) override { TimerOf(interval).Start(kernels::ops::Stream()); }
  void End(Interval interval) override { TimerOf(interval).Stop(kernels::ops::Stream()); }
  double TakeSeconds(Interval interval) override { return TimerOf(interval).Seconds(); }
  double TakeOffloadSeconds() override;
  // The buffers that travel lie outside of LibTorch's memory and are never freed.
  uint64_t PeakBytes() const override {
    return PeakDeviceBytes(device_) + ring_->allocated_bytes() +
           (alone_ == nullptr ? 0 : alone_->allocated_bytes());
  }

 private:
  absl::Status Connect();
  comm::NcclOptions Transfers() const {
    return {.device = device_, .transfer_timeout = absl::Seconds(job_.transfer_timeout_seconds)};
  }
  DeviceTimer& TimerOf(Interval interval) { return timers_[interval == Interval::kModel ? 0 : 1]; }

  const TrainingJob& job_;
  comm::Communicator& world_;
  int device_ = 0;
  std::string device_name_;
  // Members are destroyed in reverse order: what was split off goes before what it came from.
  std::unique_ptr<comm::DeviceCommunicator> gpus_;   // all ranks: gradients
  std::unique_ptr<comm::DeviceCommunicator> ring_;   // RingRanks()
  std::unique_ptr<comm::DeviceCommunicator> heads_;  // HeadRanks(); null: this rank has all heads
  // This rank; null until they are needed.
  std::unique_ptr<comm::Communicator> host_alone_;
  std::unique_ptr<comm::DeviceCommunicator> alone_;
  std::map<int, std::unique_ptr<comm::DeviceCommunicator>> pairs_;  // by partner
  std::unique_ptr<attention::ContextAttention> attention_;
  const std::unique_ptr<model::TokenOps> token_ops_ = model::NewCudaTokenOps();
  std::unique_ptr<model::HostActivations> host_activations_;  // null: nothing leaves the GPU
  DeviceTimer timers_[2];
};

absl::Status CudaDevice::SetUp(Host& host) {
  host.SetPlace(0, "starting the GPU");
  at::set_num_threads(job_.threads);
  if (job_.deterministic) ComputeDeterministically();
  ASSIGN_OR_RETURN(device_, ChooseDevice(job_));
  RETURN_IF_ERROR(kernels::ops::LoadTorchCuda());
  ExpandSegments();
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device_));
  cudaDeviceProp properties;
  RETURN_IF_ERROR(
      comm::CudaError(cudaGetDeviceProperties(&properties, device_), "the GPU's figures"));
  device_name_ = properties.name;
  // LibTorch's FP8 products with a scale for each row need Hopper's tensor cores.
  if (job_.precision != model::Precision::kModelType && properties.major < 9) {
    return absl::FailedPreconditionError(
        absl::StrFormat("training.precision: fp8 needs a GPU of compute capability 9.0 or more "
                        "(Hopper), and %s has "
                        "%d.%d; set training.precision: bfloat16",
                        device_name_, properties.major, properties.minor));
  }
  return Connect();
}

absl::Status CudaDevice::Connect() {
  ASSIGN_OR_RETURN(gpus_, comm::CreateNcclCommunicator(Transfers(), &world_));
  // The ring has a communicator of its own even if it is all ranks: its hops share no channel.
  ASSIGN_OR_RETURN(ring_, gpus_->Split(RingRanks(job_)));
  if (job_.attention.head_ranks > 1) {
    ASSIGN_OR_RETURN(heads_, gpus_->Split(HeadRanks(job_)));
  }
  return SetAttention(job_.attention);
}

absl::Status CudaDevice::SetAttention(const patterns::AttentionOptions& options) {
  attention_.reset();  // what it holds may not fit beside the next one's
  ASSIGN_OR_RETURN(attention_, AttentionOf(options, job_.ring_rank(), *this));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<attention::ContextAttention>> CudaDevice::MakeAttentionAlone(
    const patterns::AttentionOptions& options) {
  if (alone_ == nullptr) {
    ASSIGN_OR_RETURN(host_alone_, world_.Split({world_.rank()}));
    ASSIGN_OR_RETURN(alone_, comm::CreateNcclCommunicator(Transfers(), host_alone_.get()));
  }
  return attention::CreateCudaRingAttention(options, alone_.get());
}

absl::StatusOr<std::vector<double>> CudaDevice::Exchange(int partner, size_t bytes, int times) {
  std::unique_ptr<comm::DeviceCommunicator>& pair = pairs_[partner];
  const int rank = world_.rank();
  if (pair == nullptr) {
    ASSIGN_OR_RETURN(pair, gpus_->Split({std::min(rank, partner), std::max(rank, partner)}));
  }
  constexpr comm::Channel kChannel[] = {comm::Channel::kKvInner};
  ASSIGN_OR_RETURN(const std::shared_ptr<void> sent, pair->Allocate(bytes, kChannel));
  ASSIGN_OR_RETURN(const std::shared_ptr<void> received, pair->Allocate(bytes, kChannel));
  const cudaStream_t stream = kernels::ops::Stream();
  RETURN_IF_ERROR(comm::CudaError(cudaStreamSynchronize(stream), "measuring a link"));
  const int other = 1 - pair->rank();
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    const auto start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(const comm::DeviceTransfer transfer,
                     pair->SendReceive(kChannel[0], sent.get(), bytes, other, received.get(), bytes,
                                       other, stream));
    RETURN_IF_ERROR(transfer->Order(stream));
    RETURN_IF_ERROR(comm::CudaError(cudaStreamSynchronize(stream), "measuring a link"));
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

balance::MachineKind CudaDevice::Machine() const {
  int kilohertz = 0, driver = 0;
  (void)cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device_);
  (void)cudaDriverGetVersion(&driver);
  return {.device = device_name_,
          .clocks = absl::StrFormat("SM up to %d MHz", kilohertz / 1000),
          .driver = absl::StrFormat("CUDA %d.%d", driver / 1000, driver % 1000 / 10),
          .build = MeasuringBuild()};
}

absl::StatusOr<model::MemoryLimits> CudaDevice::FreeMemory() {
  size_t free = 0, total = 0;
  RETURN_IF_ERROR(comm::CudaError(cudaMemGetInfo(&free, &total), "the GPU's free memory"));
  ASSIGN_OR_RETURN(const int64_t host, HostMemoryShare(job_.ranks_per_node));
  const int64_t left = static_cast<int64_t>(free) - LeftOut(static_cast<int64_t>(total));
  return model::MemoryLimits{.device = std::max<int64_t>(0, left), .host = host};
}

torch::Tensor CudaDevice::Upload(const std::vector<int64_t>& values) {
  torch::Tensor pinned =
      torch::empty({static_cast<int64_t>(values.size())},
                   torch::TensorOptions().dtype(torch::kInt64).pinned_memory(true));
  std::copy(values.begin(), values.end(), pinned.mutable_data_ptr<int64_t>());
  return pinned.to(torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(device_)),
                   /*non_blocking=*/true);
}

double CudaDevice::TakeOffloadSeconds() {
  if (host_activations_ == nullptr) return 0.0;
  const absl::StatusOr<double> waited = host_activations_->TakeWaitSeconds();
  kernels::ops::Check(waited.status());
  return *waited;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineDevice>> CreateCudaDevice(const TrainingJob& job,
                                                               comm::Communicator& world,
                                                               Host& host) {
  auto device = std::make_unique<CudaDevice>(job, world);
  RETURN_IF_ERROR(device->SetUp(host));
  return device;
}

}  // namespace ringleader::trainer
