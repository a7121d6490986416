#include "coordinator/session/worker_control_service.h"

#include <spdlog/spdlog.h>

#include <string>
#include <unordered_set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/net/server_stream.h"
#include "base/protocol_version.h"
#include "coordinator/store/store.h"

namespace ringleader::session {
namespace {

constexpr size_t kRefusalsRemembered = 10'000;

}  // namespace

// Streams that are open. Shared with them, for they may end after the service.
struct WorkerControlService::Registry {
  SessionListener* listener = nullptr;
  const Clock* clock = nullptr;
  OnRefused on_refused;
  absl::Mutex mutex;
  bool closed ABSL_GUARDED_BY(mutex) = false;
  std::unordered_set<std::shared_ptr<WorkerControlService::Stream>> streams ABSL_GUARDED_BY(mutex);
  // Worker processes that were refused for their protocol version, as far as is remembered.
  std::unordered_set<std::string> refused ABSL_GUARDED_BY(mutex);

  bool FirstRefusal(const std::string& incarnation) {
    absl::MutexLock lock(&mutex);
    if (refused.size() >= kRefusalsRemembered) refused.clear();
    return refused.insert(incarnation).second;
  }
};

class WorkerControlService::Stream : public ServerStream<v1::WorkerMessage, v1::CoordinatorMessage>,
                                     public session::Session {
  using Base = ServerStream<v1::WorkerMessage, v1::CoordinatorMessage>;

 public:
  Stream(std::shared_ptr<Registry> registry, access::Caller caller, std::string address)
      : registry_(std::move(registry)),
        caller_(std::move(caller)),
        address_(std::move(address)),
        last_heard_(registry_->clock->Now()) {}

  const std::string& node() const override { return node_; }
  const std::string& incarnation() const override { return incarnation_; }
  absl::Time last_heard() const override {
    absl::MutexLock lock(&mutex_);
    return last_heard_;
  }
  void Send(v1::CoordinatorMessage message) override { Base::Send(std::move(message)); }
  void Close(const absl::Status& status) override { Base::Close(status); }

 private:
  std::shared_ptr<Stream> self() { return std::static_pointer_cast<Stream>(shared_from_this()); }

  absl::Status OnMessage(v1::WorkerMessage& message) override {
    {
      absl::MutexLock lock(&mutex_);
      last_heard_ = registry_->clock->Now();
    }
    if (message.has_hello()) return OnHello(message);
    if (node_.empty()) return absl::InvalidArgumentError("the first message must be a hello");
    if (message.has_heartbeat()) {
      v1::CoordinatorMessage answer;
      answer.set_heartbeat_number(message.heartbeat().number());
      Send(std::move(answer));
      return absl::OkStatus();
    }
    if (message.sequence() == 0) {
      return absl::InvalidArgumentError("only hello and heartbeats may have sequence 0");
    }
    registry_->listener->OnMessage(self(), std::move(message));
    return absl::OkStatus();
  }

  absl::Status OnHello(v1::WorkerMessage& message) {
    if (!node_.empty()) return absl::InvalidArgumentError("a second hello on one session");
    v1::WorkerHello& hello = *message.mutable_hello();
    absl::StatusOr<std::string> id = store::NodeIdFromName(hello.node());
    if (!id.ok()) return id.status();
    if (const absl::Status may = caller_.MaySpeakFor(*id); !may.ok()) {
      if (registry_->on_refused) {
        registry_->on_refused(caller_, address_, "Session", hello.node(), may);
      }
      return may;
    }
    if (hello.incarnation().empty()) {
      return absl::InvalidArgumentError("hello.incarnation must be set");
    }
    if (absl::Status same = CheckProtocolVersion("the worker of " + hello.node(),
                                                 hello.protocol_version(), "this coordinator");
        !same.ok()) {
      // The worker tries again, a little later each time: people read this once a worker process.
      if (registry_->FirstRefusal(hello.incarnation())) {
        spdlog::warn("{}", std::string(same.message()));
      }
      return same;
    }
    node_ = *std::move(id);
    incarnation_ = hello.incarnation();
    registry_->listener->OnHello(self(), std::move(hello));
    return absl::OkStatus();
  }

  void OnEnd() override {
    {
      absl::MutexLock lock(&registry_->mutex);
      registry_->streams.erase(self());
    }
    if (!node_.empty()) registry_->listener->OnClosed(self());
  }

  const std::shared_ptr<Registry> registry_;
  const access::Caller caller_;
  const std::string address_;
  // Set by the hello, before anybody else knows of the session.
  std::string node_;
  std::string incarnation_;
  mutable absl::Mutex mutex_;
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_);
};

WorkerControlService::WorkerControlService(SessionListener* listener, const Clock* clock)
    : registry_(std::make_shared<Registry>()) {
  registry_->listener = listener;
  registry_->clock = clock;
}

WorkerControlService::~WorkerControlService() = default;

grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>* WorkerControlService::Session(
    grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<Stream>(registry_, access::CallerOf(*context), context->peer());
  stream->Begin();
  absl::MutexLock lock(&registry_->mutex);
  if (registry_->closed) {
    stream->Close(absl::UnavailableError("the coordinator is shutting down"));
  } else {
    registry_->streams.insert(stream);
  }
  return stream.get();
}

grpc::ServerUnaryReactor* WorkerControlService::ReportDeath(grpc::CallbackServerContext* context,
                                                            const v1::ReportDeathRequest* request,
                                                            v1::ReportDeathResponse*) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::StatusOr<std::string> node = store::NodeIdFromName(request->node());
  absl::Status refused = node.status();
  if (refused.ok()) {
    const access::Caller caller = access::CallerOf(*context);
    refused = caller.MaySpeakFor(*node);
    if (!refused.ok() && registry_->on_refused) {
      registry_->on_refused(caller, context->peer(), "ReportDeath", request->node(), refused);
    }
  }
  if (refused.ok() && request->incarnation().empty()) {
    refused = absl::InvalidArgumentError("incarnation must be set");
  }
  if (!refused.ok()) {
    reactor->Finish(ToGrpcStatus(refused));
    return reactor;
  }
  registry_->listener->OnDeath(
      *std::move(node), request->incarnation(),
      [reactor](const absl::Status& status) { reactor->Finish(ToGrpcStatus(status)); });
  return reactor;
}

void WorkerControlService::SetOnRefused(OnRefused on_refused) {
  registry_->on_refused = std::move(on_refused);
}

void WorkerControlService::CloseAll() {
  {
    absl::MutexLock lock(&registry_->mutex);
    registry_->closed = true;
  }
  CloseOpen(absl::UnavailableError("the coordinator is shutting down"));
}

void WorkerControlService::CloseOpen(const absl::Status& status) {
  std::unordered_set<std::shared_ptr<Stream>> open;
  {
    absl::MutexLock lock(&registry_->mutex);
    open = registry_->streams;
  }
  for (const std::shared_ptr<Stream>& stream : open) stream->Close(status);
}

}  // namespace ringleader::session
