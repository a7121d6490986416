#include "worker/comm/nccl/nccl_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::comm {

NcclMemory::NcclMemory(std::shared_ptr<NcclSession> session, size_t bytes,
                       std::vector<Channel> channels,
                       std::shared_ptr<std::atomic<size_t>> allocated)
    : session_(std::move(session)),
      bytes_(bytes),
      channels_(std::move(channels)),
      allocated_(std::move(allocated)) {}

absl::StatusOr<std::shared_ptr<NcclMemory>> NcclMemory::Create(
    std::shared_ptr<NcclSession> session, size_t bytes, std::vector<Channel> channels,
    std::shared_ptr<std::atomic<size_t>> allocated) {
  const int device = session->options().device;
  RETURN_IF_ERROR(CudaError(cudaSetDevice(device), "choosing the GPU"));
  std::shared_ptr<NcclMemory> memory(
      new NcclMemory(std::move(session), bytes, std::move(channels), std::move(allocated)));
  bool given = true;
  std::string reason;
  if (memory->session_->has_nccl()) {
    const NcclLibrary& nccl = memory->session_->nccl();
    const ncclResult_t result = nccl.mem_alloc(&memory->data_, bytes);
    given = result == ncclSuccess;
    if (!given) reason = nccl.get_error_string(result);
  } else {
    const cudaError_t result = cudaMalloc(&memory->data_, bytes);
    given = result == cudaSuccess;
    if (!given) reason = cudaGetErrorString(result);
  }
  if (!given) {
    memory->data_ = nullptr;
    cudaGetLastError();  // a failed allocation must not look like a later call's error
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return absl::ResourceExhaustedError(absl::StrFormat(
        "GPU %d does not give %.2f GiB for what travels between ranks; %.2f GiB of %.2f are free "
        "(%s)",
        device, static_cast<double>(bytes) / (1 << 30), static_cast<double>(free) / (1 << 30),
        static_cast<double>(total) / (1 << 30), reason));
  }
  *memory->allocated_ += bytes;
  return memory;
}

NcclMemory::~NcclMemory() {
  if (data_ == nullptr) return;
  cudaSetDevice(session_->options().device);
  cudaDeviceSynchronize();  // what is enqueued may use it
  for (const Registration& registration : registrations_) {
    // A communicator that is gone has let go of it.
    registration.comm->Use([&](ncclComm_t comm) {
      return session_->nccl().comm_deregister(comm, registration.handle);
    });
  }
  if (session_->has_nccl()) {
    session_->nccl().mem_free(data_);
  } else {
    cudaFree(data_);
  }
  *allocated_ -= bytes_;
}

absl::Status NcclMemory::RegisterWith(Channel channel, const std::shared_ptr<WatchedComm>& comm) {
  if (std::find(channels_.begin(), channels_.end(), channel) == channels_.end()) {
    return absl::OkStatus();
  }
  void* handle = nullptr;
  const ncclResult_t result = comm->Use(
      [&](ncclComm_t c) { return session_->nccl().comm_register(c, data_, bytes_, &handle); });
  if (result != ncclSuccess) {
    return session_->NcclError(result,
                               absl::StrFormat("%s: registering %d bytes", comm->name(), bytes_));
  }
  registrations_.push_back({comm, handle});
  return absl::OkStatus();
}

}  // namespace ringleader::comm
