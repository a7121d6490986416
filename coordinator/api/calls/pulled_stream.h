// Server streams that follow the store: each keeps a place in it and reads on from there whenever
// its job changes and its client has taken the last message. No stream has a queue, so a slow
// client costs the memory of one message: it sees job states coalesced, and steps and logs later.
// It may take as long as it likes, as somebody who pages through a log does; what all of its
// streams hold meanwhile is bounded.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/net/grpc_status.h"
#include "coordinator/access/gate.h"
#include "coordinator/api/calls/delivery.h"
#include "coordinator/api/calls/executor.h"
#include "coordinator/api/calls/rpc_metrics.h"
#include "coordinator/limits/client_limits.h"
#include "coordinator/limits/client_name.h"
#include "coordinator/limits/quota.h"
#include "coordinator/store/store.h"

namespace ringleader::api {

// A stream as the hub sees it.
class Wakeable {
 public:
  virtual ~Wakeable() = default;
  // There may be news. Returns at once.
  virtual void Wake() = 0;
  // End with this status as soon as the message under way is out.
  virtual void End(const absl::Status& status) = 0;
};

// All open streams by job; wakes those whose job a commit touched. Thread-safe. Outlives all
// streams: the server must be gone before it.
class StreamHub {
 public:
  // `limits`: how many there may be at once, and how much that is not read.
  StreamHub(store::Store* store, Executor* executor, RpcMetrics* metrics, access::Gate* gate,
            limits::Limits* limits);
  // All streams must have ended.
  ~StreamHub();

  // The stream's place among those of `client`, to be kept while it is open. RESOURCE_EXHAUSTED
  // when there are too many, UNAVAILABLE after EndAll().
  absl::StatusOr<limits::Quota::Hold> Add(const std::string& client, const std::string& job,
                                          Wakeable* stream) ABSL_LOCKS_EXCLUDED(mu_);
  void Remove(const std::string& job, Wakeable* stream) ABSL_LOCKS_EXCLUDED(mu_);

  // Ends every stream with `status`, and every later one.
  void EndAll(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends those that are open.
  void EndOpen(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  store::Store& store() { return store_; }
  Executor& executor() { return executor_; }
  RpcMetrics& metrics() { return metrics_; }
  access::Gate& gate() { return gate_; }
  limits::Quota& unread() { return limits_.unread_messages; }

 private:
  void OnChange(const store::Change& change) ABSL_LOCKS_EXCLUDED(mu_);

  store::Store& store_;
  Executor& executor_;
  RpcMetrics& metrics_;
  access::Gate& gate_;
  limits::Limits& limits_;

  absl::Mutex mu_;
  absl::Status ended_ ABSL_GUARDED_BY(mu_);
  std::unordered_multimap<std::string, Wakeable*> streams_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<store::Store::Subscription>
      subscription_;  // last: no call into a half-destroyed hub
};

// One stream. Its state says who may touch it: whoever moved it out of kIdle goes on until it puts
// it back, so Produce, StartWrite and Finish never meet. Deletes itself when gRPC is done with it.
template <typename Response>
class PulledStream : public grpc::ServerWriteReactor<Response>, public Wakeable {
 public:
  void Wake() override ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      news_ = true;
      if (state_ != State::kIdle) return;
      state_ = State::kBusy;
    }
    Pump();
  }

  void End(const absl::Status& status) override ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      if (end_.ok()) end_ = status;
    }
    Wake();
  }

  void OnWriteDone(bool ok) override {
    delivery_.End();
    if (!ok) End(absl::CancelledError("the client is gone"));
    Pump();
  }
  void OnCancel() override { End(absl::CancelledError("the client is gone")); }
  void OnDone() override {
    if (hold_) hub_.Remove(job_, this);
    // Whatever another thread did here, such as OnCancel, it did before it let go of the lock.
    mu_.Lock();
    const grpc::StatusCode code = finished_with_;
    mu_.Unlock();
    hub_.metrics().StreamDone(service_, method_, code);
    delete this;
  }

 protected:
  enum class Next { kWrite, kWait, kEnd };

  // `resource`: of which job, as the request says.
  PulledStream(StreamHub* hub, const grpc::CallbackServerContext& context, std::string service,
               std::string method, std::string resource)
      : hub_(*hub),
        context_(context),
        caller_(hub->gate().Admit(context, service, method, resource)),
        client_(limits::ClientOf(caller_.value_or(access::Caller()), context.peer())),
        service_(std::move(service)),
        method_(std::move(method)),
        resource_(std::move(resource)) {
    hub_.metrics().StreamOpened(service_, method_);
  }

  // Begins with `start`'s status: ends at once unless OK, and unless the gate admits the caller.
  // The last thing that a constructor calls.
  void Start(const grpc::CallbackServerContext& context, const std::string& job,
             absl::Status start) {
    if (!caller_.ok()) start = caller_.status();
    if (start.ok()) {
      job_ = job;
      absl::StatusOr<limits::Quota::Hold> hold = hub_.Add(client_, job, this);
      start = hold.status();
      if (hold.ok()) hold_ = *std::move(hold);
    }
    // Again, after Add(): when somebody is shut out just now, either the hub ends this stream, or
    // the gate knows already.
    if (start.ok()) start = hub_.gate().Admit(context, service_, method_, resource_).status();
    if (!start.ok()) {
      absl::MutexLock lock(&mu_);
      end_ = start;
    }
    Pump();
  }

  // Reads what is new into `response`: kWrite sends it and asks again, kWait sleeps until there is
  // news, kEnd ends the stream well. Runs on the executor, one call at a time.
  virtual absl::StatusOr<Next> Produce(Response* response) = 0;

  store::Store& store() { return hub_.store(); }

 private:
  enum class State { kIdle, kBusy, kFinished };

  // In state kBusy. Hands over to the executor, which has at most one task a stream.
  void Pump() {
    hub_.executor().Run(client_, Pace::kQuick, [this] { ProduceAndSend(); });
  }

  void ProduceAndSend() ABSL_LOCKS_EXCLUDED(mu_) {
    while (true) {
      absl::Status end;
      {
        absl::MutexLock lock(&mu_);
        news_ = false;
        end = end_;
      }
      if (!end.ok()) return FinishWith(end);
      response_.Clear();
      const absl::StatusOr<Next> next = Produce(&response_);
      if (!next.ok()) return FinishWith(next.status());
      if (*next == Next::kEnd) return FinishWith(absl::OkStatus());
      if (*next == Next::kWrite) {
        const absl::Status room = delivery_.Begin(&hub_.unread(), client_, response_.ByteSizeLong(),
                                                  context_, absl::InfiniteDuration());
        if (!room.ok()) return FinishWith(room);
        this->StartWrite(&response_);
        return;  // OnWriteDone goes on
      }
      response_ = Response();  // an idle stream keeps no page
      absl::MutexLock lock(&mu_);
      if (news_) continue;
      state_ = State::kIdle;
      return;
    }
  }

  void FinishWith(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    const grpc::Status reply = ToGrpcStatus(status);
    {
      absl::MutexLock lock(&mu_);
      state_ = State::kFinished;
      finished_with_ = reply.error_code();
    }
    this->Finish(reply);
  }

  StreamHub& hub_;
  const grpc::CallbackServerContext& context_;
  const absl::StatusOr<access::Caller> caller_;
  const std::string client_;
  const std::string service_;
  const std::string method_;
  const std::string resource_;
  std::string job_;
  std::optional<limits::Quota::Hold> hold_;
  Response response_;
  Delivery delivery_;  // of response_

  absl::Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kBusy;
  bool news_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  grpc::StatusCode finished_with_ ABSL_GUARDED_BY(mu_) = grpc::StatusCode::OK;
};

}  // namespace ringleader::api
