// The server side of WorkerControl.Session: gRPC streams in, Session and SessionListener out.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "coordinator/access/gate.h"
#include "coordinator/limits/client_limits.h"
#include "coordinator/session/session.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::session {

struct SessionOptions {
  // A stream that has not said hello by then is closed.
  absl::Duration hello_timeout = absl::Seconds(10);
  // Events of all workers that wait to be applied. Each session gets an even part of it as its
  // window, within bounds that are sensible for one worker.
  size_t waiting_bytes = size_t{256} << 20;
  // How long a worker may take to read what was under way when its session ended.
  absl::Duration end_patience = absl::Seconds(10);
};

// Callback API: thousands of streams cost no thread each. Register it on the server; call
// CloseAll() before Server::Shutdown().
//
// What a worker sends is delivered as it comes, as long as the listener keeps up (Session::Taken).
// Workers are told how far they may send ahead, so that heartbeats are answered however much waits
// to be applied; of those that send more, nothing is read until room is made.
// A message is looked at before it is parsed, so that none takes much more memory than bytes.
class WorkerControlService
    : public v1::WorkerControl::WithRawCallbackMethod_Session<
          v1::WorkerControl::WithCallbackMethod_ReportDeath<v1::WorkerControl::Service>> {
 public:
  // All three must outlive the service. Of `limits` count silent sessions, and calls.
  WorkerControlService(SessionListener* listener, const Clock* clock, limits::Limits* limits,
                       const SessionOptions& options = {});
  ~WorkerControlService() override;

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* ReportDeath(grpc::CallbackServerContext* context,
                                        const v1::ReportDeathRequest* request,
                                        v1::ReportDeathResponse* response) override;

  // Ends every stream with UNAVAILABLE, and refuses new ones; workers then reconnect by themselves.
  void CloseAll();
  // Ends every stream so, but takes new ones: who may open one has changed.
  void CloseOpen(const absl::Status& status);

  // Who admits callers, and hears of those that speak for a node that they may not speak for. To be
  // called before the service is served; without it every caller is the local one, who may speak
  // for any node.
  void SetGate(std::shared_ptr<access::Gate> gate);

 private:
  class Stream;
  struct Registry;

  const std::shared_ptr<Registry> registry_;  // outlives streams that still end
};

}  // namespace ringleader::session
