// A coordinator that a test plays to a worker's process.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/net/tls.h"
#include "base/protocol_version.h"
#include "ringleader/v1/worker_control.grpc.pb.h"

namespace ringleader::testing {

// Has every worker start one trainer, and hears what it tells.
class StartingCoordinator : public v1::WorkerControl::Service {
 public:
  explicit StartingCoordinator(const TlsOptions& tls = {}, const std::string& host = "127.0.0.1")
      : host_(host) {
    grpc::ServerBuilder builder;
    TlsOptions options = tls;
    options.insecure = !options.enabled();
    builder.AddListeningPort(
        host + ":0", ServerCredentials(options, {.host = host, .port = 0, .path = ""}).value(),
        &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~StartingCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>* stream) override {
    v1::WorkerMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    v1::CoordinatorMessage answer;
    answer.mutable_welcome()->set_lease_milliseconds(60'000);
    answer.mutable_welcome()->set_heartbeat_milliseconds(100);
    answer.mutable_welcome()->set_fence_milliseconds(90'000);
    answer.mutable_welcome()->set_protocol_version(kProtocolVersion);
    stream->Write(answer);
    answer.Clear();
    answer.mutable_command()->set_command_id(1);
    answer.mutable_command()->set_job("job");
    answer.mutable_command()->set_attempt(1);
    answer.mutable_command()->set_fencing_token(7);
    answer.mutable_command()->mutable_start()->set_trainers(1);
    answer.mutable_command()->mutable_start()->set_world_size(1);
    *answer.mutable_command()->mutable_start()->mutable_spec() = spec;
    stream->Write(answer);
    while (stream->Read(&message)) {
      {
        absl::MutexLock lock(&mutex_);
        for (const v1::LogLine& line : message.event().logs().lines()) log_.push_back(line.text());
        if (message.event().has_trainer_exited())
          exits_.push_back(message.event().trainer_exited());
        if (message.event().has_trainer_ready())
          ready_at_ = message.event().trainer_ready().address();
      }
      answer.Clear();
      answer.set_heartbeat_number(message.heartbeat().number());
      answer.set_acknowledged_sequence(message.sequence());
      stream->Write(answer);
    }
    return grpc::Status::OK;
  }
  grpc::Status ReportDeath(grpc::ServerContext*, const v1::ReportDeathRequest*,
                           v1::ReportDeathResponse*) override {
    absl::MutexLock lock(&mutex_);
    ++deaths_;
    return grpc::Status::OK;
  }

  v1::JobSpec spec;  // of the job; set before the worker comes

  std::string address() const { return absl::StrCat(host_, ":", port_); }
  std::vector<std::string> log() {
    absl::MutexLock lock(&mutex_);
    return log_;
  }
  std::vector<v1::TrainerExited> exits() {
    absl::MutexLock lock(&mutex_);
    return exits_;
  }
  // Where the trainer listens for others; empty before it does.
  std::string ready_at() {
    absl::MutexLock lock(&mutex_);
    return ready_at_;
  }
  int deaths() {
    absl::MutexLock lock(&mutex_);
    return deaths_;
  }

 private:
  const std::string host_;
  int port_ = 0;
  absl::Mutex mutex_;
  std::vector<std::string> log_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::TrainerExited> exits_ ABSL_GUARDED_BY(mutex_);
  std::string ready_at_ ABSL_GUARDED_BY(mutex_);
  int deaths_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ringleader::testing
