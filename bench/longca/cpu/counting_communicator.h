// A communicator that counts what its rank sends to others.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "worker/comm/communicator.h"

namespace ringleader::bench {

// Collectives count as their rings send: of `size` ranks' data all parts but one, in a sum twice.
class CountingCommunicator : public comm::Communicator {
 public:
  CountingCommunicator(std::unique_ptr<comm::Communicator> counted, std::atomic<int64_t>* bytes)
      : counted_(std::move(counted)), bytes_(*bytes) {}

  int rank() const override { return counted_->rank(); }
  int size() const override { return counted_->size(); }
  std::unique_ptr<comm::Transfer> SendReceive(comm::Channel channel, const void* send,
                                              size_t send_bytes, int to, void* receive,
                                              size_t receive_bytes, int from) override {
    if (to >= 0 && to != rank()) bytes_ += static_cast<int64_t>(send_bytes);
    return counted_->SendReceive(channel, send, send_bytes, to, receive, receive_bytes, from);
  }
  absl::Status AllReduceSum(comm::Channel channel, float* data, size_t count) override {
    CountSum(count * sizeof(float));
    return counted_->AllReduceSum(channel, data, count);
  }
  absl::Status AllReduceSum(comm::Channel channel, double* data, size_t count) override {
    CountSum(count * sizeof(double));
    return counted_->AllReduceSum(channel, data, count);
  }
  absl::Status AllReduceMax(comm::Channel channel, float* data, size_t count) override {
    CountSum(count * sizeof(float));
    return counted_->AllReduceMax(channel, data, count);
  }
  absl::Status AllGather(comm::Channel channel, const void* send, size_t bytes,
                         void* receive) override {
    bytes_ += static_cast<int64_t>(bytes) * (size() - 1);
    return counted_->AllGather(channel, send, bytes, receive);
  }
  std::unique_ptr<comm::Transfer> AllToAll(comm::Channel channel, const void* send, size_t bytes,
                                           void* receive) override {
    bytes_ += static_cast<int64_t>(bytes) * (size() - 1);
    return counted_->AllToAll(channel, send, bytes, receive);
  }
  absl::Status ReduceScatterSum(comm::Channel channel, const float* data, size_t count,
                                float* receive) override {
    bytes_ += static_cast<int64_t>(count * sizeof(float)) * (size() - 1);
    return counted_->ReduceScatterSum(channel, data, count, receive);
  }
  absl::Status Broadcast(comm::Channel channel, void* data, size_t bytes, int root) override {
    if (root == rank()) bytes_ += static_cast<int64_t>(bytes);
    return counted_->Broadcast(channel, data, bytes, root);
  }
  absl::Status Barrier() override { return counted_->Barrier(); }
  absl::StatusOr<std::unique_ptr<comm::Communicator>> Split(
      const std::vector<int>& ranks) override {
    ASSIGN_OR_RETURN(std::unique_ptr<comm::Communicator> part, counted_->Split(ranks));
    return std::make_unique<CountingCommunicator>(std::move(part), &bytes_);
  }
  void Abort(const std::string& reason) override { counted_->Abort(reason); }
  absl::Status status() const override { return counted_->status(); }
  bool aborted_by_peer() const override { return counted_->aborted_by_peer(); }

 private:
  void CountSum(size_t bytes) { bytes_ += 2 * static_cast<int64_t>(bytes) * (size() - 1) / size(); }

  const std::unique_ptr<comm::Communicator> counted_;
  std::atomic<int64_t>& bytes_;
};

}  // namespace ringleader::bench
