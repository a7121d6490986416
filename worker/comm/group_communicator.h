// A Communicator over (a subset of) the ranks of a Transport: collectives in terms of
// point-to-point transfers.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"
#include "worker/comm/transport.h"

namespace ringleader::comm {

class GroupCommunicator : public Communicator {
 public:
  // Spans all ranks of `transport`.
  explicit GroupCommunicator(const std::shared_ptr<Transport>& transport);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }

  std::unique_ptr<Transfer> SendReceive(Channel channel, const void* send, size_t send_bytes,
                                        int to, void* receive, size_t receive_bytes,
                                        int from) override;
  std::unique_ptr<Transfer> AllToAll(Channel channel, const void* send, size_t bytes,
                                     void* receive) override;
  absl::Status AllReduceSum(Channel channel, float* data, size_t count) override;
  absl::Status AllReduceSum(Channel channel, double* data, size_t count) override;
  absl::Status AllReduceMax(Channel channel, float* data, size_t count) override;
  absl::Status AllGather(Channel channel, const void* send, size_t bytes, void* receive) override;
  absl::Status ReduceScatterSum(Channel channel, const float* data, size_t count,
                                float* receive) override;
  absl::Status Broadcast(Channel channel, void* data, size_t bytes, int root) override;
  absl::Status Barrier() override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const std::vector<int>& ranks) override;
  void Abort(const std::string& reason) override { transport_->Abort(reason); }
  absl::Status status() const override { return transport_->status(); }
  bool aborted_by_peer() const override { return transport_->aborted_by_peer(); }

 private:
  GroupCommunicator(std::shared_ptr<Transport> transport, std::vector<int> members, uint32_t group);

  template <typename T, typename Reduce>
  absl::Status AllReduce(Channel channel, T* data, size_t count, Reduce reduce);
  // AllGather among many ranks, of little.
  absl::Status PassOn(Channel channel, const void* send, size_t bytes, void* receive);
  StreamId Stream(Channel channel) const { return group_ << 8 | static_cast<uint32_t>(channel); }

  const std::shared_ptr<Transport> transport_;
  const std::vector<int> members_;  // transport ranks, in this group's order
  const uint32_t group_;            // 24 bits, the same on all members
  int rank_ = 0;

  absl::Mutex mutex_;
  // How often each list of members was split off: part of the new group's id.
  std::map<std::vector<int>, uint32_t> splits_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringleader::comm
