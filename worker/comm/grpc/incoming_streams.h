// The receiving half of all streams: matches frames that arrive with the receives that wait for
// them.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/net/certificate_names.h"
#include "worker/comm/grpc/frame.h"
#include "worker/comm/transport.h"

namespace ringleader::comm {

class IncomingStreams;

// One stream from one peer. Deletes itself when gRPC is done with it. At any time exactly one party
// may act on it: the read that is under way; whoever delivers the frame that it brought; or, while
// no receive waits for that frame, the receive that takes it up (or the cancellation). A first
// frame that comes before this rank knows its peers waits for SetCertificates() in the same way.
class IncomingStream : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  IncomingStream(IncomingStreams* owner, CertificateNames names, grpc::ByteBuffer* response);

 private:
  friend class IncomingStreams;
  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void ReadOn();
  absl::Status CheckHello(const v1::Frame& hello) const;
  // Once the peers are known: takes the sender of a good hello for what it says, or ends the
  // stream.
  void Greet();
  // Ends the stream of a peer that sent what makes no sense; whoever waits for it is released.
  void Break(const std::string& what);

  IncomingStreams* const owner_;
  const CertificateNames names_;  // of the peer
  grpc::ByteBuffer buffer_;
  std::unique_ptr<FrameReader> frame_;  // in buffer_
  bool greeted_ = false;
  bool left_ = false;  // said goodbye
  int sender_ = -1;
  StreamId stream_ = 0;
  bool cancelled_ = false;  // guarded by owner_->mutex_
};

// Thread-safe.
class IncomingStreams {
 public:
  // What streams tell of their peers, from gRPC's threads.
  struct Events {
    std::function<void(int peer)> arrived;  // on its life line, as the three below
    std::function<void(int peer)> left;
    std::function<void(int peer, const std::string& reason)> aborted;
    std::function<void(int peer, const std::string& what)> broken;  // on any stream
  };

  // The stream that carries no data: opened first, closed last.
  static constexpr StreamId kLifeLine = 0xffffffff;

  IncomingStreams(int ranks, uint64_t fencing_token, Events events)
      : ranks_(ranks), fencing_token_(fencing_token), events_(std::move(events)) {}
  // Waits until gRPC has let go of all streams: shut the server down first.
  ~IncomingStreams();

  // A stream for the server to start on a call. `names`: of the peer's certificate.
  IncomingStream* Open(CertificateNames names, grpc::ByteBuffer* response);

  // Whom to take streams from, by rank: a name that the peer's certificate must hold, or none;
  // empty for none at all. To be called once; until then first frames wait.
  void SetCertificates(const std::vector<std::string>& certificates);

  void Receive(StreamId stream, int from, PendingTransferPtr transfer);

  // Finishes receives from `peer` (-1: from all), now and from now on, with `status`. The first
  // call decides.
  void Fail(int peer, const absl::Status& status);

 private:
  friend class IncomingStream;
  struct Inbox {
    std::deque<PendingTransferPtr> receives;     // in the order of the messages
    PendingTransferPtr current;                  // the message that is arriving
    size_t total_bytes = 0, received_bytes = 0;  // of current
    uint64_t sequence = 0;                       // of the last message
    IncomingStream* parked = nullptr;            // holds a frame that no receive waits for
  };

  // True until SetCertificates(), which takes the stream up.
  bool AwaitsPeers(IncomingStream* stream);
  // Delivers the frame that `stream` holds, or parks the stream: false.
  bool Offer(IncomingStream* stream);
  // The receive that the frame belongs to; nullptr if none waits yet. An error breaks the stream.
  absl::StatusOr<PendingTransferPtr> Match(Inbox* inbox, const FrameReader& frame, int from)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Copies the frame's payload; the message is finished with its last frame.
  void Deliver(IncomingStream* stream, const PendingTransferPtr& transfer);
  // Marks the stream, and takes it from its inbox if it is parked there: true.
  bool Cancel(IncomingStream* stream);
  void Done(IncomingStream* stream);

  const int ranks_;
  const uint64_t fencing_token_;
  const Events events_;

  absl::Mutex mutex_;
  std::map<std::pair<int, StreamId>, Inbox> inboxes_ ABSL_GUARDED_BY(mutex_);  // by sender, stream
  std::map<int, absl::Status> failed_ ABSL_GUARDED_BY(mutex_);                 // by sender
  std::set<IncomingStream*> open_ ABSL_GUARDED_BY(mutex_);
  std::set<IncomingStream*> early_ ABSL_GUARDED_BY(mutex_);  // whose first frame waits
  bool peers_known_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::string> certificates_;  // by rank; written before peers_known_
};

}  // namespace ringleader::comm
