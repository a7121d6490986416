// Starts, watches and stops the trainers of this node, as commands say.
//
// A command carries its attempt's fencing token. One with a lower token than the job has shown here
// is refused; a higher one kills what runs under older tokens, and what it starts waits until those
// are gone.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/net/tls.h"
#include "ringleader/v1/worker_control.pb.h"
#include "worker/agent/link/event_buffer.h"
#include "worker/agent/node/data_dir.h"
#include "worker/agent/process/log_pump.h"
#include "worker/agent/trainers/path_checks.h"
#include "worker/agent/trainers/trainer_process.h"
#include "worker/agent/trainers/worker_metrics.h"

namespace ringleader::agent {

struct SupervisorOptions {
  std::string trainer_binary;
  uint32_t slots = 1;
  uint32_t cores = 1;
  std::vector<std::string> gpus;  // by slot, as CUDA_VISIBLE_DEVICES takes them
  std::string listen_host;        // where trainers listen for their peers
  TlsOptions tls;                 // between trainers; they run in folders of their own: whole paths
  std::vector<std::string> allowed_paths =
      {};  // folders below which jobs' paths lie; none: anywhere
  RunAs run_as = {};
  int life_fd = -1;  // that trainers keep open while they live (Witness); -1: none
  // A trainer that sends no pulse for so long is stuck as a whole; one whose pulses show the same
  // step, phase and progress within it for so long hangs in it.
  absl::Duration pulse_timeout = absl::Seconds(30);
  absl::Duration hang_timeout = absl::Minutes(10);
};

// Its methods are in supervisor.cc and, for what trainers say, supervisor_link.cc. Everything but
// Running() belongs to one thread, which must live as long as the trainers: they die
// with it. Times are monotonic.
class Supervisor {
 public:
  // `post` runs a function on that thread, later, from any thread. All must outlive the supervisor.
  using Post = std::function<void(std::function<void()>)>;
  Supervisor(const SupervisorOptions& options, const DataDir* data_dir, EventBuffer* events,
             LogPump* logs, WorkerMetrics* metrics, Post post);
  ~Supervisor();  // kills what runs

  // Answers with a CommandAck, later where files have to be looked at first. Commands seen before
  // are ignored. Those of one job are carried out in the order in which they came.
  void OnCommand(const v1::Command& command, absl::Time now);
  void OnTrainerMessage(const std::shared_ptr<TrainerConnection>& connection,
                        v1::TrainerMessage message, absl::Time now);
  void OnTrainerGone(const std::shared_ptr<TrainerConnection>& connection);

  // Reaps, kills what is overdue, reports what ended, starts what had to wait.
  void Tick(absl::Time now);
  // This worker has not run for so long, as its machine was paused, say, and has not heard what
  // trainers said, if they could: the time counts for no trainer's silence. To be called before the
  // Tick that follows.
  void StoodStill(absl::Duration time);

  // Until when trainers may live, in boot time: told to those that run, and to each that attaches.
  void SetLease(absl::Time end);

  // Tells all trainers to write a checkpoint and leave. Starts are refused from then on.
  void StopAll(const std::string& reason, absl::Duration grace, absl::Time now);
  void RefuseStarts(const std::string& why) { refusing_ = why; }
  void KillAll(const std::string& reason);
  // {UUID, why} of the GPUs that take no trainers from now on: neither do their slots. What runs
  // there goes on.
  void SetFaults(std::map<std::string, std::string> faults) { gpu_faults_ = std::move(faults); }

  // Nothing runs, and no start is still to be answered.
  bool idle() const { return attempts_.empty() && held_.empty(); }
  // What is alive. Thread-safe.
  std::vector<v1::RunningAttempt> Running() const;

 private:
  struct Attempt {
    v1::Command start;
    std::vector<Trainer> trainers;
    bool spawned = false;
    std::optional<v1::StopTrainers> stop;
    absl::Time kill_at = absl::InfiniteFuture();
  };

  void Handle(const v1::Command& command);
  void OnPathsChecked(const std::string& job, const absl::Status& allowed);
  // Refuses an old token. A new one ends what runs under older ones.
  absl::Status Fence(const v1::Command& command);
  absl::Status Apply(const v1::Command& command);
  void Answer(const v1::Command& command, const absl::Status& status);
  void Acknowledge(const v1::CommandAck& ack);
  // Why nothing may be started, but for the job's paths.
  absl::Status MayStart(const v1::Command& command) const;
  absl::Status Start(const v1::Command& command);
  void Stop(Attempt& attempt, const v1::StopTrainers& stop, absl::Time now);
  void Forward(Attempt& attempt, const v1::AgentMessage& message);
  void Kill(Trainer& trainer, const std::string& reason);

  bool MaySpawn(const Attempt& attempt) const;
  void Spawn(Attempt& attempt);
  absl::Status SpawnTrainer(Attempt& attempt, Trainer& trainer);
  void ReadOutput(const Attempt& attempt, const Trainer& trainer, int fd, bool is_stderr);
  uint32_t FreeSlot() const;
  // Why the slot takes no trainer; empty: it takes one.
  std::string FaultOfSlot(uint32_t slot) const;

  void OnHello(const std::shared_ptr<TrainerConnection>& connection, const v1::TrainerHello& hello,
               absl::Time now);
  void OnPulse(Trainer& trainer, const v1::TrainerPulse& pulse, absl::Time now);
  v1::AgentMessage Assignment(const Attempt& attempt, const Trainer& trainer) const;
  v1::TrainerLease Lease() const;

  void CheckHang(Attempt& attempt, absl::Time now);
  void Reap(Trainer& trainer, absl::Time now);
  void Report(const Attempt& attempt, Trainer& trainer);
  v1::AttemptEvent EventOf(const Attempt& attempt) const;
  void Push(v1::AttemptEvent event);
  void UpdateRunning();

  Attempt* Find(uint64_t token);
  // The attempt and trainer of a connection; nulls if it is none of ours.
  std::pair<Attempt*, Trainer*> Find(const TrainerConnection* connection);

  const SupervisorOptions options_;
  const DataDir* const data_dir_;
  EventBuffer* const events_;
  LogPump* const logs_;
  WorkerMetrics* const metrics_;
  const Post post_;

  std::map<uint64_t, Attempt> attempts_;              // by token
  std::map<std::string, uint64_t> highest_token_;     // by job
  std::map<uint64_t, v1::CommandAck> commands_seen_;  // and what was answered
  // By job: a start that waits until its paths have been checked, and what came after it.
  std::map<std::string, std::deque<v1::Command>> held_;
  absl::Time now_ = absl::InfinitePast();  // of the newest command or tick
  std::string refusing_;                   // why starts are refused; empty: they are not
  std::map<std::string, std::string> gpu_faults_;
  absl::Time lease_end_ = absl::InfiniteFuture();  // boot time
  PathChecks path_checks_;

  mutable absl::Mutex mutex_;
  std::vector<v1::RunningAttempt> running_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringleader::agent
