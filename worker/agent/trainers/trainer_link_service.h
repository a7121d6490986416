// The worker's end of TrainerLink: the streams of the trainers that it started, on a Unix socket.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "ringleader/v1/trainer_link.grpc.pb.h"

namespace ringleader::agent {

// One trainer's stream. Thread-safe; no call blocks.
class TrainerConnection {
 public:
  virtual ~TrainerConnection() = default;
  virtual void Send(v1::AgentMessage message) = 0;
  virtual void Close(const absl::Status& status) = 0;
};

// Called on gRPC's threads, for one connection in order; must not block.
class TrainerListener {
 public:
  virtual ~TrainerListener() = default;
  virtual void OnTrainerMessage(std::shared_ptr<TrainerConnection> connection,
                                v1::TrainerMessage message) = 0;
  virtual void OnTrainerGone(std::shared_ptr<TrainerConnection> connection) = 0;
};

class TrainerLinkService : public v1::TrainerLink::CallbackService {
 public:
  // `listener` must outlive the server that this is registered with.
  explicit TrainerLinkService(TrainerListener* listener) : listener_(listener) {}

  grpc::ServerBidiReactor<v1::TrainerMessage, v1::AgentMessage>* Attach(
      grpc::CallbackServerContext* context) override;

 private:
  TrainerListener* const listener_;
};

}  // namespace ringleader::agent
