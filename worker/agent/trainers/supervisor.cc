#include "worker/agent/trainers/supervisor.h"

#include <signal.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/net/token.h"
#include "base/process/trainer_secret.h"
#include "base/status_macros.h"
#include "proto/timestamps.h"

namespace ringleader::agent {
namespace {

// How long to read what a trainer wrote before it died, should something hold its pipes open.
constexpr absl::Duration kDrainTime = absl::Seconds(2);
// Commands whose repetition is ignored; the coordinator repeats only what is unacknowledged.
constexpr size_t kCommandsRemembered = 10'000;

std::vector<std::string> TlsFlags(const TlsOptions& tls) {
  std::vector<std::string> flags;
  if (tls.enabled()) {
    flags = {"--tls-cert", tls.cert_path, "--tls-key", tls.key_path, "--tls-ca", tls.ca_path};
  }
  if (tls.insecure) flags.push_back("--insecure");
  return flags;
}

}  // namespace

Supervisor::Supervisor(const SupervisorOptions& options, const DataDir* data_dir,
                       EventBuffer* events, LogPump* logs, WorkerMetrics* metrics, Post post)
    : options_(options),
      data_dir_(data_dir),
      events_(events),
      logs_(logs),
      metrics_(metrics),
      post_(std::move(post)),
      path_checks_(options.allowed_paths, post_) {}

Supervisor::~Supervisor() = default;

Supervisor::Attempt* Supervisor::Find(uint64_t token) {
  const auto found = attempts_.find(token);
  return found == attempts_.end() ? nullptr : &found->second;
}

std::pair<Supervisor::Attempt*, Trainer*> Supervisor::Find(const TrainerConnection* connection) {
  for (auto& [token, attempt] : attempts_) {
    for (Trainer& trainer : attempt.trainers) {
      if (trainer.connection.get() == connection) return {&attempt, &trainer};
    }
  }
  return {nullptr, nullptr};
}

// --- Commands.

void Supervisor::OnCommand(const v1::Command& command, absl::Time now) {
  now_ = now;
  const auto held = held_.find(command.job());
  if (held != held_.end()) return held->second.push_back(command);
  Handle(command);
}

void Supervisor::Handle(const v1::Command& command) {
  // It is sent again because no acknowledgement of it is known: that may be on its way, or a
  // coordinator that was put back from a backup has forgotten it.
  if (const auto seen = commands_seen_.find(command.command_id()); seen != commands_seen_.end()) {
    return Acknowledge(seen->second);
  }
  absl::Status status = Fence(command);
  if (status.ok() && command.has_start() && path_checks_.any() &&
      Find(command.fencing_token()) == nullptr) {
    status = MayStart(command);
    if (status.ok()) {
      held_[command.job()].push_back(command);
      return path_checks_.Begin(command.job(), command.start(),
                                [this, job = command.job()](const absl::Status& allowed) {
                                  OnPathsChecked(job, allowed);
                                });
    }
  }
  Answer(command, status.ok() ? Apply(command) : status);
}

void Supervisor::OnPathsChecked(const std::string& job, const absl::Status& allowed) {
  const auto held = held_.extract(job);
  const std::deque<v1::Command>& commands = held.mapped();
  // It may have become too late for it meanwhile: that is for Apply() to see.
  Answer(commands[0], allowed.ok() ? Apply(commands[0]) : allowed);
  // One of these may be another start, for which the others wait again.
  for (size_t i = 1; i < commands.size(); ++i) OnCommand(commands[i], now_);
}

void Supervisor::Answer(const v1::Command& command, const absl::Status& status) {
  const uint64_t id = command.command_id();
  if (!status.ok()) {
    spdlog::warn("refused a command for attempt {} of jobs/{}: {}", command.attempt(),
                 command.job(), std::string(status.message()));
  }
  UpdateRunning();
  if (id == 0) return;
  v1::CommandAck& ack = commands_seen_[id];
  ack.set_command_id(id);
  ack.set_accepted(status.ok());
  ack.set_message(std::string(status.message()));
  // Nothing is wrong with the command: this worker has no room for it, or leaves.
  ack.set_later(absl::IsResourceExhausted(status) || absl::IsUnavailable(status));
  Acknowledge(ack);
  if (commands_seen_.size() > kCommandsRemembered) commands_seen_.erase(commands_seen_.begin());
}

void Supervisor::Acknowledge(const v1::CommandAck& ack) {
  v1::WorkerMessage message;
  *message.mutable_command_ack() = ack;
  events_->Push(std::move(message));
}

absl::Status Supervisor::Fence(const v1::Command& command) {
  uint64_t& highest = highest_token_[command.job()];
  if (command.fencing_token() < highest) {
    return absl::FailedPreconditionError(
        absl::StrFormat("fencing token %d is older than %d, which jobs/%s has shown here",
                        command.fencing_token(), highest, command.job()));
  }
  if (command.fencing_token() > highest) {
    highest = command.fencing_token();
    for (auto& [token, attempt] : attempts_) {
      if (attempt.start.job() != command.job()) continue;
      for (Trainer& trainer : attempt.trainers) Kill(trainer, "a newer attempt took its place");
    }
  }
  return absl::OkStatus();
}

absl::Status Supervisor::Apply(const v1::Command& command) {
  Attempt* const attempt = Find(command.fencing_token());
  v1::AgentMessage message;
  switch (command.kind_case()) {
    case v1::Command::kStart:
      return Start(command);
    case v1::Command::kStop:
      if (command.stop().mode() != v1::StopTrainers::CHECKPOINT &&
          command.stop().mode() != v1::StopTrainers::ABORT) {
        return absl::InvalidArgumentError(
            absl::StrFormat("stop.mode %d is none that this worker knows",
                            static_cast<int>(command.stop().mode())));
      }
      // Where there is no attempt, here and below, it has ended, and its exits tell that.
      if (attempt != nullptr) Stop(*attempt, command.stop(), now_);
      return absl::OkStatus();
    case v1::Command::kConnect:
      *message.mutable_connect() = command.connect();
      if (attempt != nullptr) Forward(*attempt, message);
      return absl::OkStatus();
    case v1::Command::kPlan:
      *message.mutable_plan() = command.plan();
      break;
    case v1::Command::kProfile:
      *message.mutable_profile() = command.profile();
      break;
    case v1::Command::KIND_NOT_SET:
      return absl::InvalidArgumentError("a command of no kind that this worker knows");
  }
  if (attempt == nullptr) return absl::OkStatus();
  for (Trainer& trainer : attempt->trainers) {
    if (trainer.rank == 0 && trainer.connection) trainer.connection->Send(message);
  }
  return absl::OkStatus();
}

absl::Status Supervisor::MayStart(const v1::Command& command) const {
  if (!refusing_.empty()) return absl::UnavailableError(refusing_);
  const v1::StartTrainers& start = command.start();
  RETURN_IF_ERROR(options_.run_as.UserOf(start.owner()).status());
  // Slot by slot, as the coordinator counts: a trainer whose end was reported holds none, whatever
  // its peers do. What an older attempt of the job holds is free by the time this one is spawned.
  uint32_t taken = 0;
  for (const auto& [token, attempt] : attempts_) {
    if (attempt.start.job() == command.job()) continue;
    taken += static_cast<uint32_t>(
        std::count_if(attempt.trainers.begin(), attempt.trainers.end(),
                      [](const Trainer& trainer) { return !trainer.reported; }));
  }
  uint32_t slots = 0;
  for (uint32_t slot = 0; slot < options_.slots; ++slot) slots += FaultOfSlot(slot).empty();
  if (start.trainers() + taken > slots) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%d of %d trainers are taken%s, and %d were asked for", taken, slots,
        slots == options_.slots ? "" : " (a GPU is out of order)", start.trainers()));
  }
  return absl::OkStatus();
}

absl::Status Supervisor::Start(const v1::Command& command) {
  if (Find(command.fencing_token()) != nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(MayStart(command));
  const v1::StartTrainers& start = command.start();
  Attempt& attempt = attempts_[command.fencing_token()];
  attempt.start = command;
  for (uint32_t i = 0; i < start.trainers(); ++i) {
    attempt.trainers.push_back({.rank = start.first_rank() + i});
  }
  if (MaySpawn(attempt)) Spawn(attempt);
  return absl::OkStatus();
}

void Supervisor::Stop(Attempt& attempt, const v1::StopTrainers& stop, absl::Time now) {
  const bool abort = stop.mode() == v1::StopTrainers::ABORT;
  attempt.stop = stop;
  const absl::Time kill_at = now + absl::Milliseconds(stop.grace_milliseconds());
  attempt.kill_at = abort ? std::min(attempt.kill_at, kill_at) : kill_at;
  v1::AgentMessage message;
  *message.mutable_stop() = stop;
  Forward(attempt, message);
  for (Trainer& trainer : attempt.trainers) {
    // One that has ended already may be the reason for the abort, and is not a casualty of it.
    Reap(trainer, now);
    if (trainer.exit) continue;
    trainer.told_to_abort = trainer.told_to_abort || abort;
    // A trainer that has not attached has nothing to save, and cannot be told to leave.
    if (abort && !trainer.connection) Kill(trainer, stop.reason());
  }
}

void Supervisor::Forward(Attempt& attempt, const v1::AgentMessage& message) {
  for (Trainer& trainer : attempt.trainers) {
    if (trainer.connection) trainer.connection->Send(message);
  }
}

void Supervisor::Kill(Trainer& trainer, const std::string& reason) {
  if (trainer.exit || trainer.reported) return;
  if (trainer.killed_because.empty()) trainer.killed_because = reason;
  if (trainer.process) trainer.process->Signal(SIGKILL);
}

void Supervisor::StopAll(const std::string& reason, absl::Duration grace, absl::Time now) {
  v1::StopTrainers stop;
  stop.set_mode(v1::StopTrainers::CHECKPOINT);
  stop.set_grace_milliseconds(static_cast<uint32_t>(absl::ToInt64Milliseconds(grace)));
  stop.set_reason(reason);
  for (auto& [token, attempt] : attempts_) {
    if (!attempt.stop) Stop(attempt, stop, now);
  }
}

void Supervisor::KillAll(const std::string& reason) {
  for (auto& [token, attempt] : attempts_) {
    for (Trainer& trainer : attempt.trainers) Kill(trainer, reason);
  }
}

// --- Starting.

bool Supervisor::MaySpawn(const Attempt& attempt) const {
  return std::none_of(attempts_.begin(), attempts_.end(), [&](const auto& entry) {
    return entry.second.start.job() == attempt.start.job() &&
           entry.first < attempt.start.fencing_token();
  });
}

uint32_t Supervisor::FreeSlot() const {
  std::set<uint32_t> taken;
  for (const auto& [token, attempt] : attempts_) {
    for (const Trainer& trainer : attempt.trainers) {
      if (trainer.process) taken.insert(trainer.slot);
    }
  }
  uint32_t slot = 0;
  while (taken.contains(slot) || !FaultOfSlot(slot).empty()) ++slot;
  return slot;
}

std::string Supervisor::FaultOfSlot(uint32_t slot) const {
  if (slot >= options_.gpus.size()) return "";
  const auto fault = gpu_faults_.find(options_.gpus[slot]);
  return fault == gpu_faults_.end() ? "" : fault->second;
}

void Supervisor::Spawn(Attempt& attempt) {
  attempt.spawned = true;
  for (Trainer& trainer : attempt.trainers) {
    if (!trainer.killed_because.empty()) continue;
    const absl::Status status = SpawnTrainer(attempt, trainer);
    if (!status.ok()) trainer.killed_because = std::string(status.message());
  }
  spdlog::info("attempt {} of jobs/{}: started {} trainers from rank {} (token {})",
               attempt.start.attempt(), attempt.start.job(), attempt.trainers.size(),
               attempt.start.start().first_rank(), attempt.start.fencing_token());
}

absl::Status Supervisor::SpawnTrainer(Attempt& attempt, Trainer& trainer) {
  const v1::Command& start = attempt.start;
  ASSIGN_OR_RETURN(const std::optional<LocalUser> user,
                   options_.run_as.UserOf(start.start().owner()));
  ASSIGN_OR_RETURN(const std::string directory,
                   data_dir_->TrainerDirectory(start.job(), start.attempt(), trainer.rank, user));
  trainer.slot = FreeSlot();
  ProcessOptions options = {
      .command = {options_.trainer_binary, "--socket", data_dir_->socket_path(), "--rank",
                  absl::StrCat(trainer.rank), "--token", absl::StrCat(start.fencing_token())},
      .directory = directory,
      .inherited_fds = {data_dir_->lock_fd()},
      .user = user};
  if (user.has_value()) {
    trainer.secret = NewToken();
    options.environment = {{"HOME", user->home},
                           {"USER", user->name},
                           {"LOGNAME", user->name},
                           {kTrainerSecretVariable, trainer.secret}};
  }
  for (const std::string& flag : TlsFlags(options_.tls)) options.command.push_back(flag);
  if (!start.start().owner().empty()) {
    options.command.push_back("--owner=" + start.start().owner());
  }
  if (options_.life_fd >= 0) options.inherited_fds.push_back(options_.life_fd);
  if (start.start().spec().resources().engine() == v1::ResourcesSpec::CUDA) {
    options.environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID";
    if (trainer.slot >= options_.gpus.size()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "resources.engine is cuda and this node has %d GPUs for %d trainers; start its worker "
          "with --trainers %d",
          options_.gpus.size(), options_.slots, options_.gpus.size()));
    }
    options.environment["CUDA_VISIBLE_DEVICES"] = options_.gpus[trainer.slot];
    // A hardware queue for every stream: transfers must not wait for unrelated kernels.
    options.environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32";
  }
  ASSIGN_OR_RETURN(Process process, Process::Start(options));
  trainer.open_pipes = 2;
  const int out = process.TakeStdout();
  const int err = process.TakeStderr();
  trainer.process.emplace(std::move(process));
  ReadOutput(attempt, trainer, out, false);
  ReadOutput(attempt, trainer, err, true);
  return absl::OkStatus();
}

void Supervisor::ReadOutput(const Attempt& attempt, const Trainer& trainer, int fd,
                            bool is_stderr) {
  logs_->Add(fd, [this, event = EventOf(attempt), rank = trainer.rank, is_stderr](
                     std::vector<std::string> lines, bool end) {
    const absl::Time now = absl::Now();
    std::vector<v1::LogLine> stamped;
    for (const std::string& text : lines) {
      v1::LogLine& line = stamped.emplace_back();
      line.set_rank(static_cast<int32_t>(rank));
      SetTime(now, line.mutable_time());
      line.set_text(text);
      line.set_is_stderr(is_stderr);
    }
    events_->PushLogs(event, std::move(stamped));
    if (!end && !is_stderr) return;
    const auto words = std::find_if(lines.rbegin(), lines.rend(),
                                    [](const std::string& text) { return !text.empty(); });
    post_([this, token = event.fencing_token(), rank, end, is_stderr, now,
           last = words == lines.rend() ? std::string() : *words] {
      Attempt* const attempt = Find(token);
      if (attempt == nullptr) return;
      for (Trainer& trainer : attempt->trainers) {
        if (trainer.rank != rank) continue;
        if (is_stderr && !last.empty()) {
          trainer.last_error_line = last;
          trainer.last_error_time = now;
        }
        if (end) --trainer.open_pipes;
      }
    });
  });
}

// --- The passing of time.

void Supervisor::Tick(absl::Time now) {
  now_ = now;
  bool changed = false;
  for (auto& [token, attempt] : attempts_) {
    if (!attempt.spawned && MaySpawn(attempt)) Spawn(attempt);
    if (attempt.spawned && attempt.stop && now >= attempt.kill_at) {
      for (Trainer& trainer : attempt.trainers) {
        Kill(trainer, absl::StrFormat("did not leave within %s of being told to (%s)",
                                      absl::FormatDuration(
                                          absl::Milliseconds(attempt.stop->grace_milliseconds())),
                                      attempt.stop->reason()));
      }
    }
    if (!attempt.stop) CheckHang(attempt, now);
    for (Trainer& trainer : attempt.trainers) {
      if (trainer.reported) continue;
      Reap(trainer, now);
      // Never spawned: nothing to wait for.
      const bool never_ran = !trainer.process && !trainer.exit && !trainer.killed_because.empty();
      const bool drained = trainer.exit && ((trainer.open_pipes <= 0 && !trainer.connection) ||
                                            now - trainer.exited_at > kDrainTime);
      if (!never_ran && !drained) continue;
      Report(attempt, trainer);
      changed = true;
    }
  }
  if (!changed) return;
  for (auto it = attempts_.begin(); it != attempts_.end();) {
    const bool over = std::all_of(it->second.trainers.begin(), it->second.trainers.end(),
                                  [](const Trainer& trainer) { return trainer.reported; });
    if (over) data_dir_->RemoveEmpty(it->second.start.job(), it->second.start.attempt());
    it = over ? attempts_.erase(it) : std::next(it);
  }
  UpdateRunning();
}

void Supervisor::StoodStill(absl::Duration time) {
  for (auto& [token, attempt] : attempts_) {
    for (Trainer& trainer : attempt.trainers) {
      trainer.last_pulse += time;
      trainer.last_progress += time;
    }
  }
}

void Supervisor::Reap(Trainer& trainer, absl::Time now) {
  if (!trainer.process || trainer.exit) return;
  trainer.exit = trainer.process->Poll();
  if (!trainer.exit) return;
  if (trainer.exit->signal == SIGKILL && trainer.killed_because.empty() &&
      BootNow() >= trainer.lease_end) {
    trainer.killed_because =
        "ended with its lease: for so long its worker stood still, or was out of contact with the "
        "coordinator, which may have replaced it";
  }
  trainer.process.reset();
  trainer.exited_at = now;
}

// When one rank of a ring hangs the others wait for it. The one that stopped first is killed, and
// named; its peers then leave by themselves.
void Supervisor::CheckHang(Attempt& attempt, absl::Time now) {
  Trainer* first = nullptr;
  std::string why;
  for (Trainer& trainer : attempt.trainers) {
    // A trainer that hung up and lives on is judged, too; one that never attached cannot be.
    if (trainer.exit || !trainer.killed_because.empty()) continue;
    if (now - trainer.last_pulse > options_.pulse_timeout) {
      first = &trainer;
      why = absl::StrFormat("no sign of life for %s, last seen in step %d (%s): killed",
                            absl::FormatDuration(options_.pulse_timeout), trainer.step,
                            trainer.phase);
      break;
    }
    if (now - trainer.last_progress > options_.hang_timeout &&
        (first == nullptr || std::pair(trainer.step, trainer.last_progress) <
                                 std::pair(first->step, first->last_progress))) {
      first = &trainer;
      why =
          absl::StrFormat("no progress for %s in step %d (%s): killed",
                          absl::FormatDuration(options_.hang_timeout), trainer.step, trainer.phase);
    }
  }
  if (first == nullptr) return;
  spdlog::warn("rank {} of jobs/{}: {}", first->rank, attempt.start.job(), why);
  Kill(*first, why);
  // The others waited for it, and have as long again to find that it is gone.
  for (Trainer& trainer : attempt.trainers) {
    trainer.last_progress = std::max(trainer.last_progress, now);
  }
}

}  // namespace ringleader::agent
