#include "worker/comm/grpc/grpc_transport.h"

#include <grpcpp/server_builder.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/net/address.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"
#include "worker/comm/grpc/channel_arguments.h"

namespace ringleader::comm {
namespace {

// How long a rank that leaves waits for peers to take what it sent them last.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);
constexpr absl::Duration kAbortTimeout = absl::Seconds(1);
// An error names at most so many of the peers that are missing.
constexpr size_t kShownPeers = 8;

// "a, b, c", with a count in place of what would make it unreadable.
std::string Shown(const std::vector<std::string>& items) {
  const auto end = items.begin() + static_cast<std::ptrdiff_t>(std::min(items.size(), kShownPeers));
  std::string text = absl::StrJoin(items.begin(), end, ", ");
  if (end != items.end()) absl::StrAppend(&text, " and ", items.end() - end, " more");
  return text;
}

}  // namespace

GrpcTransport::GrpcTransport(const GrpcCommunicatorOptions& options)
    : options_(options),
      incoming_(options.size, options.fencing_token,
                {.arrived = [this](int peer) { PeerArrived(peer); },
                 .left = [this](int peer) { PeerLeft(peer); },
                 .aborted = [this](int, const std::string& reason) { AbortWith(reason, true); },
                 .broken = [this](int peer, const std::string& what) { PeerBroken(peer, what); }}),
      service_(&incoming_) {}

GrpcTransport::~GrpcTransport() {
  if (!GrpcTransport::status().ok()) {
    WaitForAbortToBeHeard();
  } else if (connected_) {
    LeaveInOrder();
  }
  std::map<StreamKey, std::unique_ptr<OutgoingStream>> outgoing;
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    outgoing.swap(outgoing_);
  }
  outgoing.clear();
  if (server_ != nullptr) {
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
    server_->Wait();
  }
}

absl::Status GrpcTransport::Listen() {
  const Address host{.host = options_.listen_host, .port = 0, .path = ""};
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ServerCredentials> credentials,
                   ServerCredentials(options_.tls, host));
  grpc::ServerBuilder builder;
  SetPeerServerArguments(&builder);
  int port = 0;
  builder.AddListeningPort(FormatAddress(host), credentials, &port);
  builder.RegisterService(&service_);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrFormat(
        "cannot listen for the other ranks on %s; give the worker an --address of this machine",
        options_.listen_host));
  }
  address_ = FormatAddress({.host = options_.listen_host, .port = port, .path = ""});
  return absl::OkStatus();
}

absl::Status GrpcTransport::Connect(const std::vector<std::string>& addresses,
                                    const std::vector<std::string>& certificates) {
  if (static_cast<int>(addresses.size()) != size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d addresses for %d ranks", addresses.size(), size()));
  }
  if (!certificates.empty() && certificates.size() != addresses.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("certificates of %d nodes for %d ranks", certificates.size(), size()));
  }
  incoming_.SetCertificates(certificates);
  addresses_ = addresses;
  for (const std::string& text : addresses) {
    ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
    // Certificates are the same for all peers; whether plain text may be spoken depends on each.
    if (credentials_ != nullptr && options_.tls.enabled()) continue;
    ASSIGN_OR_RETURN(credentials_, ChannelCredentials(options_.tls, address));
  }
  absl::MutexLock lock(&mutex_);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) OpenStream(peer, IncomingStreams::kLifeLine);
  }
  const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(arrived_.size()) == size() - 1 || !status_.ok();
  };
  if (!AwaitFor(mutex_, absl::Condition(&settled), options_.connect_timeout)) {
    std::vector<std::string> missing, tried;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || arrived_.contains(peer)) continue;
      missing.push_back(absl::StrCat(peer));
      tried.push_back(addresses_[static_cast<size_t>(peer)]);
    }
    return absl::DeadlineExceededError(absl::StrFormat(
        "rank(s) %s did not connect to rank %d within %s (they at %s, this one at %s); check that "
        "their nodes and this one reach each other at these addresses (--address of their "
        "workers), that no firewall closes the ports that the system picks, and that all use the "
        "same --tls-ca",
        Shown(missing), rank(), absl::FormatDuration(options_.connect_timeout), Shown(tried),
        addresses_[static_cast<size_t>(rank())]));
  }
  connected_ = status_.ok();
  return status_;
}

OutgoingStream* GrpcTransport::OpenStream(int peer, StreamId stream) {
  std::unique_ptr<OutgoingStream>& slot = outgoing_[{peer, stream}];
  if (slot == nullptr) {
    slot = std::make_unique<OutgoingStream>(
        addresses_[peer], credentials_,
        OutgoingStream::Identity{.rank = rank(), .fencing_token = options_.fencing_token}, stream,
        [this, peer, stream](const grpc::Status& status) { OutgoingEnded(peer, stream, status); });
  }
  return slot.get();
}

void GrpcTransport::Send(StreamId stream, int to, PendingTransferPtr transfer) {
  if (to == rank()) return to_self_.Send(stream, to, to, std::move(transfer));
  OutgoingStream* outgoing = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return transfer->Finish(status_);
    outgoing = OpenStream(to, stream);
  }
  outgoing->Send(std::move(transfer));
}

void GrpcTransport::Receive(StreamId stream, int from, PendingTransferPtr transfer) {
  if (from == rank()) return to_self_.Receive(stream, from, from, std::move(transfer));
  incoming_.Receive(stream, from, std::move(transfer));
}

void GrpcTransport::PeerArrived(int peer) {
  absl::MutexLock lock(&mutex_);
  arrived_.insert(peer);
}

void GrpcTransport::PeerLeft(int peer) {
  {
    absl::MutexLock lock(&mutex_);
    left_.insert(peer);
  }
  incoming_.Fail(peer, absl::UnavailableError(absl::StrFormat(
                           "rank %d has left; it will not send what this rank waits for", peer)));
}

void GrpcTransport::PeerBroken(int peer, const std::string& what) {
  {
    absl::MutexLock lock(&mutex_);
    if (closing_ || left_.contains(peer)) return;
  }
  AbortWith(absl::StrFormat("rank %d is gone: %s", peer, what), /*by_peer=*/true);
}

void GrpcTransport::OutgoingEnded(int peer, StreamId stream, const grpc::Status& status) {
  if (!status.ok()) PeerBroken(peer, status.error_message());
  if (stream != IncomingStreams::kLifeLine) return;
  // The peer has heard of an abort, or never will: what it does not read may now be dropped.
  absl::MutexLock lock(&mutex_);
  if (status_.ok()) return;
  for (auto& [key, outgoing] : outgoing_) {
    if (key.first == peer && key.second != stream) outgoing->Cancel();
  }
}

void GrpcTransport::Abort(const std::string& reason) {
  AbortWith(absl::StrFormat("rank %d: %s", rank(), reason), /*by_peer=*/false);
}

// Whoever learns of a failure passes it on before it lets go of a stream, so that no rank takes the
// broken stream for the cause.
void GrpcTransport::AbortWith(const std::string& reason, bool by_peer) {
  const absl::Status aborted = absl::AbortedError(reason);
  absl::MutexLock lock(&mutex_);
  if (!status_.ok() || closing_) return;
  status_ = aborted;
  aborted_by_peer_ = by_peer;
  to_self_.Fail(aborted);
  incoming_.Fail(-1, aborted);
  for (auto& [key, outgoing] : outgoing_) {
    if (key.second == IncomingStreams::kLifeLine) {
      outgoing->LeaveAborted(reason);
    } else {
      outgoing->Fail(aborted);
    }
  }
}

absl::Status GrpcTransport::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

bool GrpcTransport::aborted_by_peer() const {
  absl::MutexLock lock(&mutex_);
  return aborted_by_peer_;
}

// Data first: a peer that sees the life line end knows that nothing more will come.
void GrpcTransport::LeaveInOrder() {
  const absl::Time deadline = BootNow() + kLeaveTimeout;
  for (const bool life_lines : {false, true}) {
    std::vector<OutgoingStream*> leaving;
    {
      absl::MutexLock lock(&mutex_);
      for (auto& [key, outgoing] : outgoing_) {
        const bool is_life_line = key.second == IncomingStreams::kLifeLine;
        if (is_life_line == life_lines) leaving.push_back(outgoing.get());
      }
    }
    for (OutgoingStream* outgoing : leaving) outgoing->Leave();
    for (OutgoingStream* outgoing : leaving) outgoing->WaitUntilEnded(deadline);
  }
}

bool GrpcTransport::WaitForAbortToBeHeard() {
  const absl::Time deadline = BootNow() + kAbortTimeout;
  std::vector<OutgoingStream*> life_lines;
  {
    absl::MutexLock lock(&mutex_);
    for (auto& [key, outgoing] : outgoing_) {
      if (key.second == IncomingStreams::kLifeLine) life_lines.push_back(outgoing.get());
    }
  }
  bool all = true;
  for (OutgoingStream* outgoing : life_lines) all &= outgoing->WaitUntilEnded(deadline);
  return all;
}

}  // namespace ringleader::comm
