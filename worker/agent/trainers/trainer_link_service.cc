#include "worker/agent/trainers/trainer_link_service.h"

#include <utility>

#include "base/net/streams/server_stream.h"

namespace ringleader::agent {
namespace {

class Stream : public ServerStream<v1::TrainerMessage, v1::AgentMessage>, public TrainerConnection {
  using Base = ServerStream<v1::TrainerMessage, v1::AgentMessage>;

 public:
  explicit Stream(TrainerListener* listener) : listener_(listener) {}

  void Send(v1::AgentMessage message) override { Base::Send(std::move(message)); }
  void Close(const absl::Status& status) override { Base::Close(status); }

 private:
  std::shared_ptr<Stream> self() { return std::static_pointer_cast<Stream>(shared_from_this()); }

  absl::Status OnMessage(v1::TrainerMessage& message) override {
    listener_->OnTrainerMessage(self(), std::move(message));
    return absl::OkStatus();
  }
  void OnEnd() override { listener_->OnTrainerGone(self()); }

  TrainerListener* const listener_;
};

}  // namespace

grpc::ServerBidiReactor<v1::TrainerMessage, v1::AgentMessage>* TrainerLinkService::Attach(
    grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<Stream>(listener_);
  stream->Begin(context);
  return stream.get();
}

}  // namespace ringleader::agent
