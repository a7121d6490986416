#include "coordinator/session/worker_control_service.h"

#include <deque>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"

namespace ringleader::session {
namespace {

using Reactor = grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>;

// A session that reads slower than this piles up commands: cut it off; they are durable.
constexpr size_t kMaxQueuedMessages = 10'000;

// "nodes/{id}" → id; empty if malformed.
std::string NodeId(const std::string& name) {
  constexpr std::string_view kPrefix = "nodes/";
  if (name.size() <= kPrefix.size() || name.size() > kPrefix.size() + 253 ||
      name.compare(0, kPrefix.size(), kPrefix) != 0) {
    return "";
  }
  const std::string id = name.substr(kPrefix.size());
  for (const char c : id) {
    const bool valid = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.' || c == '_';
    if (!valid) return "";
  }
  return id;
}

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

struct WorkerControlService::Registry {
  SessionListener* listener = nullptr;
  const Clock* clock = nullptr;
  absl::Mutex mutex;
  bool closed ABSL_GUARDED_BY(mutex) = false;
  std::unordered_set<WorkerControlService::Reactor*> reactors ABSL_GUARDED_BY(mutex);
};

// One stream. gRPC calls On*Done one after another for each direction; Send and Close come from
// other threads. Finish is called once; the object goes when gRPC is done with it and nobody holds
// the session any more.
class WorkerControlService::Reactor : public session::Reactor, public session::Session {
 public:
  explicit Reactor(std::shared_ptr<Registry> registry)
      : registry_(std::move(registry)), last_heard_(registry_->clock->Now()) {}

  // Keeps the object alive until OnDone. Called once, before gRPC reacts.
  void Begin(std::shared_ptr<Reactor> self) {
    self_ = std::move(self);
    bool refused = false;
    {
      absl::MutexLock lock(&registry_->mutex);
      refused = registry_->closed;
      if (!refused) registry_->reactors.insert(this);
    }
    if (refused) {
      Close(absl::UnavailableError("the coordinator is shutting down"));
    } else {
      StartRead(&incoming_);
    }
  }

  const std::string& node() const override { return node_; }
  const std::string& incarnation() const override { return incarnation_; }

  absl::Time last_heard() const override {
    absl::MutexLock lock(&mutex_);
    return last_heard_;
  }

  void Send(v1::CoordinatorMessage message) override {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    if (outgoing_.size() >= kMaxQueuedMessages) {
      FinishLocked(absl::ResourceExhaustedError("the worker reads too slowly"));
      return;
    }
    outgoing_.push_back(std::move(message));
    WriteNext();
  }

  void Close(const absl::Status& status) override {
    absl::MutexLock lock(&mutex_);
    FinishLocked(status);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Close(absl::OkStatus());
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      last_heard_ = registry_->clock->Now();
    }
    if (absl::Status status = Handle(); !status.ok()) {
      Close(status);
      return;
    }
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    outgoing_.pop_front();
    writing_ = false;
    if (ok) WriteNext();
  }

  void OnCancel() override { Close(absl::CancelledError("the worker went away")); }

  void OnDone() override {
    {
      absl::MutexLock lock(&registry_->mutex);
      registry_->reactors.erase(this);
    }
    const std::shared_ptr<Reactor> self = std::move(self_);
    if (!node_.empty()) registry_->listener->OnClosed(self);
  }

 private:
  // What has just been read.
  absl::Status Handle() {
    if (incoming_.has_hello()) {
      if (!node_.empty()) return absl::InvalidArgumentError("a second hello on one session");
      const std::string id = NodeId(incoming_.hello().node());
      if (id.empty() || incoming_.hello().incarnation().empty()) {
        return absl::InvalidArgumentError(
            "hello.node must be \"nodes/ID\" with ID of letters, digits, '-', '.' and '_', and "
            "hello.incarnation must be set");
      }
      node_ = id;
      incarnation_ = incoming_.hello().incarnation();
      registry_->listener->OnHello(self_, std::move(*incoming_.mutable_hello()));
      return absl::OkStatus();
    }
    if (node_.empty()) return absl::InvalidArgumentError("the first message must be a hello");
    if (incoming_.has_heartbeat()) {
      v1::CoordinatorMessage answer;
      answer.set_heartbeat_number(incoming_.heartbeat().number());
      Send(std::move(answer));
      return absl::OkStatus();
    }
    if (incoming_.sequence() == 0) {
      return absl::InvalidArgumentError("only hello and heartbeats may have sequence 0");
    }
    registry_->listener->OnMessage(self_, std::move(incoming_));
    return absl::OkStatus();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_ || outgoing_.empty()) return;
    writing_ = true;
    StartWrite(&outgoing_.front());
  }

  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    Finish(ToGrpc(status));
  }

  const std::shared_ptr<Registry> registry_;
  std::shared_ptr<Reactor> self_;  // set until OnDone
  v1::WorkerMessage incoming_;     // touched by reads only
  // Set by the hello, before anybody else knows of the session.
  std::string node_;
  std::string incarnation_;

  mutable absl::Mutex mutex_;
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::CoordinatorMessage> outgoing_ ABSL_GUARDED_BY(mutex_);  // front: being written
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

WorkerControlService::WorkerControlService(SessionListener* listener, const Clock* clock)
    : registry_(std::make_shared<Registry>()) {
  registry_->listener = listener;
  registry_->clock = clock;
}

WorkerControlService::~WorkerControlService() = default;

grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>* WorkerControlService::Session(
    grpc::CallbackServerContext* context) {
  auto reactor = std::make_shared<Reactor>(registry_);
  reactor->Begin(reactor);
  return reactor.get();
}

void WorkerControlService::CloseAll() {
  absl::MutexLock lock(&registry_->mutex);
  registry_->closed = true;
  for (Reactor* reactor : registry_->reactors) {
    reactor->Close(absl::UnavailableError("the coordinator is shutting down"));
  }
}

}  // namespace ringleader::session
