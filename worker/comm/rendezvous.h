// Matches sends and receives inside one process: a transfer is one copy, made by whoever comes
// second.
#pragma once

#include <deque>
#include <map>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/transport.h"

namespace ringleader::comm {

// Thread-safe.
class Rendezvous {
 public:
  void Send(StreamId stream, int from, int to, PendingTransferPtr transfer);
  void Receive(StreamId stream, int from, int to, PendingTransferPtr transfer);

  // Finishes all transfers, now and from now on, with `status`. The first call decides.
  void Fail(const absl::Status& status);
  absl::Status status() const;

 private:
  struct Line {
    std::deque<PendingTransferPtr> sends, receives;
  };
  using LineKey = std::tuple<StreamId, int, int>;  // stream, from, to

  void Post(const LineKey& key, PendingTransferPtr transfer, bool is_send);

  mutable absl::Mutex mutex_;
  std::map<LineKey, Line> lines_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// The error of a receive whose peer sent another number of bytes.
absl::Status SizeMismatch(int from, size_t sent, size_t expected);

}  // namespace ringleader::comm
