// A worker's session as the rest of the coordinator sees it, without gRPC: who is connected, when
// it was last heard, how to speak to it, and who listens.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::session {

// One stream of one worker process, from its hello on. Thread-safe; no call blocks.
class Session {
 public:
  virtual ~Session() = default;

  virtual const std::string& node() const = 0;  // id, without "nodes/"
  virtual const std::string& incarnation() const = 0;
  // The name in the certificate by which the node is known, as CertificateNames::Texts() writes it;
  // empty where there are no roles.
  virtual std::string certificate() const { return ""; }
  // When the newest message arrived.
  virtual absl::Time last_heard() const = 0;

  // Queued after earlier messages; dropped once the stream has ended (whatever is durable is sent
  // again to the next session).
  virtual void Send(v1::CoordinatorMessage message) = 0;
  // The oldest message that was delivered and not taken yet is dealt with, applied or dropped: its
  // memory is free, and the worker may send as much more. To be called once a message.
  virtual void Taken() = 0;
  // Ends the stream with this status. Later messages from it are not delivered.
  virtual void Close(const absl::Status& status) = 0;
  // Whether it was ended together with all others: nothing that was sent on it has.
  virtual bool shut() const = 0;
};

// Called by the threads that read the streams: calls of one session come one at a time and in
// order, those of different sessions side by side. Must return at once.
class SessionListener {
 public:
  virtual ~SessionListener() = default;

  virtual void OnHello(std::shared_ptr<Session> session, v1::WorkerHello hello) = 0;
  // Everything but hello and heartbeats, which the session answers itself.
  virtual void OnMessage(std::shared_ptr<Session> session, v1::WorkerMessage message) = 0;
  virtual void OnClosed(std::shared_ptr<Session> session) = 0;

  // This worker process of this node (id) is dead, and so is every trainer that it started. `done`
  // is called once, from any thread: UNAVAILABLE if it is to be said again later.
  virtual void OnDeath(std::string node, std::string incarnation,
                       std::function<void(const absl::Status&)> done) = 0;
};

}  // namespace ringleader::session
