#include "worker/comm/rendezvous.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"

namespace ringleader::comm {
namespace {

void Copy(PendingTransfer& send, PendingTransfer& receive, int from) {
  absl::Status status;
  if (send.bytes != receive.bytes) {
    status = SizeMismatch(from, send.bytes, receive.bytes);
  } else if (!send.Claim()) {
    status = absl::CancelledError(absl::StrFormat("rank %d has dropped what it sent", from));
  } else {
    if (receive.Claim()) {
      if (send.bytes > 0) std::memcpy(receive.data, send.data, send.bytes);
      receive.Release();
    }
    send.Release();
  }
  send.Finish(status);
  receive.Finish(status);
}

}  // namespace

absl::Status SizeMismatch(int from, size_t sent, size_t expected) {
  return absl::InvalidArgumentError(
      absl::StrFormat("rank %d sent %d bytes where %d were expected", from, sent, expected));
}

void Rendezvous::Send(StreamId stream, int from, int to, PendingTransferPtr transfer) {
  Post({stream, from, to}, std::move(transfer), /*is_send=*/true);
}

void Rendezvous::Receive(StreamId stream, int from, int to, PendingTransferPtr transfer) {
  Post({stream, from, to}, std::move(transfer), /*is_send=*/false);
}

void Rendezvous::Post(const LineKey& key, PendingTransferPtr transfer, bool is_send) {
  PendingTransferPtr partner;
  {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return transfer->Finish(status_);
    Line& line = lines_[key];
    std::deque<PendingTransferPtr>& partners = is_send ? line.receives : line.sends;
    if (partners.empty()) {
      (is_send ? line.sends : line.receives).push_back(std::move(transfer));
      return;
    }
    partner = std::move(partners.front());
    partners.pop_front();
  }
  const int from = std::get<1>(key);
  is_send ? Copy(*transfer, *partner, from) : Copy(*partner, *transfer, from);
}

void Rendezvous::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (!status_.ok()) return;
  status_ = status;
  for (auto& [key, line] : lines_) {
    for (const PendingTransferPtr& transfer : line.sends) transfer->Finish(status_);
    for (const PendingTransferPtr& transfer : line.receives) transfer->Finish(status_);
  }
  lines_.clear();
}

absl::Status Rendezvous::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

}  // namespace ringleader::comm
