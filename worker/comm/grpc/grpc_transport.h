// Transport over gRPC streams: the life of the connections between the ranks of an attempt.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ringleader/v1/comm.grpc.pb.h"
#include "worker/comm/grpc/grpc_communicator.h"
#include "worker/comm/grpc/incoming_streams.h"
#include "worker/comm/grpc/outgoing_stream.h"
#include "worker/comm/rendezvous.h"
#include "worker/comm/transport.h"

namespace ringleader::comm {

// Every pair of ranks holds a life line in each direction, a stream without data: it tells that a
// rank has come, left in order, given up (and why), or died. Streams of data open with their first
// message.
class GrpcTransport : public Transport {
 public:
  explicit GrpcTransport(const GrpcCommunicatorOptions& options);
  ~GrpcTransport() override;

  absl::Status Listen();
  const std::string& address() const { return address_; }
  absl::Status Connect(const std::vector<std::string>& addresses,
                       const std::vector<std::string>& certificates);

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  void Send(StreamId stream, int to, PendingTransferPtr transfer) override;
  void Receive(StreamId stream, int from, PendingTransferPtr transfer) override;
  void Abort(const std::string& reason) override;
  absl::Status status() const override;
  bool aborted_by_peer() const override;

  // After an abort, waits until the peers have heard of it, at most 1 s. Whether all have.
  bool WaitForAbortToBeHeard();

 private:
  class Service : public v1::PeerExchange::WithRawCallbackMethod_Stream<v1::PeerExchange::Service> {
   public:
    explicit Service(IncomingStreams* incoming) : incoming_(incoming) {}
    grpc::ServerReadReactor<grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context,
                                                      grpc::ByteBuffer* response) override {
      return incoming_->Open(NamesOf(*context->auth_context()), response);
    }

   private:
    IncomingStreams* const incoming_;
  };
  using StreamKey = std::pair<int, StreamId>;  // peer, stream

  OutgoingStream* OpenStream(int peer, StreamId stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PeerArrived(int peer);
  void PeerLeft(int peer);
  void PeerBroken(int peer, const std::string& what);
  void OutgoingEnded(int peer, StreamId stream, const grpc::Status& status);
  void AbortWith(const std::string& reason, bool by_peer);
  void LeaveInOrder();

  const GrpcCommunicatorOptions options_;
  std::string address_;
  // Set before any stream opens.
  std::vector<std::string> addresses_;  // by rank
  std::shared_ptr<grpc::ChannelCredentials> credentials_;
  bool connected_ = false;

  mutable absl::Mutex mutex_;
  std::set<int> arrived_ ABSL_GUARDED_BY(mutex_);
  std::set<int> left_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool aborted_by_peer_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;  // what ends now, ends by our own will
  std::map<StreamKey, std::unique_ptr<OutgoingStream>> outgoing_ ABSL_GUARDED_BY(mutex_);

  Rendezvous to_self_;
  IncomingStreams incoming_;
  Service service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringleader::comm
