// The worker daemon: its session with the coordinator on one side, its trainers on the other, and
// one thread between them that decides.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/net/connections.h"
#include "ringleader/v1/node.pb.h"
#include "worker/agent/link/coordinator_link.h"
#include "worker/agent/link/event_buffer.h"
#include "worker/agent/node/data_dir.h"
#include "worker/agent/process/log_pump.h"
#include "worker/agent/trainers/supervisor.h"
#include "worker/agent/trainers/trainer_link_service.h"
#include "worker/agent/trainers/worker_metrics.h"

namespace ringleader::agent {

struct WorkerOptions {
  std::string node;         // id, without "nodes/"
  std::string incarnation;  // DataDir::DrawIncarnation()
  v1::NodeInventory inventory;
  SupervisorOptions supervisor;
  // {UUID, why} of the GPUs that must take no trainers now; unset: there is nobody to say.
  std::function<std::map<std::string, std::string>()> gpu_faults = {};
  size_t max_log_buffer_bytes = size_t{32} << 20;
  // The attempts here have so long after SIGTERM to write a checkpoint and move elsewhere.
  absl::Duration drain_timeout = absl::Seconds(150);
};

class Worker : public TrainerListener {
 public:
  // `metrics` must outlive the worker. Fails when trainers cannot dial in.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const WorkerOptions& options,
                                                        DataDir data_dir,
                                                        std::shared_ptr<grpc::Channel> channel,
                                                        WorkerMetrics* metrics);
  ~Worker() override;

  // Works until a drain that was asked for is over, or until the coordinator refuses this worker
  // for good, and returns why. Trainers live as long as the calling thread.
  absl::Status Run();
  // Checkpoint, then stop: the coordinator is told, its attempts here move off, and Run() returns.
  // Thread-safe.
  void Drain(const std::string& reason);

  void OnTrainerMessage(std::shared_ptr<TrainerConnection> connection,
                        v1::TrainerMessage message) override;
  void OnTrainerGone(std::shared_ptr<TrainerConnection> connection) override;

 private:
  Worker(const WorkerOptions& options, DataDir data_dir, std::shared_ptr<grpc::Channel> channel,
         WorkerMetrics* metrics);

  void Post(std::function<void()> task);
  v1::WorkerHello Hello() const ABSL_LOCKS_EXCLUDED(mutex_);
  void SendDrainRequest();
  void CheckFence();
  void CheckGpus();
  // Returns whether the worker may go.
  bool CheckDrain(absl::Time now);
  void UpdateMetrics();

  const WorkerOptions options_;
  DataDir data_dir_;
  WorkerMetrics* const metrics_;
  EventBuffer events_;

  mutable absl::Mutex mutex_;
  std::vector<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  v1::NodeInventory inventory_ ABSL_GUARDED_BY(mutex_);  // as it is now

  // Touched by Run() only.
  bool draining_ = false;
  std::string drain_reason_;
  absl::Time drain_deadline_;
  absl::Time farewell_end_ = absl::InfiniteFuture();  // draining, and all trainers have ended
  absl::Time alone_since_ = absl::InfiniteFuture();   // draining, and no coordinator to ask
  absl::Status refused_;
  std::map<std::string, std::string> gpu_faults_;

  Supervisor supervisor_;
  // Their threads call the supervisor and post tasks: they end before it does.
  LogPump logs_;
  TrainerLinkService trainer_link_;
  std::unique_ptr<Connections> connections_;  // of trainers; they go to the server
  std::unique_ptr<grpc::Server> server_;
  CoordinatorLink link_;
};

}  // namespace ringleader::agent
