#include "coordinator/lifecycle/batch_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/wait/timed_wait.h"

namespace ringleader::lifecycle {
namespace {

// Messages in one transaction: so many fit into the store's reserve several times.
constexpr size_t kMaxBatchBytes = size_t{8} << 20;
// However small they are, each takes its time, in which nobody else is served.
constexpr std::ptrdiff_t kMaxBatchItems = 4096;

}  // namespace

void BatchQueue::Push(BatchItem item) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_) {
      ready_ = true;
      urgent_ = urgent_ || item.done != nullptr;
      items_.push_back(std::move(item));
      return;
    }
  }
  std::vector<BatchItem> late;
  late.push_back(std::move(item));
  Finish(late, absl::UnavailableError("the coordinator is shutting down"));
}

bool BatchQueue::Await(absl::Duration tick, absl::Duration window) {
  absl::MutexLock lock(&mutex_);
  const auto something = [this]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || ready_; };
  AwaitFor(mutex_, absl::Condition(&something), tick);
  const auto urgent = [this]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || urgent_; };
  if (ready_) AwaitFor(mutex_, absl::Condition(&urgent), window);
  return !stopped_;
}

std::vector<BatchItem> BatchQueue::Take(const absl::Status& space) {
  std::vector<BatchItem> batch, refused, superseded;
  {
    absl::MutexLock lock(&mutex_);
    if (space.ok()) {
      batch = TakeOldest();
      ready_ = !items_.empty();
    } else {
      batch = TakeVital(&refused, &superseded);
      ready_ = false;  // until something comes, or there is space
    }
    urgent_ = std::any_of(items_.begin(), items_.end(),
                          [](const BatchItem& item) { return item.done != nullptr; });
  }
  Finish(refused, space);
  // The hello may be refused yet: the earlier session's worker, if it lives, is to send again what
  // goes here.
  for (const BatchItem& item : superseded) {
    item.session->Close(absl::AbortedError("another session of this node has begun"));
  }
  Finish(superseded, absl::OkStatus());
  return batch;
}

std::vector<BatchItem> BatchQueue::TakeOldest() {
  size_t bytes = 0;
  auto end = items_.begin();
  const auto furthest = items_.begin() + std::min(std::ssize(items_), kMaxBatchItems);
  for (bool is_over = false; end != furthest && !is_over; ++end) {
    bytes += end->message_bytes;
    is_over = end->ends_batch || bytes >= kMaxBatchBytes;
  }
  std::vector<BatchItem> batch(std::make_move_iterator(items_.begin()),
                               std::make_move_iterator(end));
  items_.erase(items_.begin(), end);
  return batch;
}

std::vector<BatchItem> BatchQueue::TakeVital(std::vector<BatchItem>* refused,
                                             std::vector<BatchItem>* superseded) {
  std::vector<BatchItem> vital;
  std::deque<BatchItem> rest;
  for (BatchItem& item : items_) {
    if (item.vital) {
      vital.push_back(std::move(item));
    } else {
      rest.push_back(std::move(item));
    }
  }
  items_.clear();
  // A worker that is here again will send again what it sent in an earlier session.
  const auto here_again = [&](const session::Session& earlier) {
    return std::any_of(vital.begin(), vital.end(), [&](const BatchItem& hello) {
      return hello.session != nullptr && hello.session.get() != &earlier &&
             hello.session->node() == earlier.node();
    });
  };
  for (BatchItem& item : rest) {
    if (item.done != nullptr) {
      refused->push_back(std::move(item));
    } else if (item.session != nullptr && here_again(*item.session)) {
      superseded->push_back(std::move(item));
    } else {
      items_.push_back(std::move(item));
    }
  }
  return vital;
}

bool BatchQueue::IsReady() const {
  absl::MutexLock lock(&mutex_);
  return ready_;
}

void BatchQueue::Finish(const std::vector<BatchItem>& batch, const absl::Status& outcome) {
  for (const BatchItem& item : batch) {
    if (item.done) item.done(outcome);
    if (item.message_bytes > 0) item.session->Taken();
  }
}

bool BatchQueue::Stop() {
  absl::MutexLock lock(&mutex_);
  return !std::exchange(stopped_, true);
}

}  // namespace ringleader::lifecycle
