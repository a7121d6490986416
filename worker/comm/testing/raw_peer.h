// The second of two ranks, played by a test frame by frame: it says what a rank would, or would
// not.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ringleader/v1/comm.grpc.pb.h"
#include "worker/comm/communicator.h"
#include "worker/comm/grpc/grpc_communicator.h"

namespace ringleader::comm::testing {

// Rank 1 beside the rank 0 that the test is about. Thread-safe.
class RawPeer : private v1::PeerExchange::Service {
 public:
  static constexpr uint64_t kToken = 7;
  static constexpr uint32_t kLifeLine = 0xffffffff;

  // A stream of this peer's to rank 0.
  class Line {
   public:
    explicit Line(v1::PeerExchange::Stub& stub) : writer_(stub.Stream(&context_, &end_)) {}
    ~Line() { context_.TryCancel(); }
    bool Write(const v1::Frame& frame) { return writer_->Write(frame); }
    // Sends a message's only frame, or one of several.
    void Send(uint64_t sequence, const std::string& payload) {
      Send(sequence, payload, payload.size());
    }
    void Send(uint64_t sequence, const std::string& payload, uint64_t total_bytes);
    void Leave(const std::string& abort_reason = "");
    // Closes this end, with or without a goodbye before, and waits for the answer.
    grpc::Status Finish();

   private:
    grpc::ClientContext context_;
    v1::StreamEnd end_;
    std::unique_ptr<grpc::ClientWriter<v1::Frame>> writer_;
  };

  explicit RawPeer(uint64_t token = kToken);
  ~RawPeer() override { server_->Shutdown(); }

  // Rank 0, connected with this peer.
  std::unique_ptr<Communicator> Connect();
  // Where this peer listens; and dials a rank 0 that another process is, and hears from there.
  const std::string& address() const { return address_; }
  void Dial(const std::string& address_of_rank_0);
  // Known once Connect() was called.
  const std::string& address_of_rank_0() const { return address_of_rank_0_; }

  // What this peer says first on a stream, and a stream on which it has said so.
  static v1::Frame Hello(uint32_t stream, uint64_t token = kToken);
  std::unique_ptr<Line> Open(uint32_t stream);
  std::unique_ptr<Line> Open(Channel channel) { return Open(static_cast<uint32_t>(channel)); }
  Line& life_line() { return *life_line_; }

  // What rank 0 sent, in the order of its arrival; each frame's channel is its stream's.
  std::vector<v1::Frame> Received();
  // Waits until so many frames of rank 0's have arrived; false if they do not come.
  bool AwaitReceived(size_t frames);
  // Waits until so many of rank 0's streams have ended. Returns how many it broke off.
  int BrokenOff(int streams);
  // How rank 0's streams are answered from here on.
  void Refuse(const grpc::Status& answer);
  // Until Resume, nothing more is read from rank 0 but hellos.
  void Pause();
  void Resume();

 private:
  grpc::Status Stream(grpc::ServerContext* context, grpc::ServerReader<v1::Frame>* reader,
                      v1::StreamEnd* end) override;

  const uint64_t token_;
  std::string address_, address_of_rank_0_;
  std::unique_ptr<v1::PeerExchange::Stub> stub_;
  std::unique_ptr<Line> life_line_;
  absl::Mutex mutex_;
  std::vector<v1::Frame> received_ ABSL_GUARDED_BY(mutex_);
  grpc::Status answer_ ABSL_GUARDED_BY(mutex_);
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;
  int ended_ ABSL_GUARDED_BY(mutex_) = 0, broken_off_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringleader::comm::testing
