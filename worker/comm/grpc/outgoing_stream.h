// The sending half of one stream to one peer.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/transport.h"

namespace ringleader::comm {

// Thread-safe. A stream has a connection of its own, so that no other stream's bytes queue before
// its own.
class OutgoingStream : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  struct Identity {
    int rank = 0;
    uint64_t fencing_token = 0;
  };
  // Called once, when the stream has ended for any reason.
  using EndedCallback = std::function<void(const grpc::Status& status)>;

  // Dials `address`, waiting for it to come up, and says who sends.
  OutgoingStream(const std::string& address,
                 const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                 const Identity& identity, StreamId stream, EndedCallback on_ended);
  // Cancels the stream if it has not ended, and waits for that. Not from a callback.
  ~OutgoingStream() override;

  void Send(PendingTransferPtr transfer);

  // Says goodbye after what is queued, and closes.
  void Leave();
  // Says that the sender gave up for `reason`, and closes. What is queued is dropped.
  void LeaveAborted(const std::string& reason);
  // Finishes what is queued, and all that will be, with `status`.
  void Fail(const absl::Status& status);
  void Cancel();
  // False if the stream has not ended at `deadline`.
  bool WaitUntilEnded(absl::Time deadline);

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // Starts the next write, if none is in flight and there is something to say.
  void Pump() ABSL_LOCKS_EXCLUDED(mutex_);
  // Fills next_ with the next frame; false if there is none now. Sets last_frame_ with a goodbye.
  bool NextFrame() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailQueue(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Identity identity_;
  const StreamId stream_;
  const EndedCallback on_ended_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ByteBuffer response_;

  absl::Mutex mutex_;
  // Gone with the stream's end: it holds on to what was not sent, which is the callers' memory.
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);
  std::deque<PendingTransferPtr> queue_ ABSL_GUARDED_BY(mutex_);  // front: being sent
  size_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;                 // of the front
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;                 // of the front
  bool greeted_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  std::string abort_reason_ ABSL_GUARDED_BY(mutex_);
  bool last_frame_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool transfer_in_flight_ ABSL_GUARDED_BY(mutex_) = false;  // the write is of the front
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;              // the peer answered, or is gone
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ByteBuffer next_;  // belongs to the write in flight
};

}  // namespace ringleader::comm
