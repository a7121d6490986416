#include "worker/comm/grpc/outgoing_stream.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/boot_clock.h"
#include "base/protocol_version.h"
#include "base/wait/timed_wait.h"
#include "worker/comm/grpc/channel_arguments.h"
#include "worker/comm/grpc/frame.h"

namespace ringleader::comm {
namespace {

// Large enough that per-frame work is lost in the copy, small enough that the two ends overlap.
constexpr size_t kFrameBytes = size_t{1} << 20;

}  // namespace

OutgoingStream::OutgoingStream(const std::string& address,
                               const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                               const Identity& identity, StreamId stream, EndedCallback on_ended)
    : identity_(identity), stream_(stream), on_ended_(std::move(on_ended)) {
  channel_ = grpc::CreateCustomChannel(address, credentials, PeerChannelArguments());
  context_ = std::make_unique<grpc::ClientContext>();
  context_->set_wait_for_ready(true);
  grpc::GenericStub stub(channel_);
  stub.PrepareBidiStreamingCall(context_.get(), "/ringleader.v1.PeerExchange/Stream", {}, this);
  StartRead(&response_);
  AddHold();  // writes start from other threads, until the read ends
  StartCall();
  Pump();
}

OutgoingStream::~OutgoingStream() {
  Cancel();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&ended_));
}

void OutgoingStream::Cancel() {
  absl::MutexLock lock(&mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void OutgoingStream::Send(PendingTransferPtr transfer) {
  {
    absl::MutexLock lock(&mutex_);
    if (!broken_.ok()) return transfer->Finish(broken_);
    queue_.push_back(std::move(transfer));
  }
  Pump();
}

void OutgoingStream::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
  }
  Pump();
}

void OutgoingStream::LeaveAborted(const std::string& reason) {
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
    abort_reason_ = reason;
  }
  Pump();
}

void OutgoingStream::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  FailQueue(status);
}

bool OutgoingStream::WaitUntilEnded(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return AwaitFor(mutex_, absl::Condition(&ended_), deadline - BootNow());
}

void OutgoingStream::FailQueue(const absl::Status& status) {
  if (broken_.ok()) broken_ = status;
  for (const PendingTransferPtr& transfer : queue_) transfer->Finish(broken_);
  queue_.clear();
}

bool OutgoingStream::NextFrame() {
  v1::Frame header;
  if (!greeted_) {
    greeted_ = true;
    header.set_sender(identity_.rank);
    header.set_fencing_token(identity_.fencing_token);
    header.set_channel(stream_);
    header.set_protocol_version(kProtocolVersion);
    next_ = EncodeFrame(header);
    return true;
  }
  if (!queue_.empty()) {
    const PendingTransferPtr& transfer = queue_.front();
    const size_t bytes = std::min(kFrameBytes, transfer->bytes - sent_bytes_);
    if (!transfer->Claim()) {
      // Dropped by its owner: what the peer has of it can no longer be made whole.
      FailQueue(absl::CancelledError("an earlier transfer of this stream was dropped"));
      return false;
    }
    header.set_sequence(sequence_ + 1);
    header.set_total_bytes(transfer->bytes);
    if (bytes > 0) {
      next_ = EncodeFrame(header, transfer, sent_bytes_, bytes);
    } else {
      next_ = EncodeFrame(header);
      transfer->Release();
    }
    sent_bytes_ += bytes;
    transfer_in_flight_ = true;
    return true;
  }
  if (leaving_ && !last_frame_) {
    last_frame_ = true;
    header.set_leaving(true);
    header.set_abort_reason(abort_reason_);
    next_ = EncodeFrame(header);
    return true;
  }
  return false;
}

void OutgoingStream::Pump() {
  bool last = false;
  {
    absl::MutexLock lock(&mutex_);
    if (writing_ || closed_ || last_frame_ || !NextFrame()) return;
    writing_ = true;
    last = last_frame_;
  }
  if (last) {
    StartWriteLast(&next_, grpc::WriteOptions());
  } else {
    StartWrite(&next_);
  }
}

// The peer answers once it has read the goodbye; before that, the read ends only with the stream.
void OutgoingStream::OnReadDone(bool /*ok*/) {
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    if (writing_) return;  // OnWriteDone lets go: no write may start after the hold is gone
  }
  RemoveHold();
}

void OutgoingStream::OnWriteDone(bool ok) {
  bool closed = false;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    next_.Clear();
    if (ok && transfer_in_flight_ && !queue_.empty() && sent_bytes_ == queue_.front()->bytes) {
      queue_.front()->FinishWhenReleased();
      queue_.pop_front();
      sent_bytes_ = 0;
      ++sequence_;
    }
    transfer_in_flight_ = false;
    closed = closed_;
  }
  closed ? RemoveHold() : Pump();
}

void OutgoingStream::OnDone(const grpc::Status& status) {
  on_ended_(status);
  absl::MutexLock lock(&mutex_);
  FailQueue(absl::UnavailableError(
      absl::StrFormat("the stream to the peer has ended: %s", status.error_message())));
  context_.reset();
  ended_ = true;
}

}  // namespace ringleader::comm
