// Point-to-point transfers between the ranks of one attempt: what GroupCommunicator builds its
// collectives from, and all that an implementation (threads of one process, gRPC streams) has to
// provide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringleader::comm {

// One direction of one transfer: the buffer, and whether it is done. Shared by the caller and the
// transport. `bytes` at `data` belong to the caller; the transport touches them only between Claim
// and Release.
class PendingTransfer {
 public:
  PendingTransfer(void* data, size_t bytes) : data(static_cast<char*>(data)), bytes(bytes) {}

  char* const data;
  const size_t bytes;

  // Claims the buffer; false once finished (the caller may have freed it). Claims nest.
  bool Claim() ABSL_LOCKS_EXCLUDED(mutex_);
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);

  // The first call decides.
  void Finish(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Finishes with OK as soon as nothing claims the buffer.
  void FinishWhenReleased() ABSL_LOCKS_EXCLUDED(mutex_);

  // Blocks until finished and no longer claimed, or claimed for `patience` since: only a frozen
  // peer can hold a buffer for longer, through bytes that the kernel has not taken yet; the process
  // is about to leave then.
  absl::Status Wait(absl::Duration patience = absl::Milliseconds(1500)) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool Unclaimed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return claims_ == 0; }

  absl::Mutex mutex_;
  int claims_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finish_when_released_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

using PendingTransferPtr = std::shared_ptr<PendingTransfer>;

// Names an ordered stream between two ranks: a channel of a communicator or of one that was split
// off.
using StreamId = uint32_t;

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Messages of a (stream, pair) are matched in order. Neither call blocks. `to` and `from` may be
  // this rank.
  virtual void Send(StreamId stream, int to, PendingTransferPtr transfer) = 0;
  virtual void Receive(StreamId stream, int from, PendingTransferPtr transfer) = 0;

  // These three are as in Communicator.
  virtual void Abort(const std::string& reason) = 0;
  virtual absl::Status status() const = 0;
  virtual bool aborted_by_peer() const = 0;
};

}  // namespace ringleader::comm
