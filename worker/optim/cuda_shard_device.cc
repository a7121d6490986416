#include "worker/optim/cuda_shard_device.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/status_macros.h"
#include "kernels/fused/adamw_update.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/ops/cuda_call.h"

namespace ringleader::optim {
namespace {

using comm::Channel;
using comm::ElementType;
using kernels::ops::Stream;
using torch::Tensor;

class CudaTransfer : public ShardTransfer {
 public:
  // `*timers`: those of the time of Await; outlive this.
  CudaTransfer(comm::DeviceTransfer transfer, attention::DeviceTimers* const* timers)
      : transfer_(std::move(transfer)), timers_(timers) {}
  absl::Status Await() override {
    RETURN_IF_ERROR((*timers_)->BeginWait(Stream()));
    RETURN_IF_ERROR(transfer_->Order(Stream()));
    return (*timers_)->EndWait(Stream());
  }

 private:
  const comm::DeviceTransfer transfer_;
  attention::DeviceTimers* const* const timers_;
};

}  // namespace

absl::StatusOr<ShardTransferPtr> CudaShardDevice::Wrap(
    absl::StatusOr<comm::DeviceTransfer> transfer) {
  RETURN_IF_ERROR(transfer.status());
  if (*transfer == nullptr) return nullptr;
  return std::make_unique<CudaTransfer>(*std::move(transfer), &timers_);
}

absl::StatusOr<ShardDevice::Waits> CudaShardDevice::TakeWaits() {
  timers_ = &model_timers_;
  ASSIGN_OR_RETURN(const attention::AttentionSeconds model, model_timers_.Take());
  ASSIGN_OR_RETURN(const attention::AttentionSeconds update, update_timers_.Take());
  return Waits{.model = model.exposed_communication, .update = update.exposed_communication};
}

absl::StatusOr<std::unique_ptr<CudaShardDevice>> CudaShardDevice::Create(
    comm::DeviceCommunicator* comm) {
  auto device = std::unique_ptr<CudaShardDevice>(new CudaShardDevice(comm));
  device->norm_workspace_ =
      torch::empty({static_cast<int64_t>(kernels::fused::SquaredNormWorkspaceBytes())},
                   torch::dtype(torch::kByte).device(torch::kCUDA));
  device->figures_ = torch::zeros({3}, torch::dtype(torch::kDouble).pinned_memory(true));
  RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&device->figures_ready_, cudaEventDisableTiming),
                       "ShardedAdamW: event");
  return device;
}

CudaShardDevice::~CudaShardDevice() {
  if (figures_ready_ != nullptr) cudaEventDestroy(figures_ready_);
}

absl::StatusOr<ShardTransferPtr> CudaShardDevice::ReduceSum(const Tensor& data, const Tensor& sum,
                                                            int owner) {
  return Wrap(comm_->ReduceSum(Channel::kGradients, data.mutable_data_ptr(), data.numel(),
                               sum.mutable_data_ptr(), ElementType::kFloat32, owner, Stream()));
}

absl::StatusOr<ShardTransferPtr> CudaShardDevice::AllReduceSum(const Tensor& data) {
  return Wrap(comm_->AllReduceSum(Channel::kGradients, data.mutable_data_ptr(), data.numel(),
                                  ElementType::kFloat64, Stream()));
}

absl::StatusOr<ShardTransferPtr> CudaShardDevice::AllGather(const Tensor& whole) {
  const size_t bytes = whole.nbytes() / size();
  char* const data = static_cast<char*>(whole.mutable_data_ptr());
  return Wrap(comm_->AllGather(Channel::kGradients, data + rank() * bytes, bytes, data, Stream()));
}

absl::StatusOr<ShardTransferPtr> CudaShardDevice::Broadcast(const Tensor& data, int root) {
  return Wrap(comm_->Broadcast(Channel::kGradients, data.mutable_data_ptr(), data.nbytes(), root,
                               Stream()));
}

absl::Status CudaShardDevice::SumOfSquares(const Tensor& values, const Tensor& sum) {
  const Tensor squared_norm = torch::empty({}, sum.options().dtype(torch::kFloat));
  RETURN_IF_ERROR(kernels::fused::SquaredNorm(values.const_data_ptr<float>(), values.numel(),
                                              squared_norm.mutable_data_ptr<float>(),
                                              norm_workspace_.mutable_data_ptr(), Stream()));
  sum.copy_(squared_norm);
  return absl::OkStatus();
}

absl::Status CudaShardDevice::Update(const AdamWOptions& options, const ShardUpdate& update) {
  const Tensor scale = update.scale.to(torch::kFloat);
  return kernels::fused::AdamwStep(
      {.master = update.master,
       .m = update.first_moment,
       .v = update.second_moment,
       .gradient = update.gradient,
       .parameter = reinterpret_cast<__nv_bfloat16*>(update.parameters),
       .gradient_scale = scale.const_data_ptr<float>(),
       .count = update.count,
       .step = update.step,
       .learning_rate = static_cast<float>(update.learning_rate),
       .beta1 = static_cast<float>(options.beta1),
       .beta2 = static_cast<float>(options.beta2),
       .epsilon = static_cast<float>(options.epsilon),
       .weight_decay = static_cast<float>(update.weight_decay)},
      Stream());
}

absl::Status CudaShardDevice::ReadFigures(const Tensor& figures) {
  figures_.copy_(figures, /*non_blocking=*/true);
  RETURN_IF_CUDA_ERROR(cudaEventRecord(figures_ready_, Stream()), "ShardedAdamW: figures");
  return absl::OkStatus();
}

absl::StatusOr<std::array<double, 3>> CudaShardDevice::TakeFigures() {
  RETURN_IF_CUDA_ERROR(cudaEventSynchronize(figures_ready_), "a step on the device");
  const auto* const figures = figures_.const_data_ptr<double>();
  return std::array<double, 3>{figures[0], figures[1], figures[2]};
}

absl::StatusOr<ShardSource> CudaShardDevice::Snapshot(int64_t begin, const Tensor& master,
                                                      const Tensor& first_moment,
                                                      const Tensor& second_moment) {
  RETURN_IF_ERROR(copier_->Begin(Stream()));
  // The tensors and the copier are shared: this object may be gone when the copy is made.
  return [begin, master, first_moment, second_moment, copier = copier_,
          end = absl::MakeCleanup(
              [copier = copier_] { copier->End(); })]() mutable -> absl::StatusOr<OptimizerShard> {
    const auto release = std::move(end);
    OptimizerShard shard;
    shard.begin = begin;
    RETURN_IF_ERROR(copier->Copy(
        std::array<ShardCopier::Section, 3>{
            {{master.const_data_ptr<float>(), &shard.master},
             {first_moment.const_data_ptr<float>(), &shard.first_moment},
             {second_moment.const_data_ptr<float>(), &shard.second_moment}}},
        master.numel()));
    return shard;
  };
}

}  // namespace ringleader::optim
