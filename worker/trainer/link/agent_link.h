// The trainer's end of its worker's Unix socket. No protobuf in this header: main() sees torch too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/trainer/host.h"
#include "worker/trainer/training_job.h"

namespace ringleader::trainer {

struct AgentLinkOptions {
  std::string socket;  // path
  int rank = 0;
  uint64_t fencing_token = 0;
  std::string secret = {};  // by which the worker knows the process that it started
};

// The other ranks, by rank.
struct Peers {
  std::vector<std::string> addresses;
  std::vector<std::string> certificates;  // names in them; empty: none is known
};

struct Assignment {
  TrainingJob job;
  std::string listen_host;  // where to listen for the other ranks
};

// What the worker is told last.
struct Result {
  enum class Kind { kCompleted, kStopped, kFailed };
  Kind kind = Kind::kFailed;
  std::string message = {};
  bool retryable = false;
  bool collateral = false;  // another rank failed first
};

// Thread-safe. A thread of its own sends messages, and the step loop's place every second.
class AgentLink : public Host {
 public:
  // The link calls it from a thread of its own to leave now: the worker asked for it, or is gone.
  using LeaveCallback = std::function<void(const std::string& reason)>;

  // The link calls it from a thread of its own, before the assignment and with every renewal: this
  // process may live until `end` (BootNow()).
  using LeaseCallback = std::function<void(absl::Time end)>;

  // Dials the socket and says hello.
  static std::unique_ptr<AgentLink> Attach(const AgentLinkOptions& options, LeaveCallback leave,
                                           LeaseCallback on_lease);
  // Sends what is queued, for 2 s at most.
  ~AgentLink() override;

  // These wait for the worker. CANCELLED once a stop was requested, UNAVAILABLE if the link ended.
  absl::StatusOr<Assignment> WaitForAssignment();
  absl::StatusOr<Peers> ReportReady(const std::string& address);

  // Acts as if the worker had asked for a checkpoint and the end, which is what SIGTERM asks.
  void RequestStop(const std::string& reason);

  void ReportResult(const Result& result);
  // Waits until all that was reported is on its way, and the worker has closed the stream; at most
  // 2 s.
  void Close();

  void ReportStep(const StepRecord& record) override;
  void ReportEval(const EvalRecord& record) override;
  void ReportCheckpoint(uint64_t step, const std::string& path, uint64_t bytes,
                        double seconds) override;
  void ReportModel(const std::string& path) override;
  const balance::MeasureRequest& measure() const override;
  void ReportMeasurements(const balance::Measurements& measured) override;
  void SetPlace(uint64_t step, const char* phase) override;
  bool stop_requested() const override;
  std::string TakePlan() override;
  uint32_t TakeProfileSteps() override;
  absl::StatusOr<Plan> ParsePlan(const std::string& bytes) const override;

 private:
  class Impl;
  explicit AgentLink(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ringleader::trainer
