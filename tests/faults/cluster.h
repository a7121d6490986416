// A coordinator and workers as real processes on this machine, with time-outs scaled down, and the
// fake trainer in place of the real one.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/testing/test_certificates.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"
#include "worker/agent/process/child_process.h"
#include "worker/agent/process/log_pump.h"

namespace ringleader::faults {

// One line of the fake trainer's audit.
struct AuditLine {
  absl::Time time;
  std::string what;  // start, step, DOUBLE
  uint32_t attempt = 0;
  uint64_t token = 0;
  uint32_t rank = 0;
  int pid = 0;
  uint64_t step = 0;
};

// Of one call to the coordinator. Where no answer comes the call fails, and its test with it.
struct CallContext : grpc::ClientContext {
  CallContext() { set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60)); }
};

class Cluster : public ::testing::Test {
 protected:
  Cluster();
  ~Cluster() override;
  // Whatever a test did: no job ever ran twice at once.
  void TearDown() override;

  // Before anything starts: whoever is out of sight has 20 s to come back, not 5.
  void GiveTimeToComeBack();
  void StartCoordinator();
  // The same again, e.g. after it was killed; clients keep their connections.
  void RestartCoordinator();
  void AwaitServing();
  void KillCoordinator();  // SIGKILL
  int CoordinatorPid() { return coordinator_->pid(); }
  // `coordinator`: an address in its place, e.g. a proxy's.
  void StartWorker(const std::string& name, int trainers, const std::string& coordinator = "");
  void KillWorker(const std::string& name);       // SIGKILL
  void TerminateWorker(const std::string& name);  // SIGTERM
  bool WorkerRuns(const std::string& name);
  int WorkerPid(const std::string& name) { return workers_.at(name).pid(); }
  // A zombie, which nobody has reaped yet, does not.
  static bool Runs(int pid);
  // Processes that the worker has started, by id.
  std::vector<int> TrainerPids(const std::string& worker);
  int coordinator_port() const { return port_; }
  const std::string& dir() const { return dir_; }
  const std::string& bin() const { return bin_; }  // where the programs are

  v1::JobSpec Spec(const std::string& name, uint32_t trainers, uint64_t steps,
                   const std::map<std::string, std::string>& labels = {}) const;
  v1::Job Submit(const v1::JobSpec& spec);
  v1::Job Get(const std::string& name);
  // Polls until `done` holds, and fails the test after `limit`.
  v1::Job Await(const std::string& name, const std::function<bool(const v1::Job&)>& done,
                absl::Duration limit = absl::Seconds(60));
  v1::Job AwaitState(const std::string& name, v1::Job::State state,
                     absl::Duration limit = absl::Seconds(60));
  v1::Job AwaitStep(const std::string& name, uint64_t step);
  // Until an attempt, 1 being the first, has failed.
  v1::Job AwaitFailure(const std::string& name, int attempt = 1);
  // Lets a job with the label fake-hold go on past the step that it names.
  void LetGo(const std::string& name);
  bool Eventually(const std::function<bool()>& done, absl::Duration limit = absl::Seconds(60));

  // What the coordinator has recorded of an ended job.
  std::vector<v1::StepReport> Steps(const std::string& name);
  std::vector<std::string> LogLines(const std::string& name);
  std::vector<AuditLine> Audit(const std::string& name) const;
  // The newest process that ran this rank.
  int PidOf(const std::string& name, uint32_t rank) const;
  // The loss after so many steps that nothing disturbed.
  static double UndisturbedLoss(uint64_t steps);
  // Every step from 1 on, once, in order, and the last loss as if nothing had happened. A report
  // that is on its way through a process dies with it, and its step is missing if a checkpoint
  // holds it: what is to be killed is held (fake-hold) at the step that is awaited.
  void ExpectUnbrokenRecord(const std::string& name, uint64_t steps);

  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::LogService::Stub> logs_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
  // Seconds of each flag; processes that start from then on get them.
  std::map<std::string, double> coordinator_flags_;
  std::map<std::string, double> worker_flags_;
  std::vector<std::string> allowed_paths_;  // of workers
  std::string run_as_;                      // of workers; empty: their own user
  std::string trainer_ = "fake_trainer";    // what workers start from then on
  // If set, what starts from then on speaks mutual TLS.
  std::unique_ptr<TestCertificates> certificates_;
  // The coordinator's access file; empty: no roles.
  std::string access_path_;
  // Whose certificate each worker has; "client" unless it is named here.
  std::map<std::string, std::string> certificate_of_;

 private:
  agent::Process StartProcess(const std::string& name, std::vector<std::string> command);
  std::string CheckpointFolder(const std::string& name) const {
    return dir_ + "/checkpoints/" + name;
  }

  const std::string bin_;  // where the programs are
  const std::string dir_;  // of this test; removed unless it failed
  const int port_;
  agent::LogPump output_;
  std::unique_ptr<agent::Process> coordinator_;
  std::map<std::string, agent::Process> workers_;
  std::vector<std::string> submitted_;
};

}  // namespace ringleader::faults
