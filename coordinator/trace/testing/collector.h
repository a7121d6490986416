// A collector of traces in this process: what it was sent, and what it does with it, as a test
// says.
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "opentelemetry/trace_service.grpc.pb.h"

namespace ringleader::trace::testing {

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

class Collector : public otlp::TraceService::Service {
 public:
  using Answer =
      std::function<grpc::Status(const grpc::ServerContext&, otlp::ExportTraceServiceResponse*)>;

  explicit Collector(const std::shared_ptr<grpc::ServerCredentials>& credentials =
                         grpc::InsecureServerCredentials()) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", credentials, &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr);
  }
  ~Collector() override { server_->Shutdown(std::chrono::system_clock::now()); }

  int port() const { return port_; }
  std::string Address() const { return absl::StrCat("127.0.0.1:", port_); }

  // What calls are answered with from now on, in place of OK; their spans are not kept then.
  void SetAnswer(Answer answer) {
    absl::MutexLock lock(&mutex_);
    answer_ = std::move(answer);
  }
  // Waits for the caller to give up.
  static grpc::Status Hang(const grpc::ServerContext& context, otlp::ExportTraceServiceResponse*) {
    while (!context.IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
    return grpc::Status::CANCELLED;
  }

  // All that were taken, once there are `count` of them; fewer if they do not come in a minute.
  std::vector<otlp::Span> Await(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&] { return spans_.size() >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1)))
        << spans_.size() << " spans of " << count;
    return spans_;
  }
  void AwaitCalls(int count) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&] { return calls_ >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1)));
  }
  otlp::Resource resource() {
    absl::MutexLock lock(&mutex_);
    return resource_;
  }

 private:
  grpc::Status Export(grpc::ServerContext* context, const otlp::ExportTraceServiceRequest* request,
                      otlp::ExportTraceServiceResponse* response) override {
    Answer answer;
    {
      absl::MutexLock lock(&mutex_);
      ++calls_;
      answer = answer_;
    }
    if (answer) return answer(*context, response);
    absl::MutexLock lock(&mutex_);
    for (const otlp::ResourceSpans& part : request->resource_spans()) {
      resource_ = part.resource();
      for (const otlp::ScopeSpans& scope : part.scope_spans()) {
        spans_.insert(spans_.end(), scope.spans().begin(), scope.spans().end());
      }
    }
    return grpc::Status::OK;
  }

  absl::Mutex mutex_;
  Answer answer_ ABSL_GUARDED_BY(mutex_);
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  otlp::Resource resource_ ABSL_GUARDED_BY(mutex_);
  std::vector<otlp::Span> spans_ ABSL_GUARDED_BY(mutex_);
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringleader::trace::testing
