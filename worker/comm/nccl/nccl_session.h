// What the NCCL communicators of one process have in common: the watchdog that finds failures, and
// the one fate that they share.
#pragma once

#include <nccl.h>

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl/device_event_pool.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/comm/nccl/nccl_library.h"

namespace ringleader::comm {

// A transfer or collective on the wire, for errors.
struct DeviceOperation {
  const char* name = "";  // literal
  Channel channel = Channel::kControl;
  size_t bytes = 0;
  int to = -1, from = -1;  // ranks of the attempt; -1: everyone
};

// "kv_inner send/receive of 1048576 bytes, to rank 3, from rank 1"
std::string Describe(const DeviceOperation& operation);

// One NCCL communicator, which the watchdog may abort while another thread uses it.
class WatchedComm {
 public:
  explicit WatchedComm(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }

  // Runs `call(comm)` unless the communicator is gone, which is ncclInvalidUsage.
  template <typename Call>
  ncclResult_t Use(Call call) {
    std::lock_guard lock(mutex_);
    return comm_ == nullptr ? ncclInvalidUsage : call(comm_);
  }

  void set_comm(ncclComm_t comm);
  // Takes the communicator away; null if it is gone. A user that is stuck inside NCCL is waited for
  // 1 s only: ncclCommAbort is what sets it free.
  ncclComm_t Take();

 private:
  const std::string name_;
  std::timed_mutex mutex_;
  ncclComm_t comm_ = nullptr;
};

// Thread-safe.
class NcclSession {
 public:
  // `host` outlives this. `nccl` is null for one rank alone.
  NcclSession(const NcclOptions& options, const NcclLibrary* nccl, Communicator* host);
  // Aborts what is still open.
  ~NcclSession();

  const NcclOptions& options() const { return options_; }
  bool has_nccl() const { return nccl_ != nullptr; }
  const NcclLibrary& nccl() const { return *nccl_; }
  const std::shared_ptr<DeviceEventPool>& events() const { return events_; }

  // The first call's reason stays. The other ranks hear of it through the host's communicator.
  void Abort(const std::string& reason);
  // Aborts for an error that was noticed here. Where it comes of another rank's death, which the
  // host's communicator learns of within a moment, that is the reason, and not this.
  absl::Status Fail(const absl::Status& error);
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  // Has the watchdog check a communicator and, from the second overload on, each transfer on it.
  void Watch(std::shared_ptr<WatchedComm> comm) ABSL_LOCKS_EXCLUDED(mutex_);
  void Watch(const DeviceOperation& operation, std::shared_ptr<const DeviceEventPool::Event> done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(const WatchedComm* comm) ABSL_LOCKS_EXCLUDED(mutex_);

  // "rank 1 of 4: <what>: <NCCL's words>"
  absl::Status NcclError(ncclResult_t result, const std::string& what) const;

 private:
  struct Pending {
    DeviceOperation operation;
    absl::Time enqueued;
    std::shared_ptr<const DeviceEventPool::Event> done;
  };
  // Transfers of a channel in the order in which the host has enqueued them; those of a ring and
  // those among ranks that share heads may overtake each other.
  struct Queue {
    std::deque<Pending> pending;
    absl::Time last_end = absl::InfinitePast();
  };

  void WatchdogLoop();
  // What is wrong now, if anything.
  absl::Status CheckComms() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckTransfers() ABSL_LOCKS_EXCLUDED(mutex_);
  void AbortComms() ABSL_LOCKS_EXCLUDED(mutex_);

  const NcclOptions options_;
  const NcclLibrary* const nccl_;
  Communicator* const host_;
  const std::shared_ptr<DeviceEventPool> events_;

  std::atomic<bool> aborted_ = false;
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::list<std::shared_ptr<WatchedComm>> comms_ ABSL_GUARDED_BY(mutex_);
  std::vector<Queue> queues_ ABSL_GUARDED_BY(mutex_);  // by channel
  std::thread watchdog_;
};

}  // namespace ringleader::comm
