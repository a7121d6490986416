// The server side of WorkerControl.Session: gRPC streams in, Session and SessionListener out.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "coordinator/access/gate.h"
#include "coordinator/session/session.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::session {

// Callback API: thousands of streams cost no thread each. Register it on the server; call
// CloseAll() before Server::Shutdown().
class WorkerControlService : public v1::WorkerControl::CallbackService {
 public:
  // Both must outlive the service.
  WorkerControlService(SessionListener* listener, const Clock* clock);
  ~WorkerControlService() override;

  grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* ReportDeath(grpc::CallbackServerContext* context,
                                        const v1::ReportDeathRequest* request,
                                        v1::ReportDeathResponse* response) override;

  // Ends every stream with UNAVAILABLE, and refuses new ones; workers then reconnect by themselves.
  void CloseAll();
  // Ends every stream so, but takes new ones: who may open one has changed.
  void CloseOpen(const absl::Status& status);

  // Who admits callers, and hears of those that speak for a node that they may not speak for. To be
  // called before the service is served.
  void SetGate(std::shared_ptr<access::Gate> gate);

 private:
  class Stream;
  struct Registry;

  const std::shared_ptr<Registry> registry_;  // outlives streams that still end
};

}  // namespace ringleader::session
