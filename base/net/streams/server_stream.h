// One bidirectional stream on a gRPC server (callback API) with the hard parts done once: one read
// and one write under way at a time, a queue of messages to write that is bounded in bytes, reads
// that stop while there is no room for what they bring, one Finish, and a lifetime that ends when
// gRPC is done and nobody holds it any more.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/net/grpc_status.h"
#include "base/net/streams/call_patience.h"

namespace ringleader {

// Thread-safe. Make it with std::make_shared, call Begin() once, and hand it to gRPC.
template <typename Incoming, typename Outgoing>
class ServerStream : public grpc::ServerBidiReactor<Incoming, Outgoing>,
                     public std::enable_shared_from_this<ServerStream<Incoming, Outgoing>> {
 public:
  // Once it was closed, a peer that does not read what is under way is waited for as long as
  // `end_patience`, and cut off then.
  void Begin(const grpc::CallbackServerContext* context,
             absl::Duration end_patience = absl::Seconds(10)) {
    self_ = this->shared_from_this();
    {
      absl::MutexLock lock(&mutex_);
      context_ = context;
      end_patience_ = end_patience;
    }
    this->StartRead(&incoming_);
  }

  // Queued after earlier messages; dropped once the stream has ended.
  void Send(Outgoing message) {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    const size_t bytes = kBytesOfEntry + WireBytes(message);
    if (!outgoing_.empty() && queued_bytes_ + bytes > kMaxQueuedBytes) {
      FinishLocked(absl::ResourceExhaustedError("the peer reads too slowly"));
      return;
    }
    queued_bytes_ += bytes;
    outgoing_.push_back({std::move(message), bytes});
    WriteNext();
  }

  // Ends the stream with this status; what is queued is dropped at once. The first status counts.
  void Close(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    FinishLocked(status);
  }

 protected:
  // Messages in order, one at a time; must not block. An error closes the stream.
  virtual absl::Status OnMessage(Incoming& message) = 0;
  // The last call: nothing will be read or written any more.
  virtual void OnEnd() = 0;

  // Whether the next message may be read. Asked under the stream's lock: must return at once and
  // call no method of the stream. After a "no", whoever makes room calls ReadOn(); until then the
  // peer's messages wait in the network, and the peer with them.
  virtual bool HasRoom() const { return true; }
  void ReadOn() {
    absl::MutexLock lock(&mutex_);
    ReadNext();
  }

 private:
  // A peer that leaves so much unread is stuck. A message costs more than its bytes.
  static constexpr size_t kMaxQueuedBytes = size_t{64} << 20;
  static constexpr size_t kBytesOfEntry = 512;

  struct Entry {
    Outgoing message;
    size_t bytes = 0;
  };

  static size_t WireBytes(const grpc::ByteBuffer& message) { return message.Length(); }
  static size_t WireBytes(const google::protobuf::MessageLite& message) {
    return message.ByteSizeLong();
  }

  void OnReadDone(bool ok) final {
    if (!ok) {
      Close(absl::OkStatus());
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
    }
    if (absl::Status status = OnMessage(incoming_); !status.ok()) {
      Close(status);
      return;
    }
    incoming_.Clear();
    absl::MutexLock lock(&mutex_);
    may_read_ = true;
    ReadNext();
  }

  void OnWriteDone(bool ok) final {
    absl::MutexLock lock(&mutex_);
    queued_bytes_ -= outgoing_.front().bytes;
    outgoing_.pop_front();
    writing_ = false;
    if (ok) WriteNext();
  }

  void OnCancel() final { Close(absl::CancelledError("the peer went away")); }

  void OnDone() final {
    const auto self = std::move(self_);  // until the end of this call
    {
      absl::MutexLock lock(&mutex_);  // behind FinishLocked()
    }
    end_.End();
    OnEnd();
  }

  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!may_read_ || finished_ || !HasRoom()) return;
    may_read_ = false;
    this->StartRead(&incoming_);
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_ || outgoing_.empty()) return;
    writing_ = true;
    this->StartWrite(&outgoing_.front().message);
  }

  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    while (outgoing_.size() > (writing_ ? 1 : 0)) outgoing_.pop_back();
    end_.Begin(*context_, end_patience_);
    this->Finish(ToGrpcStatus(status));
  }

  std::shared_ptr<ServerStream> self_;  // set until OnDone
  Incoming incoming_;                   // touched by reads only

  absl::Mutex mutex_;
  std::deque<Entry> outgoing_ ABSL_GUARDED_BY(mutex_);  // front: being written
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // of them
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool may_read_ ABSL_GUARDED_BY(mutex_) = false;  // no read is under way
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  const grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Duration end_patience_ ABSL_GUARDED_BY(mutex_);
  CallPatience end_;  // begins under the lock, before Finish()
};

}  // namespace ringleader
