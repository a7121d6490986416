#include "worker/agent/link/coordinator_link.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/random/random.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/net/channel.h"
#include "base/protocol_version.h"
#include "base/wait/timed_wait.h"
#include "proto/timestamps.h"
#include "worker/agent/link/session_pauses.h"

namespace ringleader::agent {

CoordinatorLink::CoordinatorLink(std::shared_ptr<grpc::Channel> channel, EventBuffer* buffer,
                                 Callbacks callbacks)
    : stub_(v1::WorkerControl::NewStub(std::move(channel))),
      buffer_(buffer),
      callbacks_(std::move(callbacks)) {}

CoordinatorLink::~CoordinatorLink() {
  Stop();
}

void CoordinatorLink::Start() {
  {
    absl::MutexLock lock(&mutex_);
    loop_seen_ = BootNow();
  }
  thread_ = std::thread([this] { Run(); });
}

void CoordinatorLink::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
}

void CoordinatorLink::CheckLease() {
  absl::MutexLock lock(&mutex_);
  loop_seen_ = BootNow();
  if (context_ == nullptr || BootNow() - last_received_ < lease_) return;
  spdlog::warn("nothing from the coordinator for {}: reconnecting", absl::FormatDuration(lease_));
  context_->TryCancel();
  last_received_ = BootNow();  // or every call until the session ends would cut it
}

bool CoordinatorLink::connected() const {
  absl::MutexLock lock(&mutex_);
  return context_ != nullptr && welcomed_ && !ended_;
}

uint64_t CoordinatorLink::sessions() const {
  absl::MutexLock lock(&mutex_);
  return sessions_;
}

absl::Duration CoordinatorLink::OutOfContact() const {
  absl::MutexLock lock(&mutex_);
  return confirmed_ == absl::InfinitePast() ? absl::ZeroDuration() : BootNow() - confirmed_;
}

absl::Time CoordinatorLink::lease_end() const {
  absl::MutexLock lock(&mutex_);
  return confirmed_ == absl::InfinitePast() ? absl::InfiniteFuture() : confirmed_ + fence_after_;
}

bool CoordinatorLink::LoopIsAlive() const {
  return BootNow() - loop_seen_ <= lease_;
}

bool CoordinatorLink::ended() const {
  absl::MutexLock lock(&mutex_);
  return ended_ || stopping_;
}

void CoordinatorLink::Run() {
  absl::BitGen random;
  SessionPauses pauses;
  std::string last_error;  // why there is no session
  while (true) {
    const absl::Status session = RunSession();
    if (IsFinal(session)) return callbacks_.on_refused(session);
    if (session.message() != last_error) {  // said once, not with every try
      last_error = std::string(session.message());
      if (!session.ok() && !absl::IsCancelled(session)) {
        spdlog::warn("no session with the coordinator: {}; trying again", last_error);
      }
    }
    const absl::Duration pause = pauses.After(session, /*lease_runs=*/BootNow() < lease_end());
    absl::MutexLock lock(&mutex_);
    // Spread, so that thousands do not come at once.
    AwaitFor(mutex_, absl::Condition(&stopping_), pause * absl::Uniform(random, 0.5, 1.5));
    if (stopping_) return;
  }
}

bool CoordinatorLink::IsFinal(const absl::Status& refusal) const {
  absl::MutexLock lock(&mutex_);
  return sessions_ == 0 && !stopping_ &&
         (absl::IsPermissionDenied(refusal) || absl::IsUnauthenticated(refusal) ||
          absl::IsInvalidArgument(refusal) || absl::IsUnimplemented(refusal));
}

absl::Status CoordinatorLink::RunSession() {
  grpc::ClientContext context;
  {
    absl::MutexLock lock(&mutex_);
    // A hello is a sign of life as a heartbeat is.
    const auto may_speak = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return LoopIsAlive() || stopping_;
    };
    mutex_.Await(absl::Condition(&may_speak));
    if (stopping_) return absl::CancelledError();
    context_ = &context;
    ended_ = welcomed_ = false;
    refused_ = absl::OkStatus();
    last_received_ = BootNow();
    heartbeats_sent_.clear();
    ahead_.clear();
    ahead_bytes_ = window_bytes_ = 0;
  }
  const std::unique_ptr<Stream> stream = stub_->Session(&context);
  std::thread reader([&] { ReadAll(stream.get()); });
  WriteHello(stream.get());
  {
    // Also where the hello seems not to have been sent: what the coordinator said of it comes
    // first.
    absl::MutexLock lock(&mutex_);
    const auto answered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return welcomed_ || ended_ || stopping_;
    };
    mutex_.Await(absl::Condition(&answered));  // CheckLease() ends a wait in vain
  }
  WriteAll(stream.get());
  {
    // Where the coordinator has ended the stream its reason is to be read, and a cancelled call may
    // have lost it.
    absl::MutexLock lock(&mutex_);
    if (!ended_ || !refused_.ok()) context.TryCancel();
  }
  reader.join();
  const grpc::Status status = stream->Finish();
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
  const std::string error =
      refused_.ok() ? ExplainConnection(status.error_message()) : std::string(refused_.message());
  if (welcomed_) {
    if (!stopping_) spdlog::warn("lost the coordinator: {}; reconnecting", error);
    return absl::OkStatus();
  }
  return absl::Status(
      refused_.ok() ? static_cast<absl::StatusCode>(status.error_code()) : refused_.code(), error);
}

void CoordinatorLink::WriteHello(Stream* stream) {
  v1::WorkerMessage message;
  *message.mutable_hello() = callbacks_.hello();
  {
    absl::MutexLock lock(&mutex_);
    hello_sent_ = BootNow();
  }
  stream->Write(message);
}

void CoordinatorLink::ReadAll(Stream* stream) {
  v1::CoordinatorMessage message;
  while (stream->Read(&message)) {
    {
      absl::MutexLock lock(&mutex_);
      last_received_ = BootNow();
      // All up to this one have arrived; the newest counts.
      for (auto it = heartbeats_sent_.begin();
           it != heartbeats_sent_.end() && it->first <= message.heartbeat_number();) {
        confirmed_ = std::max(confirmed_, it->second);
        it = heartbeats_sent_.erase(it);
      }
    }
    if (message.has_intake()) OnIntake(message.intake());
    if (message.has_welcome() && !OnWelcome(message.welcome())) break;
    if (message.acknowledged_sequence() > 0) buffer_->Acknowledge(message.acknowledged_sequence());
    if (message.has_command()) callbacks_.on_command(std::move(*message.mutable_command()));
    message.Clear();
  }
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }
  buffer_->Wake();
}

bool CoordinatorLink::OnWelcome(const v1::Welcome& welcome) {
  if (absl::Status same =
          CheckProtocolVersion("the coordinator", welcome.protocol_version(), "this worker");
      !same.ok()) {
    absl::MutexLock lock(&mutex_);
    refused_ = std::move(same);
    return false;
  }
  buffer_->Acknowledge(welcome.applied_sequence());
  {
    absl::MutexLock lock(&mutex_);
    welcomed_ = true;
    ++sessions_;
    confirmed_ = std::max(confirmed_, hello_sent_);
    heartbeat_interval_ = absl::Milliseconds(std::max(1u, welcome.heartbeat_milliseconds()));
    lease_ = absl::Milliseconds(std::max(1u, welcome.lease_milliseconds()));
    fence_after_ = absl::Milliseconds(std::max(1u, welcome.fence_milliseconds()));
  }
  spdlog::info("in session with the coordinator (epoch {})", welcome.epoch());
  callbacks_.on_welcome();
  return true;
}

bool CoordinatorLink::WriteHeartbeat(Stream* stream) {
  v1::WorkerMessage message;
  v1::Heartbeat* const heartbeat = message.mutable_heartbeat();
  SetTime(absl::Now(), heartbeat->mutable_time());
  {
    absl::MutexLock lock(&mutex_);
    if (!LoopIsAlive()) return true;
    heartbeat->set_number(++last_heartbeat_);
    heartbeats_sent_[last_heartbeat_] = BootNow();
  }
  return stream->Write(message);
}

void CoordinatorLink::OnIntake(const v1::Intake& intake) {
  absl::MutexLock lock(&mutex_);
  window_bytes_ = intake.window_bytes();
  while (!ahead_.empty() && ahead_.front().first <= intake.taken_sequence()) {
    ahead_bytes_ -= ahead_.front().second;
    ahead_.pop_front();
  }
}

std::optional<v1::WorkerMessage> CoordinatorLink::NextMessage(uint64_t sent,
                                                              absl::Duration patience) {
  {
    absl::MutexLock lock(&mutex_);
    const auto room = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return window_bytes_ == 0 || ahead_bytes_ < window_bytes_ || ended_ || stopping_;
    };
    if (!room()) {
      AwaitFor(mutex_, absl::Condition(&room), patience);
      return std::nullopt;  // the caller looks at the clock first
    }
  }
  std::optional<v1::WorkerMessage> message = buffer_->Next(sent, patience);
  if (message) {
    absl::MutexLock lock(&mutex_);
    ahead_.emplace_back(message->sequence(), message->ByteSizeLong());
    ahead_bytes_ += ahead_.back().second;
  }
  return message;
}

void CoordinatorLink::WriteAll(Stream* stream) {
  uint64_t sent = buffer_->acknowledged();
  absl::Time next_heartbeat = BootNow();
  while (!ended()) {
    const std::optional<v1::WorkerMessage> message = NextMessage(sent, next_heartbeat - BootNow());
    if (message) {
      if (!stream->Write(*message)) return;
      sent = message->sequence();
    }
    if (BootNow() < next_heartbeat) continue;
    if (!WriteHeartbeat(stream)) return;
    absl::MutexLock lock(&mutex_);
    next_heartbeat = BootNow() + heartbeat_interval_;
  }
}

}  // namespace ringleader::agent
