// Workers without machines: sessions over real gRPC that do what they are told and report training
// that never happened.
#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/protocol_version.h"

namespace ringleader::testing {

struct FakeWorkerOptions {
  std::string node = "fake";
  uint32_t trainers = 1;
  // Layers in each step report.
  int layers = 4;
  uint32_t protocol_version = kProtocolVersion;
};

// One session. It starts and stops trainers at once; they train while Step() is called.
// Thread-safe.
class FakeWorker {
 public:
  FakeWorker(const FakeWorkerOptions& options, const std::shared_ptr<grpc::Channel>& channel);
  // Ends the session.
  ~FakeWorker();
  FakeWorker(const FakeWorker&) = delete;
  FakeWorker& operator=(const FakeWorker&) = delete;

  bool welcomed() const;
  bool ended() const;  // the coordinator closed the session
  void Heartbeat();
  // Every trainer that runs reports its next step, with one line of log from rank 0; those that did
  // the last step of their job complete. Returns how many reported.
  int Step();
  // Trainers that run.
  int trainers_running() const;

 private:
  class Reactor;
  std::unique_ptr<Reactor> reactor_;
};

}  // namespace ringleader::testing
