// Messages and collectives between the ranks of one attempt.
//
// Two implementations: gRPC streams between CPU trainers (grpc_communicator.h) and NCCL between
// GPUs. Buffers are plain memory, so that neither LibTorch nor protobuf appears here; the CPU
// implementation takes host pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::comm {

// Transfers on different channels never wait for each other; within a channel and pair they arrive
// in order. A ring keeps KV inside a node, KV between nodes and travelling dKV apart, so that none
// waits for another.
enum class Channel : uint32_t {
  kControl = 0,
  kKvInner = 1,
  kKvOuter = 2,
  kGradKv = 3,
  kGradients = 4
};
inline constexpr int kChannels = 5;  // their number

// A transfer in flight. The buffers must live, and must not be touched, until Wait returns.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Blocks until both directions are done, or the communicator is aborted (then ABORTED with the
  // reason).
  virtual absl::Status Wait() = 0;
};

// Thread-safe, except that the calls of one channel must be made in the same order on all ranks of
// the group.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Starts sending `send_bytes` to `to` and receiving `receive_bytes` from `from` (either may be
  // this rank, or -1 for neither). INVALID_ARGUMENT from Wait if the peer sent another number of
  // bytes.
  virtual std::unique_ptr<Transfer> SendReceive(Channel channel, const void* send,
                                                size_t send_bytes, int to, void* receive,
                                                size_t receive_bytes, int from) = 0;

  // Starts an exchange of all ranks: part r of `send` goes to rank r, whose part for this one comes
  // to `receive`; both are [size, bytes], apart from each other.
  virtual std::unique_ptr<Transfer> AllToAll(Channel channel, const void* send, size_t bytes,
                                             void* receive) = 0;

  // Collectives: blocking, in rank order and therefore bit-for-bit the same on every rank and in
  // every run. data: [count], summed over ranks in place.
  virtual absl::Status AllReduceSum(Channel channel, float* data, size_t count) = 0;
  virtual absl::Status AllReduceSum(Channel channel, double* data, size_t count) = 0;
  virtual absl::Status AllReduceMax(Channel channel, float* data, size_t count) = 0;
  // send: [bytes]; receive: [size, bytes]
  virtual absl::Status AllGather(Channel channel, const void* send, size_t bytes,
                                 void* receive) = 0;
  // data: [size, count] summed over ranks; receive: this rank's [count]
  virtual absl::Status ReduceScatterSum(Channel channel, const float* data, size_t count,
                                        float* receive) = 0;
  virtual absl::Status Broadcast(Channel channel, void* data, size_t bytes, int root) = 0;
  virtual absl::Status Barrier() = 0;

  // A communicator over a subset: `ranks` lists members in their new order and includes this rank.
  // All members call it, in the same order relative to other Splits. Aborting either aborts both.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(const std::vector<int>& ranks) = 0;

  // Releases every waiter here and, as far as they can be reached, on all peers, within 2 s. The
  // first call's reason stays; peers see it with this rank's name before it.
  virtual void Abort(const std::string& reason) = 0;

  // OK until aborted, then ABORTED with the reason, which names the rank that it began with.
  virtual absl::Status status() const = 0;
  // True once aborted by another rank's Abort, or because another rank is gone: a failure here is
  // then collateral.
  virtual bool aborted_by_peer() const = 0;
};

}  // namespace ringleader::comm
