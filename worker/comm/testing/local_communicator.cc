#include "worker/comm/testing/local_communicator.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/group_communicator.h"
#include "worker/comm/rendezvous.h"

namespace ringleader::comm::testing {
namespace {

// Where the ranks' transfers meet.
class Exchange {
 public:
  explicit Exchange(int ranks) : ranks_(ranks) {}
  int ranks() const { return ranks_; }
  Rendezvous& rendezvous() { return rendezvous_; }

  void Abort(int rank, const std::string& reason) {
    {
      absl::MutexLock lock(&mutex_);
      if (aborted_by_ >= 0) return;
      aborted_by_ = rank;
    }
    rendezvous_.Fail(absl::AbortedError(absl::StrFormat("rank %d: %s", rank, reason)));
  }

  int aborted_by() const {
    absl::MutexLock lock(&mutex_);
    return aborted_by_;
  }

 private:
  const int ranks_;
  Rendezvous rendezvous_;
  mutable absl::Mutex mutex_;
  int aborted_by_ ABSL_GUARDED_BY(mutex_) = -1;
};

class LocalTransport : public Transport {
 public:
  // sent: null where nobody counts.
  LocalTransport(std::shared_ptr<Exchange> exchange, int rank, std::atomic<uint64_t>* sent)
      : exchange_(std::move(exchange)), rank_(rank), sent_(sent) {}

  int rank() const override { return rank_; }
  int size() const override { return exchange_->ranks(); }
  void Send(StreamId stream, int to, PendingTransferPtr transfer) override {
    if (sent_ != nullptr && to != rank_) *sent_ += transfer->bytes;
    exchange_->rendezvous().Send(stream, rank_, to, std::move(transfer));
  }
  void Receive(StreamId stream, int from, PendingTransferPtr transfer) override {
    exchange_->rendezvous().Receive(stream, from, rank_, std::move(transfer));
  }
  void Abort(const std::string& reason) override { exchange_->Abort(rank_, reason); }
  absl::Status status() const override { return exchange_->rendezvous().status(); }
  bool aborted_by_peer() const override {
    const int by = exchange_->aborted_by();
    return by >= 0 && by != rank_;
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
  const int rank_;
  std::atomic<uint64_t>* const sent_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> LocalCommunicators(int ranks) {
  return CountedCommunicators(ranks, /*sent=*/nullptr);
}

std::vector<std::unique_ptr<Communicator>> CountedCommunicators(int ranks,
                                                                std::atomic<uint64_t>* sent) {
  auto exchange = std::make_shared<Exchange>(ranks);
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(std::make_unique<GroupCommunicator>(
        std::make_shared<LocalTransport>(exchange, rank, sent)));
  }
  return communicators;
}

}  // namespace ringleader::comm::testing
