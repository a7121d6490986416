#include "worker/comm/nccl/nccl_session.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"

namespace ringleader::comm {
namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(50);
// How long after NCCL a host's communicator may notice a broken connection.
constexpr absl::Duration kPeerNewsDelay = absl::Seconds(1);
// A channel's buffers take a few hundred MB; where less is free, that is what NCCL failed for.
constexpr size_t kLittleMemory = size_t{512} << 20;

const char* ChannelName(Channel channel) {
  switch (channel) {
    case Channel::kControl:
      return "control";
    case Channel::kKvInner:
      return "kv_inner";
    case Channel::kKvOuter:
      return "kv_outer";
    case Channel::kGradKv:
      return "grad_kv";
    case Channel::kGradients:
      return "gradients";
  }
  return "?";
}

}  // namespace

std::string Describe(const DeviceOperation& operation) {
  std::string text = absl::StrFormat("%s %s of %d bytes", ChannelName(operation.channel),
                                     operation.name, operation.bytes);
  if (operation.to >= 0) absl::StrAppend(&text, ", to rank ", operation.to);
  if (operation.from >= 0) absl::StrAppend(&text, ", from rank ", operation.from);
  return text;
}

void WatchedComm::set_comm(ncclComm_t comm) {
  std::lock_guard lock(mutex_);
  comm_ = comm;
}

ncclComm_t WatchedComm::Take() {
  const std::unique_lock lock(mutex_, std::chrono::seconds(1));
  return std::exchange(comm_, nullptr);
}

NcclSession::NcclSession(const NcclOptions& options, const NcclLibrary* nccl, Communicator* host)
    : options_(options),
      nccl_(nccl),
      host_(host),
      events_(std::make_shared<DeviceEventPool>()),
      queues_(kChannels) {
  watchdog_ = std::thread([this] { WatchdogLoop(); });
}

NcclSession::~NcclSession() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  watchdog_.join();
  AbortComms();
}

void NcclSession::Abort(const std::string& reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (aborted()) return;
    status_ = absl::AbortedError(reason);
    aborted_.store(true, std::memory_order_release);
  }
  host_->Abort(reason);
}

absl::Status NcclSession::Fail(const absl::Status& error) {
  const absl::Time patience = BootNow() + kPeerNewsDelay;
  while (!aborted() && host_->status().ok() && BootNow() < patience) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  const absl::Status news = host_->status();
  Abort(std::string(news.ok() ? error.message() : news.message()));
  return news.ok() ? error : status();
}

absl::Status NcclSession::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

void NcclSession::Watch(std::shared_ptr<WatchedComm> comm) {
  absl::MutexLock lock(&mutex_);
  comms_.push_back(std::move(comm));
}

void NcclSession::Watch(const DeviceOperation& operation,
                        std::shared_ptr<const DeviceEventPool::Event> done) {
  absl::MutexLock lock(&mutex_);
  queues_[static_cast<size_t>(operation.channel)].pending.push_back(
      {.operation = operation, .enqueued = BootNow(), .done = std::move(done)});
}

void NcclSession::Forget(const WatchedComm* comm) {
  absl::MutexLock lock(&mutex_);
  comms_.remove_if([comm](const auto& watched) { return watched.get() == comm; });
}

absl::Status NcclSession::NcclError(ncclResult_t result, const std::string& what) const {
  const std::string where =
      absl::StrFormat("rank %d of %d: %s", host_->rank(), host_->size(), what);
  if (aborted()) return status();
  size_t free = 0, total = 0;
  if (result == ncclUnhandledCudaError && cudaMemGetInfo(&free, &total) == cudaSuccess &&
      free < kLittleMemory) {
    constexpr double kGib = 1 << 30;
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: NCCL found no memory: %.2f of %.1f GiB are free on its GPU; set resources.recompute: "
        "full, use more GPUs (resources.trainers) or a shorter data.sequence_length, or end what "
        "else runs there",
        where, static_cast<double>(free) / kGib, static_cast<double>(total) / kGib));
  }
  const char* const detail = nccl_->get_last_error(nullptr);
  return absl::InternalError(absl::StrFormat(
      "%s: NCCL: %s%s%s; NCCL_DEBUG=INFO says more", where, nccl_->get_error_string(result),
      detail != nullptr && *detail ? ": " : "", detail == nullptr ? "" : detail));
}

void NcclSession::WatchdogLoop() {
  cudaSetDevice(options_.device);
  bool torn_down = false;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      const auto wake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || (aborted() && !comms_.empty());
      };
      AwaitFor(mutex_, absl::Condition(&wake), kWatchInterval);
      if (stopping_) return;
    }
    if (aborted()) {
      if (!std::exchange(torn_down, true))
        spdlog::warn("NCCL aborts: {}", std::string(status().message()));
      AbortComms();
      continue;
    }
    if (const absl::Status host = host_->status(); !host.ok()) Abort(std::string(host.message()));
    absl::Status problem = CheckComms();
    if (problem.ok()) problem = CheckTransfers();
    if (!problem.ok()) Fail(problem).IgnoreError();
  }
}

absl::Status NcclSession::CheckComms() {
  std::list<std::shared_ptr<WatchedComm>> comms;
  {
    absl::MutexLock lock(&mutex_);
    comms = comms_;
  }
  for (const auto& comm : comms) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked =
        comm->Use([&](ncclComm_t c) { return nccl_->comm_get_async_error(c, &state); });
    // A communicator that is not created yet, or is being taken down by its owner, has no error.
    if (asked != ncclSuccess || state == ncclSuccess || state == ncclInProgress) continue;
    return NcclError(state, comm->name());
  }
  return absl::OkStatus();
}

absl::Status NcclSession::CheckTransfers() {
  const absl::Time now = BootNow();
  absl::MutexLock lock(&mutex_);
  for (Queue& queue : queues_) {
    while (!queue.pending.empty()) {
      const Pending& oldest = queue.pending.front();
      ASSIGN_OR_RETURN(const bool reached, oldest.done->reached());
      if (!reached) break;
      queue.pending.pop_front();
      queue.last_end = now;
    }
    if (queue.pending.empty()) continue;
    const Pending& oldest = queue.pending.front();
    const absl::Duration waited = now - std::max(oldest.enqueued, queue.last_end);
    if (waited <= options_.transfer_timeout) continue;
    return absl::DeadlineExceededError(absl::StrFormat(
        "rank %d of %d: %s has not ended for %s; a rank hangs, or a layer's attention takes longer "
        "than resources.transfer_timeout_seconds",
        host_->rank(), host_->size(), Describe(oldest.operation),
        absl::FormatDuration(absl::Trunc(waited, absl::Seconds(1)))));
  }
  return absl::OkStatus();
}

void NcclSession::AbortComms() {
  std::list<std::shared_ptr<WatchedComm>> comms;
  {
    absl::MutexLock lock(&mutex_);
    comms.swap(comms_);
  }
  // All at once: one communicator's end may wait for the device, and that for another's kernel.
  std::vector<std::thread> threads;
  for (const auto& comm : comms) {
    threads.emplace_back([this, comm] {
      cudaSetDevice(options_.device);
      if (const ncclComm_t taken = comm->Take(); taken != nullptr) nccl_->comm_abort(taken);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ringleader::comm
