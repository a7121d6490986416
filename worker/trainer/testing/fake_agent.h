// A worker for tests: starts trainer processes, plays its part of trainer_link.proto, and keeps
// what they report.
#pragma once

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/protocol_version.h"
#include "ringleader/v1/trainer_link.grpc.pb.h"

namespace ringleader::trainer::testing {

// What one rank said.
struct RankLog {
  std::optional<v1::TrainerHello> hello;
  std::string address;
  std::vector<v1::StepReport> steps;
  std::vector<v1::EvalReport> evals;
  std::vector<v1::CheckpointNotice> checkpoints;
  std::string model_path;
  std::vector<v1::Measurements> measurements;
  std::vector<v1::TrainerPulse> pulses;
  std::optional<v1::TrainerResult> result;
  bool gone = false;  // its stream has ended
  // Of its process, once Finish() has returned; -1: none was started, or a signal ended it.
  int exit_code = -1;
};

v1::AgentMessage LeaseUntil(absl::Time end);
v1::AgentMessage Stop(v1::StopTrainers::Mode mode);

// Thread-safe.
class FakeAgent : private v1::TrainerLink::Service {
 public:
  static constexpr uint64_t kToken = 77;

  // Listens on `socket`. Trainers get `spec`, `plan`, `threads` and `checkpoint_step`; the peers'
  // addresses as soon as all are ready.
  FakeAgent(const std::string& socket, const v1::JobSpec& spec, const v1::StepPlan& plan, int ranks,
            int threads = 1, uint64_t checkpoint_step = 0);
  // Kills the processes that still run.
  ~FakeAgent() override;

  // Sets what assignments say from here on; kProtocolVersion unless set.
  void set_protocol_version(uint32_t version) { protocol_version_ = version; }
  // Sets where trainers listen. Called before the first attaches.
  void set_listen_host(const std::string& host) { listen_host_ = host; }
  // Sets what ranks are told in place of each other's addresses. Called before the first attaches.
  void set_peer_address(const std::string& address) { peer_address_ = address; }
  // Sets what assignments say from here on (BootNow()); a day from now unless set, nullopt: none.
  void set_lease_end(std::optional<absl::Time> end);
  // Sets what assignments ask to be measured from here on; nothing unless set.
  void set_measure(const v1::MeasureRequest& measure);
  // Keeps streams open that trainers have closed. Called before the first attaches.
  void set_keeps_streams() { keeps_streams_ = true; }
  // Sets who submitted the job, of which processes that are spawned from here on are told; nobody
  // unless set. Jobs of two owners are two.
  void set_owner(const std::string& owner) { owner_ = owner; }
  // Sets the token under which trainers change the checkpoint folder; kToken unless set. To each
  // other and to this worker they show kToken all the same.
  void set_fencing_token(uint64_t token);

  // Starts one process per rank; its output goes to `log_directory`/rank-N.log. With several
  // `hosts`, NCCL takes as many equal parts of the ranks for machines of their own: they exchange
  // data through the network, and those of different hosts may share a GPU.
  void Spawn(const std::string& binary, const std::string& log_directory, int hosts = 1);
  // Starts that of one rank alone, on the host of this name if it has one.
  void SpawnRank(int rank, const std::string& binary, const std::string& log_directory,
                 const std::string& host = "");
  pid_t pid(int rank) const { return pids_.at(rank); }

  void Send(int rank, const v1::AgentMessage& message);
  void SendToAll(const v1::AgentMessage& message);

  // Waits until `condition` holds of the logs, by rank; false after `timeout`, or once
  // all ranks are gone.
  bool WaitFor(const std::function<bool(const std::vector<RankLog>&)>& condition,
               absl::Duration timeout = absl::Seconds(120));
  // Waits for every rank's stream to end and its process, if spawned, to be gone; kills those that
  // do not end in WaitFor's time. Returns the logs.
  std::vector<RankLog> Finish();

 private:
  using Stream = grpc::ServerReaderWriter<v1::AgentMessage, v1::TrainerMessage>;

  grpc::Status Attach(grpc::ServerContext* context, Stream* stream) override;
  void Record(int rank, const v1::TrainerMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string socket_;
  const v1::JobSpec spec_;
  const v1::StepPlan plan_;
  const int ranks_;
  const int threads_;
  const uint64_t checkpoint_step_;
  std::map<int, pid_t> pids_;

  absl::Mutex mutex_;
  std::vector<RankLog> logs_ ABSL_GUARDED_BY(mutex_);
  std::map<int, Stream*> streams_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;
  std::atomic<uint32_t> protocol_version_ = kProtocolVersion;
  std::string listen_host_ = "127.0.0.1";
  std::string peer_address_;  // empty: their own
  std::string owner_;
  bool keeps_streams_ = false;
  v1::MeasureRequest measure_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Time> lease_end_ ABSL_GUARDED_BY(mutex_);
  uint64_t fencing_token_ ABSL_GUARDED_BY(mutex_) = kToken;
};

}  // namespace ringleader::trainer::testing
