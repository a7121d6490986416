#include "worker/comm/testing/local_communicator.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/group_communicator.h"

namespace ringleader::comm::testing {
namespace {

// Where the ranks' transfers meet.
class Exchange {
 public:
  explicit Exchange(int ranks) : ranks_(ranks) {}
  int ranks() const { return ranks_; }

  void Post(StreamId stream, int from, int to, PendingTransferPtr transfer, bool is_send) {
    PendingTransferPtr partner;
    {
      absl::MutexLock lock(&mutex_);
      if (!status_.ok()) return transfer->Finish(status_);
      Line& line = lines_[{stream, from, to}];
      std::deque<PendingTransferPtr>& partners = is_send ? line.receives : line.sends;
      if (partners.empty()) {
        (is_send ? line.sends : line.receives).push_back(std::move(transfer));
        return;
      }
      partner = std::move(partners.front());
      partners.pop_front();
    }
    is_send ? Copy(*transfer, *partner, from) : Copy(*partner, *transfer, from);
  }

  void Abort(int rank, const std::string& reason) {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ = absl::AbortedError(absl::StrFormat("rank %d: %s", rank, reason));
    aborted_by_ = rank;
    for (auto& [key, line] : lines_) {
      for (const PendingTransferPtr& transfer : line.sends) transfer->Finish(status_);
      for (const PendingTransferPtr& transfer : line.receives) transfer->Finish(status_);
    }
    lines_.clear();
  }

  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  int aborted_by() const {
    absl::MutexLock lock(&mutex_);
    return aborted_by_;
  }

 private:
  struct Line {
    std::deque<PendingTransferPtr> sends, receives;
  };

  static void Copy(PendingTransfer& send, PendingTransfer& receive, int from) {
    absl::Status status;
    if (send.bytes != receive.bytes) {
      status = absl::InvalidArgumentError(absl::StrFormat(
          "rank %d sent %d bytes where %d were expected", from, send.bytes, receive.bytes));
    } else if (send.Claim()) {
      if (receive.Claim()) {
        if (send.bytes > 0) std::memcpy(receive.data, send.data, send.bytes);
        receive.Release();
      }
      send.Release();
    }
    send.Finish(status);
    receive.Finish(status);
  }

  const int ranks_;
  mutable absl::Mutex mutex_;
  std::map<std::tuple<StreamId, int, int>, Line> lines_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int aborted_by_ ABSL_GUARDED_BY(mutex_) = -1;
};

class LocalTransport : public Transport {
 public:
  LocalTransport(std::shared_ptr<Exchange> exchange, int rank)
      : exchange_(std::move(exchange)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return exchange_->ranks(); }
  void Send(StreamId stream, int to, PendingTransferPtr transfer) override {
    exchange_->Post(stream, rank_, to, std::move(transfer), /*is_send=*/true);
  }
  void Receive(StreamId stream, int from, PendingTransferPtr transfer) override {
    exchange_->Post(stream, from, rank_, std::move(transfer), /*is_send=*/false);
  }
  void Abort(const std::string& reason) override { exchange_->Abort(rank_, reason); }
  absl::Status status() const override { return exchange_->status(); }
  bool aborted_by_peer() const override {
    const int by = exchange_->aborted_by();
    return by >= 0 && by != rank_;
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> LocalCommunicators(int ranks) {
  auto exchange = std::make_shared<Exchange>(ranks);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(
        std::make_unique<GroupCommunicator>(std::make_shared<LocalTransport>(exchange, rank)));
  }
  return communicators;
}

}  // namespace ringleader::comm::testing
