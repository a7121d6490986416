// Transfers and collectives between the GPUs of one attempt, enqueued on streams: nothing here but
// Allocate, and freeing what it gave, waits for the device. NCCL implements it
// (nccl_communicator.h); neither its headers nor LibTorch's appear here.
//
// Every channel has a communicator and a stream of its own, so that KV inside a node, KV between
// nodes, travelling dKV and gradients never wait for each other. A call first makes the
// channel's stream wait for what is enqueued on `after`, then enqueues the transfer there; whoever
// reads the result, or overwrites what was sent, makes its own stream wait with Transfer::Order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"

namespace ringleader::comm {

// The type of what a collective sums; sums of bf16 are taken in fp32.
enum class ElementType { kFloat32, kBfloat16, kInt32, kInt64, kFloat64 };

// A point on a channel's stream. Copies share it; an empty one orders nothing.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Makes what is enqueued on `stream` from now on wait for the transfer.
  virtual absl::Status Order(cudaStream_t stream) const = 0;
};
using DeviceTransfer = std::shared_ptr<const DeviceEvent>;

// All pointers are device memory of this rank's GPU and must live until the transfer has run.
// All ranks make the same calls of a channel in the same order. One thread enqueues at a time;
// Abort and status may come from any thread. With one rank, transfers are copies or nothing at all.
// Every call returns ABORTED with the reason once aborted; other errors name rank, peers, operation
// and bytes.
class DeviceCommunicator {
 public:
  virtual ~DeviceCommunicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Uninitialised memory of this rank's GPU for what transfers of `channels` send and receive:
  // where one GPU reaches another's memory and both ends of a transfer lie in such memory, the
  // sender writes it where it belongs, without a buffer in between. The last owner frees it, when
  // no transfer of any rank is under way on it. RESOURCE_EXHAUSTED where the GPU has no more.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(size_t bytes,
                                                         std::span<const Channel> channels) = 0;
  // The bytes that Allocate gave and nobody has freed.
  virtual size_t allocated_bytes() const = 0;

  // Sends to `to` while receiving from `from`; either may be this rank (both, then) or -1 for none.
  virtual absl::StatusOr<DeviceTransfer> SendReceive(Channel channel, const void* send,
                                                     size_t send_bytes, int to, void* receive,
                                                     size_t receive_bytes, int from,
                                                     cudaStream_t after) = 0;

  // data: [count], in place.
  virtual absl::StatusOr<DeviceTransfer> AllReduceSum(Channel channel, void* data, size_t count,
                                                      ElementType type, cudaStream_t after) = 0;
  virtual absl::StatusOr<DeviceTransfer> AllReduceMax(Channel channel, void* data, size_t count,
                                                      ElementType type, cudaStream_t after) = 0;
  // send: [bytes]; receive: [size, bytes]. In place when send = receive + rank * bytes.
  virtual absl::StatusOr<DeviceTransfer> AllGather(Channel channel, const void* send, size_t bytes,
                                                   void* receive, cudaStream_t after) = 0;
  // send, receive: [size, bytes], apart from each other: part r of send goes to rank r.
  virtual absl::StatusOr<DeviceTransfer> AllToAll(Channel channel, const void* send, size_t bytes,
                                                  void* receive, cudaStream_t after) = 0;
  // data: [size, count] summed over ranks; receive: this rank's [count], may be its part of data.
  virtual absl::StatusOr<DeviceTransfer> ReduceScatterSum(Channel channel, const void* data,
                                                          size_t count, void* receive,
                                                          ElementType type, cudaStream_t after) = 0;
  // data: [count] of all ranks, summed into root's receive, which may be data; ignored elsewhere.
  virtual absl::StatusOr<DeviceTransfer> ReduceSum(Channel channel, const void* data, size_t count,
                                                   void* receive, ElementType type, int root,
                                                   cudaStream_t after) = 0;
  virtual absl::StatusOr<DeviceTransfer> Broadcast(Channel channel, void* data, size_t bytes,
                                                   int root, cudaStream_t after) = 0;

  // A communicator over a subset, as Communicator::Split: members call it in the same order.
  // Aborting either aborts both.
  virtual absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Split(
      const std::vector<int>& ranks) = 0;

  // ncclCommAbort on every channel: what is enqueued ends, and later calls return ABORTED.
  virtual void Abort(const std::string& reason) = 0;
  // OK, or what went wrong: an asynchronous NCCL error, a transfer that the watchdog found overdue,
  // or Abort's reason.
  virtual absl::Status status() const = 0;
};

}  // namespace ringleader::comm
