#include "worker/trainer/testing/fake_agent.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"

namespace ringleader::trainer::testing {

v1::AgentMessage LeaseUntil(absl::Time end) {
  v1::AgentMessage message;
  message.mutable_lease()->set_end_boot_nanoseconds(absl::ToUnixNanos(end));
  return message;
}

v1::AgentMessage Stop(v1::StopTrainers::Mode mode) {
  v1::AgentMessage message;
  message.mutable_stop()->set_mode(mode);
  message.mutable_stop()->set_reason("the test says so");
  return message;
}

FakeAgent::FakeAgent(const std::string& socket, const v1::JobSpec& spec, const v1::StepPlan& plan,
                     int ranks, int threads, uint64_t checkpoint_step)
    : socket_(socket),
      spec_(spec),
      plan_(plan),
      ranks_(ranks),
      threads_(threads),
      checkpoint_step_(checkpoint_step),
      logs_(ranks) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", socket), grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) throw std::runtime_error("cannot listen on " + socket);
  set_lease_end(BootNow() + absl::Hours(24));
}

void FakeAgent::set_lease_end(std::optional<absl::Time> end) {
  absl::MutexLock lock(&mutex_);
  lease_end_ = end;
}

void FakeAgent::set_fencing_token(uint64_t token) {
  absl::MutexLock lock(&mutex_);
  fencing_token_ = token;
}

void FakeAgent::set_measure(const v1::MeasureRequest& measure) {
  absl::MutexLock lock(&mutex_);
  measure_ = measure;
}

FakeAgent::~FakeAgent() {
  for (const auto& [rank, pid] : pids_) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  server_->Shutdown(std::chrono::system_clock::now());
}

void FakeAgent::Spawn(const std::string& binary, const std::string& log_directory, int hosts) {
  for (int rank = 0; rank < ranks_; ++rank) {
    SpawnRank(rank, binary, log_directory,
              hosts > 1 ? absl::StrCat("host-", rank * hosts / ranks_) : "");
  }
}

void FakeAgent::SpawnRank(int rank, const std::string& binary, const std::string& log_directory,
                          const std::string& host) {
  std::string host_variable = absl::StrCat("NCCL_HOSTID=", host);
  std::vector<char*> environment;
  if (!host.empty()) environment.push_back(host_variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  std::vector<std::string> arguments = {
      binary, "--socket", socket_, "--rank", absl::StrCat(rank), "--token", absl::StrCat(kToken)};
  if (!owner_.empty()) arguments.push_back("--owner=" + owner_);
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments) {
    pointers.push_back(const_cast<char*>(argument.c_str()));
  }
  pointers.push_back(nullptr);
  const std::string log = absl::StrCat(log_directory, "/rank-", rank, ".log");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, binary.c_str(), &actions, nullptr, pointers.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + binary);
  pids_[rank] = pid;
}

void FakeAgent::Send(int rank, const v1::AgentMessage& message) {
  absl::MutexLock lock(&mutex_);
  if (const auto stream = streams_.find(rank); stream != streams_.end()) {
    stream->second->Write(message);
  }
}

void FakeAgent::SendToAll(const v1::AgentMessage& message) {
  for (int rank = 0; rank < ranks_; ++rank) Send(rank, message);
}

bool FakeAgent::WaitFor(const std::function<bool(const std::vector<RankLog>&)>& condition,
                        absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return condition(logs_) ||
           std::all_of(logs_.begin(), logs_.end(), [](const RankLog& log) { return log.gone; });
  };
  mutex_.AwaitWithTimeout(absl::Condition(&settled), timeout);
  return condition(logs_);
}

std::vector<RankLog> FakeAgent::Finish() {
  const bool ended = WaitFor([](const std::vector<RankLog>& logs) {
    return std::all_of(logs.begin(), logs.end(), [](const RankLog& log) { return log.gone; });
  });
  std::map<int, int> statuses;
  for (const auto& [rank, pid] : pids_) {
    if (!ended) kill(pid, SIGKILL);
    waitpid(pid, &statuses[rank], 0);
  }
  pids_.clear();
  absl::MutexLock lock(&mutex_);
  for (const auto& [rank, status] : statuses) {
    logs_[rank].exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  return logs_;
}

grpc::Status FakeAgent::Attach(grpc::ServerContext* context, Stream* stream) {
  v1::TrainerMessage message;
  if (!stream->Read(&message) || !message.has_hello() ||
      message.hello().fencing_token() != kToken ||
      message.hello().rank() >= static_cast<uint32_t>(ranks_)) {
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "not one of this test's trainers");
  }
  const int rank = static_cast<int>(message.hello().rank());
  v1::AgentMessage reply;
  v1::TrainerAssignment* assignment = reply.mutable_assignment();
  assignment->set_job(spec_.name());
  assignment->set_attempt(1);
  *assignment->mutable_spec() = spec_;
  *assignment->mutable_plan() = plan_;
  assignment->set_rank(rank);
  assignment->set_world_size(ranks_);
  assignment->set_ranks_per_node(ranks_);
  assignment->set_listen_host(listen_host_);
  assignment->set_threads(threads_);
  assignment->set_checkpoint_step(checkpoint_step_);
  assignment->set_protocol_version(protocol_version_);
  {
    absl::MutexLock lock(&mutex_);
    assignment->set_job_uid(absl::StrCat(spec_.name(), "-1", owner_));
    assignment->set_fencing_token(fencing_token_);
    *assignment->mutable_measure() = measure_;
    if (lease_end_) *assignment->mutable_lease() = LeaseUntil(*lease_end_).lease();
    logs_[rank].hello = message.hello();
    streams_[rank] = stream;
    stream->Write(reply);
  }
  while (stream->Read(&message)) {
    absl::MutexLock lock(&mutex_);
    Record(rank, message);
  }
  while (keeps_streams_ && !context->IsCancelled()) absl::SleepFor(absl::Milliseconds(10));
  absl::MutexLock lock(&mutex_);
  streams_.erase(rank);
  logs_[rank].gone = true;
  return grpc::Status::OK;
}

void FakeAgent::Record(int rank, const v1::TrainerMessage& message) {
  RankLog& log = logs_[rank];
  switch (message.body_case()) {
    case v1::TrainerMessage::kReady: {
      log.address = message.ready().address();
      v1::AgentMessage connect;
      for (const RankLog& other : logs_) {
        if (other.address.empty()) return;
        connect.mutable_connect()->add_addresses(peer_address_.empty() ? other.address
                                                                       : peer_address_);
      }
      for (const auto& [peer, stream] : streams_) stream->Write(connect);
      break;
    }
    case v1::TrainerMessage::kStep:
      log.steps.push_back(message.step());
      break;
    case v1::TrainerMessage::kEval:
      log.evals.push_back(message.eval());
      break;
    case v1::TrainerMessage::kCheckpoint:
      log.checkpoints.push_back(message.checkpoint());
      break;
    case v1::TrainerMessage::kModelExported:
      log.model_path = message.model_exported().path();
      break;
    case v1::TrainerMessage::kMeasurements:
      log.measurements.push_back(message.measurements());
      break;
    case v1::TrainerMessage::kResult:
      log.result = message.result();
      break;
    case v1::TrainerMessage::kPulse:
      log.pulses.push_back(message.pulse());
      break;
    default:
      break;
  }
}

}  // namespace ringleader::trainer::testing
