// A coordinator under test, as a process, and clients of it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/testing/temp_dir.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"
#include "tests/support/program.h"

namespace ringleader::testing {

// Keeps its port and its data folder over restarts.
class CoordinatorProcess {
 public:
  explicit CoordinatorProcess(std::vector<std::string> extra_flags = {}, bool check_files = false);

  // Starts it; false, with the log in log(), if it does not serve within a minute.
  bool Start();
  // Starts it without waiting.
  void Spawn();
  Process& process() { return *process_; }

  std::string address() const;
  std::string metrics_address() const;
  std::string data_dir() const { return dir_.File("data"); }
  std::string File(const std::string& name) const { return dir_.File(name); }
  std::string log() const { return process_ == nullptr ? "" : process_->Log(); }

  // A new connection each.
  std::shared_ptr<grpc::Channel> Channel() const;
  // A context with a deadline, so that nothing hangs.
  static std::unique_ptr<grpc::ClientContext> Context();
  bool Serving() const;
  // The page, by HTTP; empty if it cannot be read.
  std::string Metrics() const;

 private:
  const TempDir dir_;
  const std::vector<std::string> extra_flags_;
  const bool check_files_;
  const int port_ = FreePort();
  const int metrics_port_ = FreePort();
  int starts_ = 0;
  std::unique_ptr<Process> process_;
};

// A job of `trainers` ranks whose files need not exist (the coordinator runs with
// --check-files=false).
v1::JobSpec TestJob(const std::string& name, uint32_t trainers, uint64_t steps);

}  // namespace ringleader::testing
