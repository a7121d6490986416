#include "worker/comm/grpc/incoming_streams.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "base/net/grpc_status.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "worker/comm/rendezvous.h"

namespace ringleader::comm {

IncomingStream::IncomingStream(IncomingStreams* owner, CertificateNames names,
                               grpc::ByteBuffer* response)
    : owner_(owner), names_(std::move(names)) {
  const grpc::Slice empty;
  *response = grpc::ByteBuffer(&empty, 1);  // a StreamEnd
}

absl::Status IncomingStream::CheckHello(const v1::Frame& hello) const {
  if (hello.fencing_token() != owner_->fencing_token_) {
    return absl::PermissionDeniedError("the fencing token is not that of this attempt");
  }
  RETURN_IF_ERROR(CheckProtocolVersion(absl::StrFormat("rank %d", hello.sender()),
                                       hello.protocol_version(), "this rank"));
  if (hello.sender() >= static_cast<uint32_t>(owner_->ranks_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d is not one of the attempt's %d", hello.sender(), owner_->ranks_));
  }
  return absl::OkStatus();
}

void IncomingStream::Greet() {
  const v1::Frame& hello = frame_->header();
  const std::string wanted =
      owner_->certificates_.empty() ? "" : owner_->certificates_[hello.sender()];
  if (!wanted.empty() && !names_.Hold(wanted)) {
    return Finish(ToGrpcStatus(absl::PermissionDeniedError(absl::StrFormat(
        "rank %d runs on another node: the certificate shown here lacks that node's name, %s",
        hello.sender(), wanted))));
  }
  greeted_ = true;
  sender_ = static_cast<int>(hello.sender());
  stream_ = hello.channel();
  if (stream_ == IncomingStreams::kLifeLine) owner_->events_.arrived(sender_);
  ReadOn();
}

void IncomingStream::OnReadDone(bool ok) {
  if (!ok) {
    if (greeted_ && !left_) owner_->events_.broken(sender_, "its stream broke");
    return Finish(grpc::Status::OK);
  }
  absl::StatusOr<std::unique_ptr<FrameReader>> frame = FrameReader::Parse(&buffer_);
  if (!frame.ok()) return Break(std::string(frame.status().message()));
  frame_ = std::move(*frame);
  const v1::Frame& header = frame_->header();
  if (!greeted_) {
    if (const absl::Status good = CheckHello(header); !good.ok()) return Finish(ToGrpcStatus(good));
    if (!owner_->AwaitsPeers(this)) Greet();
    return;
  }
  if (header.leaving()) {
    left_ = true;
    if (stream_ == IncomingStreams::kLifeLine) {
      header.abort_reason().empty() ? owner_->events_.left(sender_)
                                    : owner_->events_.aborted(sender_, header.abort_reason());
    }
    return ReadOn();
  }
  if (owner_->Offer(this)) ReadOn();
}

void IncomingStream::Break(const std::string& what) {
  if (greeted_ && !left_) owner_->events_.broken(sender_, what);
  left_ = true;
  Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, what));
}

void IncomingStream::ReadOn() {
  frame_.reset();
  buffer_.Clear();
  StartRead(&buffer_);
}

void IncomingStream::OnCancel() {
  // A stream that is not parked has a read under way, or about to start, which ends it.
  if (owner_->Cancel(this)) OnReadDone(false);
}

void IncomingStream::OnDone() {
  owner_->Done(this);
  delete this;
}

IncomingStreams::~IncomingStreams() {
  absl::MutexLock lock(&mutex_);
  const auto all_done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_.empty(); };
  mutex_.Await(absl::Condition(&all_done));
}

IncomingStream* IncomingStreams::Open(CertificateNames names, grpc::ByteBuffer* response) {
  auto* stream = new IncomingStream(this, std::move(names), response);
  {
    absl::MutexLock lock(&mutex_);
    open_.insert(stream);
  }
  stream->StartRead(&stream->buffer_);
  return stream;
}

void IncomingStreams::SetCertificates(const std::vector<std::string>& certificates) {
  certificates_ = certificates;
  std::set<IncomingStream*> early;
  {
    absl::MutexLock lock(&mutex_);
    peers_known_ = true;
    early.swap(early_);
  }
  for (IncomingStream* stream : early) stream->Greet();
}

bool IncomingStreams::AwaitsPeers(IncomingStream* stream) {
  absl::MutexLock lock(&mutex_);
  // One that is cancelled is greeted: its next read fails and ends it.
  if (peers_known_ || stream->cancelled_) return false;
  early_.insert(stream);
  return true;
}

void IncomingStreams::Receive(StreamId stream, int from, PendingTransferPtr transfer) {
  IncomingStream* parked = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    for (int peer : {-1, from}) {
      if (auto failed = failed_.find(peer); failed != failed_.end()) {
        return transfer->Finish(failed->second);
      }
    }
    Inbox& inbox = inboxes_[{from, stream}];
    inbox.receives.push_back(std::move(transfer));
    std::swap(parked, inbox.parked);
  }
  if (parked != nullptr && Offer(parked)) parked->ReadOn();
}

void IncomingStreams::Fail(int peer, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_.emplace(peer, status);
  for (auto& [key, inbox] : inboxes_) {
    if (peer >= 0 && key.first != peer) continue;
    for (const PendingTransferPtr& transfer : inbox.receives) transfer->Finish(status);
    inbox.receives.clear();
    if (inbox.current != nullptr) inbox.current->Finish(status);
  }
}

absl::StatusOr<PendingTransferPtr> IncomingStreams::Match(Inbox* inbox, const FrameReader& frame,
                                                          int from) {
  const v1::Frame& header = frame.header();
  if (inbox->current == nullptr) {
    if (header.sequence() != inbox->sequence + 1) {
      return absl::InternalError(
          absl::StrFormat("message %d came after message %d", header.sequence(), inbox->sequence));
    }
    if (inbox->receives.empty()) return nullptr;
    ++inbox->sequence;
    inbox->total_bytes = header.total_bytes();
    inbox->received_bytes = 0;
    inbox->current = std::move(inbox->receives.front());
    inbox->receives.pop_front();
    if (inbox->total_bytes != inbox->current->bytes) {
      inbox->current->Finish(SizeMismatch(from, inbox->total_bytes, inbox->current->bytes));
    }
  }
  if (header.sequence() != inbox->sequence ||
      frame.payload_bytes() > inbox->total_bytes - inbox->received_bytes) {
    return absl::InternalError(absl::StrFormat("message %d runs over its end", header.sequence()));
  }
  return inbox->current;
}

bool IncomingStreams::Offer(IncomingStream* stream) {
  absl::StatusOr<PendingTransferPtr> transfer;
  bool cancelled = false;
  {
    absl::MutexLock lock(&mutex_);
    Inbox& inbox = inboxes_[{stream->sender_, stream->stream_}];
    transfer = Match(&inbox, *stream->frame_, stream->sender_);
    cancelled = stream->cancelled_;
    if (transfer.ok() && *transfer == nullptr && !cancelled) {
      inbox.parked = stream;
      return false;
    }
  }
  if (!transfer.ok()) {
    stream->Break(std::string(transfer.status().message()));
    return false;
  }
  // A cancelled stream is read on: that read fails and ends it.
  if (*transfer != nullptr) Deliver(stream, *transfer);
  return true;
}

void IncomingStreams::Deliver(IncomingStream* stream, const PendingTransferPtr& transfer) {
  const FrameReader& frame = *stream->frame_;
  size_t offset = 0;
  bool last = false;
  {
    absl::MutexLock lock(&mutex_);
    Inbox& inbox = inboxes_[{stream->sender_, stream->stream_}];
    offset = inbox.received_bytes;
    inbox.received_bytes += frame.payload_bytes();
    last = inbox.received_bytes == inbox.total_bytes;
    if (last) inbox.current = nullptr;
  }
  // False after a failure, another size among them: the bytes are dropped.
  if (transfer->Claim()) {
    stream->frame_->CopyPayload(transfer->data + offset);
    transfer->Release();
  }
  if (last) transfer->Finish(absl::OkStatus());
}

bool IncomingStreams::Cancel(IncomingStream* stream) {
  absl::MutexLock lock(&mutex_);
  stream->cancelled_ = true;
  if (early_.erase(stream) > 0) return true;
  for (auto& [key, inbox] : inboxes_) {
    if (inbox.parked == stream) {
      inbox.parked = nullptr;
      return true;
    }
  }
  return false;
}

void IncomingStreams::Done(IncomingStream* stream) {
  absl::MutexLock lock(&mutex_);
  open_.erase(stream);
}

}  // namespace ringleader::comm
