// Device memory that peers write into directly.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl/nccl_session.h"

namespace ringleader::comm {

// Registered with the communicators whose transfers it holds (NCCL's user buffer registration).
// NCCL registers what it has allocated itself; with one rank it is CUDA's. Not thread-safe.
class NcclMemory {
 public:
  // `allocated` counts the bytes as long as they are held.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> Create(
      std::shared_ptr<NcclSession> session, size_t bytes, std::vector<Channel> channels,
      std::shared_ptr<std::atomic<size_t>> allocated);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  void* data() const { return data_; }
  // If it is for transfers of `channel`, whose communicator this is.
  absl::Status RegisterWith(Channel channel, const std::shared_ptr<WatchedComm>& comm);

 private:
  struct Registration {
    std::shared_ptr<WatchedComm> comm;
    void* handle;
  };

  NcclMemory(std::shared_ptr<NcclSession> session, size_t bytes, std::vector<Channel> channels,
             std::shared_ptr<std::atomic<size_t>> allocated);

  const std::shared_ptr<NcclSession> session_;
  const size_t bytes_;
  const std::vector<Channel> channels_;
  const std::shared_ptr<std::atomic<size_t>> allocated_;
  void* data_ = nullptr;
  std::vector<Registration> registrations_;
};

}  // namespace ringleader::comm
