#include "coordinator/session/worker_control_service.h"

#include <grpcpp/alarm.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "base/net/message_size.h"
#include "base/net/node_limits.h"
#include "base/net/streams/server_stream.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "coordinator/limits/client_name.h"
#include "coordinator/session/parse_cost.h"
#include "coordinator/store/store.h"

namespace ringleader::session {
namespace {

constexpr char kService[] = "WorkerControl";
constexpr size_t kRefusalsRemembered = 10'000;
constexpr size_t kMaxIncarnationBytes = 128;

absl::Status CheckIncarnation(const std::string& incarnation) {
  if (!incarnation.empty() && incarnation.size() <= kMaxIncarnationBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("incarnation must have 1 to %d bytes", kMaxIncarnationBytes));
}

// What a node says of its machine: a GPU takes some 100 bytes.
constexpr size_t kMaxInventoryBytes = size_t{64} << 10;
constexpr size_t kMaxVersionBytes = 128;

absl::Status CheckInventory(const v1::NodeInventory& inventory) {
  if (inventory.trainers() > kMaxTrainersOfANode) {
    return absl::InvalidArgumentError(
        absl::StrFormat("inventory: %d trainers are more than the %d that a node may take",
                        inventory.trainers(), kMaxTrainersOfANode));
  }
  if (inventory.ByteSizeLong() > kMaxInventoryBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("inventory: more than %d KiB", kMaxInventoryBytes >> 10));
  }
  return absl::OkStatus();
}

// Whatever a node says to run is looked at by the one thread that decides.
absl::Status CheckHello(const v1::WorkerHello& hello) {
  RETURN_IF_ERROR(CheckIncarnation(hello.incarnation()));
  RETURN_IF_ERROR(CheckInventory(hello.inventory()));
  if (hello.version().size() > kMaxVersionBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("version: more than %d bytes", kMaxVersionBytes));
  }
  size_t trainers = 0;
  for (const v1::RunningAttempt& running : hello.attempts()) {
    if (!store::JobIdFromName(absl::StrCat("jobs/", running.job())).ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("attempts: the name of a job has %d bytes or characters that no job's "
                          "name has: give its id, of letters, digits, '-', '.' and '_'",
                          running.job().size()));
    }
    trainers += std::max(1, running.ranks_size());
  }
  if (trainers > kMaxTrainersOfANode) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attempts: %d trainers are more than the %d that a node may run", trainers,
                        kMaxTrainersOfANode));
  }
  return absl::OkStatus();
}

// What a worker may send ahead: enough to keep a slow line busy, and little enough that a burst of
// one worker is no burden to the coordinator.
constexpr size_t kSmallestWindow = size_t{64} << 10;
constexpr size_t kLargestWindow = size_t{4} << 20;
// A worker that keeps to its window may be late to hear of a smaller one. Counted in memory, where
// messages take more than on the wire.
constexpr size_t kWindowsInMemory = 4;

// What this program has no name for is not kept either.
absl::Status Parse(grpc::ByteBuffer* wire, v1::WorkerMessage* message) {
  ParseCost cost;
  {
    grpc::ProtoBufferReader reader(wire);
    ASSIGN_OR_RETURN(
        cost, CostToParse(*v1::WorkerMessage::descriptor(), kMaxParsedRequestBytes, &reader));
  }
  if (cost.bytes > kMaxParsedRequestBytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("a message of %d bytes would take more than %d MiB of memory",
                        wire->Length(), kMaxParsedRequestBytes >> 20));
  }
  if (!grpc::SerializationTraits<v1::WorkerMessage>::Deserialize(wire, message).ok()) {
    return absl::InvalidArgumentError("the message is not well-formed");
  }
  if (cost.has_unknown) message->DiscardUnknownFields();
  return absl::OkStatus();
}

}  // namespace

// Streams that are open. Shared with them, for they may end after the service.
struct WorkerControlService::Registry {
  SessionListener* listener = nullptr;
  const Clock* clock = nullptr;
  std::shared_ptr<access::Gate> gate;
  absl::Mutex mutex;
  bool closed ABSL_GUARDED_BY(mutex) = false;
  std::unordered_set<std::shared_ptr<WorkerControlService::Stream>> streams ABSL_GUARDED_BY(mutex);
  // Worker processes that were refused for their protocol version, as far as is remembered.
  std::unordered_set<std::string> refused ABSL_GUARDED_BY(mutex);

  limits::Limits* limits = nullptr;
  SessionOptions options;
  std::atomic<size_t> speaking = 0;       // sessions that have said hello
  std::atomic<size_t> waiting_bytes = 0;  // memory of messages that are not taken yet

  // What each session may send ahead now.
  size_t Window() const {
    return std::clamp(options.waiting_bytes / std::max<size_t>(1, speaking), kSmallestWindow,
                      kLargestWindow);
  }

  absl::StatusOr<access::Caller> Admit(const grpc::CallbackServerContext& context,
                                       const char* method, const std::string& resource) const {
    return gate == nullptr ? access::LocalCaller()
                           : gate->Admit(context, kService, method, resource);
  }
  // PERMISSION_DENIED, and noted, unless the caller may speak for that node. `node`: its id;
  // `name`: "nodes/{id}".
  absl::Status CheckNode(const access::Caller& caller, const std::string& address,
                         const char* method, const std::string& node, const std::string& name) {
    const absl::Status may = caller.MaySpeakFor(node);
    if (!may.ok()) {
      gate->NoteRefused(caller, address, absl::StrCat("/ringleader.v1.", kService, "/", method),
                        name, may);
    }
    return may;
  }
  bool FirstRefusal(const std::string& incarnation) {
    absl::MutexLock lock(&mutex);
    if (refused.size() >= kRefusalsRemembered) refused.clear();
    return refused.insert(incarnation).second;
  }
};

class WorkerControlService::Stream : public ServerStream<grpc::ByteBuffer, grpc::ByteBuffer>,
                                     public session::Session {
  using Base = ServerStream<grpc::ByteBuffer, grpc::ByteBuffer>;

 public:
  Stream(std::shared_ptr<Registry> registry, std::string address)
      : registry_(std::move(registry)),
        address_(std::move(address)),
        last_heard_(registry_->clock->Now()) {}
  // Once, before the first message.
  void SetCaller(access::Caller caller) { caller_ = std::move(caller); }

  // The stream has to say hello in time. `silent`: its place among those that have not.
  void AwaitHello(limits::Quota::Hold silent) {
    {
      absl::MutexLock lock(&mutex_);
      silent_ = std::move(silent);
    }
    const std::weak_ptr<Stream> weak = self();
    hello_alarm_.Set(
        std::chrono::system_clock::now() +
            std::chrono::microseconds(absl::ToInt64Microseconds(registry_->options.hello_timeout)),
        [weak](bool expired) {
          const std::shared_ptr<Stream> stream = expired ? weak.lock() : nullptr;
          if (stream != nullptr) stream->EndIfSilent();
        });
  }

  const std::string& node() const override { return node_; }
  const std::string& incarnation() const override { return incarnation_; }
  std::string certificate() const override { return caller_.certificate; }
  absl::Time last_heard() const override {
    absl::MutexLock lock(&mutex_);
    return last_heard_;
  }
  void Send(v1::CoordinatorMessage message) override {
    {
      absl::MutexLock lock(&mutex_);
      AddIntake(message);
    }
    Write(message);
  }
  void Taken() override {
    std::optional<v1::CoordinatorMessage> message;
    {
      absl::MutexLock lock(&mutex_);
      const Waiting taken = waiting_.front();
      waiting_.pop_front();
      taken_sequence_ = std::max(taken_sequence_, taken.sequence);
      untold_bytes_ += taken.wire_bytes;
      held_bytes_ -= taken.memory_bytes;
      registry_->waiting_bytes -= taken.memory_bytes;
      // Less is told with the next message of whatever kind.
      if (untold_bytes_ >= registry_->Window() / 4) AddIntake(message.emplace());
    }
    if (message) Write(*message);
    ReadOn();
  }
  void Close(const absl::Status& status) override { Base::Close(status); }
  void Shut(const absl::Status& status) {
    shut_ = true;
    Base::Close(status);
  }
  bool shut() const override { return shut_; }

 private:
  // A message that was delivered and not taken yet.
  struct Waiting {
    uint64_t sequence = 0;
    size_t wire_bytes = 0;
    size_t memory_bytes = 0;
  };

  std::shared_ptr<Stream> self() { return std::static_pointer_cast<Stream>(shared_from_this()); }

  bool HasRoom() const override {
    const size_t held = held_bytes_;
    return held == 0 || (held < kWindowsInMemory * registry_->Window() &&
                         registry_->waiting_bytes < registry_->options.waiting_bytes);
  }

  void Write(const v1::CoordinatorMessage& message) {
    grpc::ByteBuffer wire;
    bool ours = false;
    if (grpc::SerializationTraits<v1::CoordinatorMessage>::Serialize(message, &wire, &ours).ok()) {
      Base::Send(std::move(wire));
    }
  }

  void AddIntake(v1::CoordinatorMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::Intake* const intake = message.mutable_intake();
    intake->set_taken_sequence(taken_sequence_);
    intake->set_window_bytes(registry_->Window());
    untold_bytes_ = 0;
  }

  void EndIfSilent() {
    {
      absl::MutexLock lock(&mutex_);
      if (spoke_) return;
    }
    Base::Close(absl::DeadlineExceededError(
        absl::StrFormat("no hello within %s: say who you are, or do not connect",
                        absl::FormatDuration(registry_->options.hello_timeout))));
  }

  absl::Status OnMessage(grpc::ByteBuffer& wire) override {
    v1::WorkerMessage message;
    RETURN_IF_ERROR(Parse(&wire, &message));
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
    if (message.has_inventory()) RETURN_IF_ERROR(CheckInventory(message.inventory()));
    const Waiting waiting = {.sequence = message.sequence(),
                             .wire_bytes = message.ByteSizeLong(),
                             .memory_bytes = message.SpaceUsedLong()};
    registry_->waiting_bytes += waiting.memory_bytes;
    {
      absl::MutexLock lock(&mutex_);
      held_bytes_ += waiting.memory_bytes;
      waiting_.push_back(waiting);
    }
    registry_->listener->OnMessage(self(), std::move(message));
    return absl::OkStatus();
  }

  absl::Status OnHello(v1::WorkerMessage& message) {
    if (!node_.empty()) return absl::InvalidArgumentError("a second hello on one session");
    v1::WorkerHello& hello = *message.mutable_hello();
    absl::StatusOr<std::string> id = store::NodeIdFromName(hello.node());
    if (!id.ok()) return id.status();
    RETURN_IF_ERROR(registry_->CheckNode(caller_, address_, "Session", *id, hello.node()));
    RETURN_IF_ERROR(CheckHello(hello));
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
    ++registry_->speaking;
    hello_alarm_.Cancel();
    {
      absl::MutexLock lock(&mutex_);
      spoke_ = true;
      silent_ = {};
    }
    registry_->listener->OnHello(self(), std::move(hello));
    return absl::OkStatus();
  }

  void OnEnd() override {
    {
      absl::MutexLock lock(&registry_->mutex);
      registry_->streams.erase(self());
    }
    {
      absl::MutexLock lock(&mutex_);
      silent_ = {};
    }
    hello_alarm_.Cancel();
    if (node_.empty()) return;
    --registry_->speaking;
    registry_->listener->OnClosed(self());
  }

  const std::shared_ptr<Registry> registry_;
  access::Caller caller_;
  const std::string address_;
  // Set by the hello, before anybody else knows of the session.
  std::string node_;
  std::string incarnation_;
  mutable absl::Mutex mutex_;
  std::atomic<bool> shut_ = false;
  absl::Time last_heard_ ABSL_GUARDED_BY(mutex_);
  bool spoke_ ABSL_GUARDED_BY(mutex_) = false;  // said hello
  limits::Quota::Hold silent_ ABSL_GUARDED_BY(mutex_);
  grpc::Alarm hello_alarm_;

  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t taken_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t untold_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // taken since the worker was last told
  std::atomic<size_t> held_bytes_ = 0;               // memory of `waiting_`
};

WorkerControlService::WorkerControlService(SessionListener* listener, const Clock* clock,
                                           limits::Limits* limits, const SessionOptions& options)
    : registry_(std::make_shared<Registry>()) {
  registry_->listener = listener;
  registry_->clock = clock;
  registry_->limits = limits;
  registry_->options = options;
}

WorkerControlService::~WorkerControlService() = default;

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* WorkerControlService::Session(
    grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<Stream>(registry_, context->peer());
  stream->Begin(context, registry_->options.end_patience);
  {
    absl::MutexLock lock(&registry_->mutex);
    if (registry_->closed) {
      stream->Close(absl::UnavailableError("the coordinator is shutting down"));
    } else {
      registry_->streams.insert(stream);
    }
  }
  // After it is known here: when somebody is shut out just now, either CloseOpen() ends the stream,
  // or the gate knows already. gRPC reads no message before this function has returned.
  absl::StatusOr<access::Caller> caller = registry_->Admit(*context, "Session", "");
  if (!caller.ok()) {
    stream->Close(caller.status());
    return stream.get();
  }
  absl::StatusOr<limits::Quota::Hold> silent =
      registry_->limits->silent_sessions.Take(limits::ClientOf(*caller, context->peer()));
  stream->SetCaller(*std::move(caller));
  if (silent.ok()) {
    stream->AwaitHello(*std::move(silent));
  } else {
    stream->Close(silent.status());
  }
  return stream.get();
}

grpc::ServerUnaryReactor* WorkerControlService::ReportDeath(grpc::CallbackServerContext* context,
                                                            const v1::ReportDeathRequest* request,
                                                            v1::ReportDeathResponse*) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::StatusOr<std::string> node = store::NodeIdFromName(request->node());
  const absl::StatusOr<access::Caller> caller =
      registry_->Admit(*context, "ReportDeath", request->node());
  absl::Status refused = caller.status();
  if (refused.ok()) refused = node.status();
  if (refused.ok()) {
    refused = registry_->CheckNode(*caller, context->peer(), "ReportDeath", *node, request->node());
  }
  if (refused.ok()) refused = CheckIncarnation(request->incarnation());
  absl::StatusOr<limits::Quota::Hold> hold;
  if (refused.ok()) {
    hold = registry_->limits->calls.Take(limits::ClientOf(*caller, context->peer()));
    refused = hold.status();
  }
  if (!refused.ok()) {
    reactor->Finish(ToGrpcStatus(refused));
    return reactor;
  }
  registry_->listener->OnDeath(*std::move(node), request->incarnation(),
                               [reactor, hold = std::make_shared<limits::Quota::Hold>(
                                             *std::move(hold))](const absl::Status& status) {
                                 *hold = {};
                                 reactor->Finish(ToGrpcStatus(status));
                               });
  return reactor;
}

void WorkerControlService::SetGate(std::shared_ptr<access::Gate> gate) {
  registry_->gate = std::move(gate);
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
  for (const std::shared_ptr<Stream>& stream : open) stream->Shut(status);
}

}  // namespace ringleader::session
