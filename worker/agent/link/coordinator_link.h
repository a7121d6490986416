// The worker's end of WorkerControl.Session: connects, reconnects, heartbeats, and sends what the
// buffer holds until it is acknowledged.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringleader/v1/worker_control.grpc.pb.h"
#include "worker/agent/link/event_buffer.h"

namespace ringleader::agent {

// Thread-safe.
class CoordinatorLink {
 public:
  // Called on the link's threads.
  struct Callbacks {
    std::function<v1::WorkerHello()> hello;
    std::function<void()> on_welcome;
    std::function<void(v1::Command)> on_command;
    // The coordinator refused this worker for what it is, before any session: the link gives up.
    std::function<void(const absl::Status&)> on_refused = {};
  };

  CoordinatorLink(std::shared_ptr<grpc::Channel> channel, EventBuffer* buffer, Callbacks callbacks);
  ~CoordinatorLink();  // Stop()

  void Start();
  void Stop();

  // The worker's loop calls this each time it comes round. Cuts a session on which nothing has come
  // for a lease: a dead network does not say that it is. And a worker whose own loop is stuck, e.g.
  // in a system call, does not pass for alive: once it has not called for a lease, no heartbeat is
  // sent and no session is begun until it does.
  void CheckLease();

  bool connected() const;
  uint64_t sessions() const;  // that were welcomed
  // How long ago the newest sign of life was sent that is known to have arrived; 0 before the first
  // session. In boot time.
  absl::Duration OutOfContact() const;
  // Until when the coordinator starts nothing in place of what runs here, in boot time: for as long
  // as it said after the newest sign of life that is known to have arrived was sent. Infinite
  // before the first session.
  absl::Time lease_end() const;

 private:
  using Stream = grpc::ClientReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>;

  void Run();
  // One session, from connecting to its end: OK if it was welcomed, or why it was not.
  absl::Status RunSession();
  // The coordinator will say no every time, as long as neither side is started anew with other
  // flags, certificates or rights. Not so for a worker that it has welcomed before.
  bool IsFinal(const absl::Status& refusal) const;
  void ReadAll(Stream* stream);
  // False if the coordinator speaks another version of the protocol: the session ends.
  bool OnWelcome(const v1::Welcome& welcome);
  void WriteHello(Stream* stream);
  bool WriteHeartbeat(Stream* stream);
  // Sends messages and heartbeats until the session ends.
  void WriteAll(Stream* stream);
  // The next message after `sent`, once the coordinator has room for it; none after `patience`.
  std::optional<v1::WorkerMessage> NextMessage(uint64_t sent, absl::Duration patience);
  void OnIntake(const v1::Intake& intake);
  bool LoopIsAlive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ended() const;

  const std::unique_ptr<v1::WorkerControl::Stub> stub_;
  EventBuffer* const buffer_;
  const Callbacks callbacks_;
  std::thread thread_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the current session
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;                      // nothing more to read
  bool welcomed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sessions_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);  // why this worker ended the current session
  absl::Duration heartbeat_interval_ ABSL_GUARDED_BY(mutex_) = absl::Seconds(2);
  absl::Duration lease_ ABSL_GUARDED_BY(mutex_) = absl::Seconds(10);
  absl::Duration fence_after_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();
  // All in boot time.
  absl::Time last_received_ ABSL_GUARDED_BY(mutex_);
  absl::Time confirmed_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time hello_sent_ ABSL_GUARDED_BY(mutex_);
  absl::Time loop_seen_ ABSL_GUARDED_BY(mutex_);  // CheckLease()
  uint64_t last_heartbeat_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, absl::Time> heartbeats_sent_ ABSL_GUARDED_BY(mutex_);  // not confirmed yet

  // Numbered messages of this session that the coordinator has not taken, as far as it has said:
  // {sequence, bytes}, and how many bytes they may hold; 0: it has not said.
  std::deque<std::pair<uint64_t, size_t>> ahead_ ABSL_GUARDED_BY(mutex_);
  size_t ahead_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t window_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringleader::agent
