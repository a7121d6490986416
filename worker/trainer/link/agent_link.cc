#include "worker/trainer/link/agent_link.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/boot_clock.h"
#include "base/process/progress.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"
#include "jobspec/values/attention_spec.h"
#include "ringleader/v1/trainer_link.grpc.pb.h"
#include "spdlog/spdlog.h"
#include "worker/trainer/link/assignment.h"
#include "worker/trainer/link/telemetry.h"

namespace ringleader::trainer {
namespace {

constexpr absl::Duration kPulseInterval = absl::Seconds(1);
constexpr absl::Duration kCloseTimeout = absl::Seconds(2);

v1::TrainerExited::Outcome OutcomeOf(Result::Kind kind) {
  switch (kind) {
    case Result::Kind::kCompleted:
      return v1::TrainerExited::COMPLETED;
    case Result::Kind::kStopped:
      return v1::TrainerExited::STOPPED;
    case Result::Kind::kFailed:
      return v1::TrainerExited::FAILED;
  }
  return v1::TrainerExited::OUTCOME_UNSPECIFIED;
}

absl::Time ToBootTime(const v1::TrainerLease& lease) {
  return absl::FromUnixNanos(lease.end_boot_nanoseconds());
}

}  // namespace

class AgentLink::Impl {
 public:
  Impl(const AgentLinkOptions& options, LeaveCallback leave, LeaseCallback on_lease)
      : rank_(options.rank), leave_(std::move(leave)), on_lease_(std::move(on_lease)) {
    stub_ = v1::TrainerLink::NewStub(grpc::CreateChannel(absl::StrCat("unix:", options.socket),
                                                         grpc::InsecureChannelCredentials()));
    stream_ = stub_->Attach(&context_);
    v1::TrainerMessage message;
    message.mutable_hello()->set_rank(options.rank);
    message.mutable_hello()->set_fencing_token(options.fencing_token);
    message.mutable_hello()->set_pid(getpid());
    message.mutable_hello()->set_protocol_version(kProtocolVersion);
    message.mutable_hello()->set_secret(options.secret);
    Send(std::move(message));
    reader_ = std::thread([this] { ReadLoop(); });
    writer_ = std::thread([this] { WriteLoop(); });
  }

  ~Impl() {
    Close();
    reader_.join();
    writer_.join();
  }

  void Send(v1::TrainerMessage message) {
    absl::MutexLock lock(&mutex_);
    if (!closing_) outgoing_.push_back(std::move(message));
  }

  absl::StatusOr<v1::TrainerAssignment> WaitForAssignment() {
    absl::MutexLock lock(&mutex_);
    const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return assignment_.has_value() || stop_requested_ || ended_;
    };
    mutex_.Await(absl::Condition(&settled));
    if (assignment_.has_value()) {
      parallelism_ = assignment_->spec().parallelism();
      measure_ = ToMeasureRequest(assignment_->measure());
      return *assignment_;
    }
    return NotToCome("an assignment");
  }

  absl::StatusOr<Peers> WaitForPeers() {
    absl::MutexLock lock(&mutex_);
    const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return peers_.has_value() || stop_requested_ || ended_;
    };
    mutex_.Await(absl::Condition(&settled));
    if (peers_.has_value()) return *peers_;
    return NotToCome("the other ranks' addresses");
  }

  void RequestStop(const std::string& reason) {
    absl::MutexLock lock(&mutex_);
    if (!stop_requested_) spdlog::info("stopping after a checkpoint: {}", reason);
    stop_requested_ = true;
  }

  bool stop_requested() const {
    absl::MutexLock lock(&mutex_);
    return stop_requested_;
  }

  std::string TakePlan() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(plan_, std::string());
  }

  uint32_t TakeProfileSteps() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(profile_steps_, 0);
  }

  void SetPlace(uint64_t step, const char* phase) {
    step_.store(step, std::memory_order_relaxed);
    phase_.store(phase, std::memory_order_relaxed);
  }

  int rank() const { return rank_; }
  const balance::MeasureRequest& measure() const { return measure_; }
  v1::ParallelismSpec parallelism() const {
    absl::MutexLock lock(&mutex_);
    return parallelism_;
  }

  void Close() {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    if (!AwaitFor(mutex_, absl::Condition(&ended_), kCloseTimeout)) context_.TryCancel();
  }

 private:
  absl::Status NotToCome(const char* what) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (stop_requested_) return absl::CancelledError("asked to stop before the first step");
    return absl::UnavailableError(
        absl::StrCat("the link to the worker ended while waiting for ", what));
  }

  void ReadLoop() {
    v1::AgentMessage message;
    while (stream_->Read(&message)) Handle(message);
    bool lost = false;
    {
      absl::MutexLock lock(&mutex_);
      lost = !closing_;
      ended_ = true;
    }
    if (lost) leave_("the link to the worker is gone");
  }

  void Handle(v1::AgentMessage& message) {
    if (message.has_stop()) {
      const v1::StopTrainers& stop = message.stop();
      if (stop.mode() == v1::StopTrainers::CHECKPOINT) return RequestStop(stop.reason());
      return leave_(stop.mode() == v1::StopTrainers::ABORT
                        ? stop.reason()
                        : absl::StrCat("told to stop in mode ", static_cast<int>(stop.mode()),
                                       ", which this trainer does not know: ", stop.reason()));
    }
    if (message.has_lease()) return on_lease_(ToBootTime(message.lease()));
    if (message.has_assignment() && message.assignment().has_lease()) {
      on_lease_(ToBootTime(message.assignment().lease()));
    }
    if (message.body_case() == v1::AgentMessage::BODY_NOT_SET) {
      return leave_("the worker sent a message of no kind that this trainer knows");
    }
    absl::MutexLock lock(&mutex_);
    switch (message.body_case()) {
      case v1::AgentMessage::kAssignment:
        assignment_ = std::move(*message.mutable_assignment());
        break;
      case v1::AgentMessage::kConnect:
        peers_.emplace();
        peers_->addresses.assign(message.connect().addresses().begin(),
                                 message.connect().addresses().end());
        peers_->certificates.assign(message.connect().certificates().begin(),
                                    message.connect().certificates().end());
        break;
      case v1::AgentMessage::kPlan:
        plan_ = message.plan().SerializeAsString();
        break;
      case v1::AgentMessage::kProfile:
        profile_steps_ = message.profile().steps();
        break;
      case v1::AgentMessage::kLease:
      case v1::AgentMessage::kStop:
      case v1::AgentMessage::BODY_NOT_SET:
        break;  // above
    }
  }

  // One writer, so that no reporter ever waits for the socket.
  void WriteLoop() {
    absl::Time next_pulse = BootNow() + kPulseInterval;
    while (true) {
      v1::TrainerMessage message;
      {
        absl::MutexLock lock(&mutex_);
        const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return !outgoing_.empty() || closing_ || ended_;
        };
        AwaitFor(mutex_, absl::Condition(&work), next_pulse - BootNow());
        if (ended_ || (closing_ && outgoing_.empty())) break;
        if (!outgoing_.empty()) {
          message = std::move(outgoing_.front());
          outgoing_.pop_front();
        }
      }
      if (message.body_case() == v1::TrainerMessage::BODY_NOT_SET) {
        message.mutable_pulse()->set_step(step_.load(std::memory_order_relaxed));
        message.mutable_pulse()->set_phase(phase_.load(std::memory_order_relaxed));
        if (Progress::waiting()) Progress::Tick();
        message.mutable_pulse()->set_progress(Progress::count());
        next_pulse = BootNow() + kPulseInterval;
      }
      if (!stream_->Write(message)) break;
    }
    stream_->WritesDone();
  }

  const int rank_;
  const LeaveCallback leave_;
  const LeaseCallback on_lease_;
  grpc::ClientContext context_;
  std::unique_ptr<v1::TrainerLink::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainerMessage, v1::AgentMessage>> stream_;
  balance::MeasureRequest measure_;  // written before WaitForAssignment() returns
  std::atomic<uint64_t> step_{0};
  std::atomic<const char*> phase_{"start"};

  mutable absl::Mutex mutex_;
  std::deque<v1::TrainerMessage> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainerAssignment> assignment_ ABSL_GUARDED_BY(mutex_);
  std::optional<Peers> peers_ ABSL_GUARDED_BY(mutex_);
  std::string plan_ ABSL_GUARDED_BY(mutex_);
  uint32_t profile_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::ParallelismSpec parallelism_ ABSL_GUARDED_BY(mutex_);
  bool stop_requested_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more will be reported
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;    // the worker's side
  std::thread reader_, writer_;
};

std::unique_ptr<AgentLink> AgentLink::Attach(const AgentLinkOptions& options, LeaveCallback leave,
                                             LeaseCallback on_lease) {
  return std::unique_ptr<AgentLink>(
      new AgentLink(std::make_unique<Impl>(options, std::move(leave), std::move(on_lease))));
}

AgentLink::AgentLink(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AgentLink::~AgentLink() = default;

absl::StatusOr<Assignment> AgentLink::WaitForAssignment() {
  ASSIGN_OR_RETURN(const v1::TrainerAssignment proto, impl_->WaitForAssignment());
  if (const absl::Status same = CheckProtocolVersion("the worker of this trainer",
                                                     proto.protocol_version(), "the trainer");
      !same.ok()) {
    // Another attempt may fare better: on another node, or once the worker was restarted.
    return absl::UnavailableError(same.message());
  }
  // Nobody could tell when such a trainer is dead, and may be replaced.
  if (!proto.has_lease()) return absl::InternalError("the worker gave this trainer no lease");
  Assignment assignment;
  assignment.listen_host = proto.listen_host().empty() ? "127.0.0.1" : proto.listen_host();
  ASSIGN_OR_RETURN(assignment.job, ToTrainingJob(proto));
  return assignment;
}

absl::StatusOr<Peers> AgentLink::ReportReady(const std::string& address) {
  v1::TrainerMessage message;
  message.mutable_ready()->set_rank(impl_->rank());
  message.mutable_ready()->set_address(address);
  impl_->Send(std::move(message));
  return impl_->WaitForPeers();
}

void AgentLink::RequestStop(const std::string& reason) {
  impl_->RequestStop(reason);
}

void AgentLink::ReportResult(const Result& result) {
  v1::TrainerMessage message;
  v1::TrainerResult* proto = message.mutable_result();
  proto->set_outcome(OutcomeOf(result.kind));
  proto->set_message(result.message);
  proto->set_retryable(result.retryable);
  proto->set_collateral(result.collateral);
  impl_->Send(std::move(message));
}

void AgentLink::Close() {
  impl_->Close();
}

void AgentLink::ReportStep(const StepRecord& record) {
  v1::TrainerMessage message;
  *message.mutable_step() = trainer::ToProto(record, impl_->rank());
  impl_->Send(std::move(message));
}

void AgentLink::ReportEval(const EvalRecord& record) {
  v1::TrainerMessage message;
  *message.mutable_eval() = trainer::ToProto(record);
  impl_->Send(std::move(message));
}

void AgentLink::ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                                 double seconds) {
  v1::TrainerMessage message;
  v1::CheckpointNotice* notice = message.mutable_checkpoint();
  notice->set_step(step);
  notice->set_path(path);
  notice->set_bytes(bytes);
  notice->set_seconds(seconds);
  impl_->Send(std::move(message));
}

void AgentLink::ReportModel(const std::string& path) {
  v1::TrainerMessage message;
  message.mutable_model_exported()->set_path(path);
  impl_->Send(std::move(message));
}

const balance::MeasureRequest& AgentLink::measure() const {
  return impl_->measure();
}

void AgentLink::ReportMeasurements(const balance::Measurements& measured) {
  v1::TrainerMessage message;
  *message.mutable_measurements() = trainer::ToProto(measured);
  impl_->Send(std::move(message));
}

void AgentLink::SetPlace(uint64_t step, const char* phase) {
  impl_->SetPlace(step, phase);
}
bool AgentLink::stop_requested() const {
  return impl_->stop_requested();
}
std::string AgentLink::TakePlan() {
  return impl_->TakePlan();
}
uint32_t AgentLink::TakeProfileSteps() {
  return impl_->TakeProfileSteps();
}

absl::StatusOr<Plan> AgentLink::ParsePlan(const std::string& bytes) const {
  v1::StepPlan proto;
  if (!proto.ParseFromString(bytes)) {
    return absl::InvalidArgumentError("a plan arrived that cannot be read");
  }
  const v1::ParallelismSpec parallelism = impl_->parallelism();
  return ToPlan(proto, static_cast<int>(parallelism.context()),
                static_cast<int>(jobspec::HeadRanks(parallelism)));
}

}  // namespace ringleader::trainer
