#include "worker/comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/status_macros.h"
#include "worker/comm/nccl/nccl_memory.h"
#include "worker/comm/nccl/nccl_session.h"

namespace ringleader::comm {
namespace {

// How often a call that NCCL finishes in the background is asked whether it has; short against any
// transfer.
constexpr absl::Duration kPollInterval = absl::Microseconds(50);
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);
// What a channel's kernels take from computation at most (bench/results/attention_ring_bench.md).
constexpr int kThreadBlocks = 16;

struct TypeInfo {
  ncclDataType_t nccl;
  size_t bytes;
};

TypeInfo InfoOf(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return {ncclFloat32, 4};
    case ElementType::kBfloat16:
      return {ncclBfloat16, 2};
    case ElementType::kInt32:
      return {ncclInt32, 4};
    case ElementType::kInt64:
      return {ncclInt64, 8};
    case ElementType::kFloat64:
      return {ncclFloat64, 8};
  }
  return {ncclInt8, 1};
}

class NcclCommunicator : public DeviceCommunicator {
 public:
  // world_ranks: this group's members as ranks of the attempt.
  NcclCommunicator(std::shared_ptr<NcclSession> session, std::unique_ptr<Communicator> host,
                   std::vector<int> world_ranks)
      : session_(std::move(session)),
        host_(std::move(host)),
        world_ranks_(std::move(world_ranks)),
        rank_(host_->rank()),
        size_(host_->size()) {}
  ~NcclCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  absl::StatusOr<std::shared_ptr<void>> Allocate(size_t bytes,
                                                 std::span<const Channel> channels) override;
  size_t allocated_bytes() const override { return *allocated_; }
  absl::StatusOr<DeviceTransfer> SendReceive(Channel channel, const void* send, size_t send_bytes,
                                             int to, void* receive, size_t receive_bytes, int from,
                                             cudaStream_t after) override;
  absl::StatusOr<DeviceTransfer> AllReduceSum(Channel channel, void* data, size_t count,
                                              ElementType type, cudaStream_t after) override {
    return AllReduce(channel, data, count, type, ncclSum, after);
  }
  absl::StatusOr<DeviceTransfer> AllReduceMax(Channel channel, void* data, size_t count,
                                              ElementType type, cudaStream_t after) override {
    return AllReduce(channel, data, count, type, ncclMax, after);
  }
  absl::StatusOr<DeviceTransfer> AllGather(Channel channel, const void* send, size_t bytes,
                                           void* receive, cudaStream_t after) override;
  absl::StatusOr<DeviceTransfer> AllToAll(Channel channel, const void* send, size_t bytes,
                                          void* receive, cudaStream_t after) override;
  absl::StatusOr<DeviceTransfer> ReduceScatterSum(Channel channel, const void* data, size_t count,
                                                  void* receive, ElementType type,
                                                  cudaStream_t after) override;
  absl::StatusOr<DeviceTransfer> ReduceSum(Channel channel, const void* data, size_t count,
                                           void* receive, ElementType type, int root,
                                           cudaStream_t after) override;
  absl::StatusOr<DeviceTransfer> Broadcast(Channel channel, void* data, size_t bytes, int root,
                                           cudaStream_t after) override;
  absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Split(const std::vector<int>& ranks) override;
  void Abort(const std::string& reason) override { session_->Abort(reason); }
  absl::Status status() const override { return session_->status(); }

 private:
  struct Lane {
    cudaStream_t stream = nullptr;
    std::shared_ptr<WatchedComm> comm;  // null with one rank
  };

  absl::StatusOr<DeviceTransfer> AllReduce(Channel channel, void* data, size_t count,
                                           ElementType type, ncclRedOp_t reduction,
                                           cudaStream_t after);
  // The channel's stream and communicator, made at the first call.
  absl::StatusOr<Lane*> Open(Channel channel);
  absl::Status Connect(Channel channel, Lane* lane);
  absl::Status RegisterMemories(Channel channel, const Lane& lane);
  // Waits until NCCL has done what it was asked on `comm`.
  absl::Status AwaitNccl(WatchedComm& comm, const std::string& what, absl::Time deadline);

  // Puts `call(comm, stream)` on the channel's stream after what is on `after`.
  template <typename Call>
  absl::StatusOr<DeviceTransfer> Enqueue(const DeviceOperation& operation, cudaStream_t after,
                                         Call call);
  // The same with a copy, or nothing, in place of NCCL.
  absl::StatusOr<DeviceTransfer> Copy(const DeviceOperation& operation, const void* from, void* to,
                                      cudaStream_t after);

  const std::shared_ptr<NcclSession> session_;
  const std::unique_ptr<Communicator> host_;
  const std::vector<int> world_ranks_;
  const int rank_, size_;
  std::array<Lane, kChannels> lanes_;
  std::vector<std::weak_ptr<NcclMemory>> memories_;  // for lanes that open later
  const std::shared_ptr<std::atomic<size_t>> allocated_ = std::make_shared<std::atomic<size_t>>(0);
};

NcclCommunicator::~NcclCommunicator() {
  cudaSetDevice(session_->options().device);
  // All ranks let go of the channels in the same order, of each once what is enqueued is through.
  for (Lane& lane : lanes_) {
    if (lane.comm != nullptr) {
      const NcclLibrary& nccl = session_->nccl();
      bool is_finalized = false;
      if (!session_->aborted()) {
        const ncclResult_t asked = lane.comm->Use(nccl.comm_finalize);
        is_finalized = asked == ncclSuccess ||
                       (asked == ncclInProgress &&
                        AwaitNccl(*lane.comm, lane.comm->name(), BootNow() + kLeaveTimeout).ok());
      }
      session_->Forget(lane.comm.get());
      if (const ncclComm_t comm = lane.comm->Take(); comm != nullptr) {
        // What NCCL is still at work on may be aborted, not destroyed.
        is_finalized && !session_->aborted() ? nccl.comm_destroy(comm) : nccl.comm_abort(comm);
      }
    }
    // The watchdog's abort may still be at work on it.
    if (lane.stream != nullptr && !session_->aborted()) cudaStreamDestroy(lane.stream);
  }
}

absl::StatusOr<NcclCommunicator::Lane*> NcclCommunicator::Open(Channel channel) {
  if (session_->aborted()) return session_->status();
  Lane* const lane = &lanes_[static_cast<size_t>(channel)];
  if (lane->stream != nullptr) return lane;
  RETURN_IF_ERROR(CudaError(cudaSetDevice(session_->options().device), "choosing the GPU"));
  int least = 0, greatest = 0;
  RETURN_IF_ERROR(CudaError(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities"));
  cudaStream_t stream = nullptr;
  // Ahead of computation: a transfer needs few multiprocessors, but needs them at once.
  RETURN_IF_ERROR(
      CudaError(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "stream"));
  if (size_ > 1) {
    absl::Status connected = Connect(channel, lane);
    if (connected.ok()) connected = RegisterMemories(channel, *lane);
    if (!connected.ok()) {
      cudaStreamDestroy(stream);
      return session_->Fail(connected);
    }
  }
  lane->stream = stream;
  return lane;
}

absl::Status NcclCommunicator::RegisterMemories(Channel channel, const Lane& lane) {
  std::erase_if(memories_, [](const auto& memory) { return memory.expired(); });
  for (const std::weak_ptr<NcclMemory>& known : memories_) {
    if (const auto memory = known.lock()) {
      RETURN_IF_ERROR(memory->RegisterWith(channel, lane.comm));
    }
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Connect(Channel channel, Lane* lane) {
  const NcclLibrary& nccl = session_->nccl();
  const NcclOptions& options = session_->options();
  const std::string what = Describe({.name = "set-up", .channel = channel});
  ncclUniqueId id{};
  if (rank_ == 0) {
    if (const ncclResult_t result = nccl.get_unique_id(&id); result != ncclSuccess) {
      return session_->NcclError(result, what);
    }
  }
  RETURN_IF_ERROR(host_->Broadcast(channel, &id, sizeof(id), 0));

  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = kThreadBlocks;
  lane->comm = std::make_shared<WatchedComm>(what);
  ncclComm_t comm = nullptr;
  const ncclResult_t started = nccl.comm_init_rank_config(&comm, size_, id, rank_, &config);
  lane->comm->set_comm(comm);
  session_->Watch(lane->comm);
  if (started != ncclSuccess && started != ncclInProgress) {
    return session_->NcclError(started, what);
  }
  return AwaitNccl(*lane->comm, what, BootNow() + options.create_timeout);
}

absl::Status NcclCommunicator::AwaitNccl(WatchedComm& comm, const std::string& what,
                                         absl::Time deadline) {
  const NcclLibrary& nccl = session_->nccl();
  while (true) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked =
        comm.Use([&](ncclComm_t c) { return nccl.comm_get_async_error(c, &state); });
    if (session_->aborted()) return session_->status();
    if (asked != ncclSuccess) return session_->NcclError(asked, what);
    if (state == ncclSuccess) return absl::OkStatus();
    if (state != ncclInProgress) return session_->NcclError(state, what);
    if (BootNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "rank %d: %s: NCCL is not done in time; a rank is missing, or the network between nodes "
          "does not carry NCCL (see NCCL_SOCKET_IFNAME)",
          world_ranks_[rank_], what));
    }
    absl::SleepFor(kPollInterval);
  }
}

template <typename Call>
absl::StatusOr<DeviceTransfer> NcclCommunicator::Enqueue(const DeviceOperation& operation,
                                                         cudaStream_t after, Call call) {
  ASSIGN_OR_RETURN(Lane* const lane, Open(operation.channel));
  ASSIGN_OR_RETURN(const auto start, session_->events()->Record(after));
  RETURN_IF_ERROR(start->Order(lane->stream));
  const ncclResult_t result =
      lane->comm->Use([&](ncclComm_t comm) { return call(comm, lane->stream); });
  absl::Status enqueued;
  if (result == ncclInProgress) {
    enqueued =
        AwaitNccl(*lane->comm, Describe(operation), BootNow() + session_->options().create_timeout);
  } else if (result != ncclSuccess) {
    enqueued = session_->NcclError(result, Describe(operation));
  }
  if (!enqueued.ok()) {
    return session_->Fail(enqueued);
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const DeviceEventPool::Event> done,
                   session_->events()->Record(lane->stream));
  session_->Watch(operation, done);
  return DeviceTransfer(std::move(done));
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::Copy(const DeviceOperation& operation,
                                                      const void* from, void* to,
                                                      cudaStream_t after) {
  ASSIGN_OR_RETURN(Lane* const lane, Open(operation.channel));
  ASSIGN_OR_RETURN(const auto start, session_->events()->Record(after));
  RETURN_IF_ERROR(start->Order(lane->stream));
  if (from != to && operation.bytes > 0) {
    RETURN_IF_ERROR(CudaError(
        cudaMemcpyAsync(to, from, operation.bytes, cudaMemcpyDeviceToDevice, lane->stream),
        operation.name));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const DeviceEventPool::Event> done,
                   session_->events()->Record(lane->stream));
  return DeviceTransfer(std::move(done));
}

absl::StatusOr<std::shared_ptr<void>> NcclCommunicator::Allocate(
    size_t bytes, std::span<const Channel> channels) {
  if (session_->aborted()) return session_->status();
  ASSIGN_OR_RETURN(
      std::shared_ptr<NcclMemory> memory,
      NcclMemory::Create(session_, bytes, {channels.begin(), channels.end()}, allocated_));
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].comm == nullptr) continue;
    RETURN_IF_ERROR(memory->RegisterWith(static_cast<Channel>(i), lanes_[i].comm));
  }
  memories_.push_back(memory);
  void* const data = memory->data();
  return std::shared_ptr<void>(std::move(memory), data);
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::SendReceive(Channel channel, const void* send,
                                                             size_t send_bytes, int to,
                                                             void* receive, size_t receive_bytes,
                                                             int from, cudaStream_t after) {
  const bool to_self = to == rank_, from_self = from == rank_;
  if (to < -1 || to >= size_ || from < -1 || from >= size_ || to_self != from_self ||
      (to_self && send_bytes != receive_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d of %d cannot send %d bytes to %d and receive %d from %d", rank_,
                        size_, send_bytes, to, receive_bytes, from));
  }
  const DeviceOperation operation = {.name = "send and receive",
                                     .channel = channel,
                                     .bytes = std::max(send_bytes, receive_bytes),
                                     .to = to < 0 ? -1 : world_ranks_[to],
                                     .from = from < 0 ? -1 : world_ranks_[from]};
  if (size_ == 1 && to < 0) return Copy(operation, nullptr, nullptr, after);
  if (to_self) return Copy(operation, send, receive, after);
  const NcclLibrary& nccl = session_->nccl();
  return Enqueue(operation, after, [&](ncclComm_t comm, cudaStream_t stream) {
    // Both directions are one group, so that neither waits for the other.
    ncclResult_t result = nccl.group_start();
    if (result == ncclSuccess && to >= 0) {
      result = nccl.send(send, send_bytes, ncclUint8, to, comm, stream);
    }
    if ((result == ncclSuccess || result == ncclInProgress) && from >= 0) {
      result = nccl.recv(receive, receive_bytes, ncclUint8, from, comm, stream);
    }
    const ncclResult_t ended = nccl.group_end();
    return result == ncclSuccess || result == ncclInProgress ? ended : result;
  });
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::AllReduce(Channel channel, void* data,
                                                           size_t count, ElementType type,
                                                           ncclRedOp_t reduction,
                                                           cudaStream_t after) {
  const auto [nccl_type, bytes] = InfoOf(type);
  const DeviceOperation operation = {
      .name = "all-reduce", .channel = channel, .bytes = count * bytes};
  if (size_ == 1) return Copy(operation, data, data, after);
  return Enqueue(operation, after, [&, type = nccl_type](ncclComm_t comm, cudaStream_t stream) {
    return session_->nccl().all_reduce(data, data, count, type, reduction, comm, stream);
  });
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::AllGather(Channel channel, const void* send,
                                                           size_t bytes, void* receive,
                                                           cudaStream_t after) {
  const DeviceOperation operation = {.name = "all-gather", .channel = channel, .bytes = bytes};
  if (size_ == 1) return Copy(operation, send, receive, after);
  return Enqueue(operation, after, [&](ncclComm_t comm, cudaStream_t stream) {
    return session_->nccl().all_gather(send, receive, bytes, ncclUint8, comm, stream);
  });
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::AllToAll(Channel channel, const void* send,
                                                          size_t bytes, void* receive,
                                                          cudaStream_t after) {
  const DeviceOperation operation = {
      .name = "all-to-all", .channel = channel, .bytes = size_ * bytes};
  if (size_ == 1) return Copy(operation, send, receive, after);
  const NcclLibrary& nccl = session_->nccl();
  return Enqueue(operation, after, [&](ncclComm_t comm, cudaStream_t stream) {
    const auto went_well = [](ncclResult_t result) {
      return result == ncclSuccess || result == ncclInProgress;
    };
    // All of it is one group, so that no part waits for another.
    ncclResult_t result = nccl.group_start();
    for (int r = 0; r < size_ && went_well(result); ++r) {
      result =
          nccl.send(static_cast<const char*>(send) + r * bytes, bytes, ncclUint8, r, comm, stream);
      if (!went_well(result)) break;
      result =
          nccl.recv(static_cast<char*>(receive) + r * bytes, bytes, ncclUint8, r, comm, stream);
    }
    const ncclResult_t ended = nccl.group_end();
    return went_well(result) ? ended : result;
  });
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::ReduceScatterSum(Channel channel, const void* data,
                                                                  size_t count, void* receive,
                                                                  ElementType type,
                                                                  cudaStream_t after) {
  const auto [nccl_type, bytes] = InfoOf(type);
  const DeviceOperation operation = {
      .name = "reduce-scatter", .channel = channel, .bytes = count * bytes};
  if (size_ == 1) return Copy(operation, data, receive, after);
  return Enqueue(operation, after, [&, type = nccl_type](ncclComm_t comm, cudaStream_t stream) {
    return session_->nccl().reduce_scatter(data, receive, count, type, ncclSum, comm, stream);
  });
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::ReduceSum(Channel channel, const void* data,
                                                           size_t count, void* receive,
                                                           ElementType type, int root,
                                                           cudaStream_t after) {
  const auto [nccl_type, bytes] = InfoOf(type);
  const DeviceOperation operation = {
      .name = "reduce", .channel = channel, .bytes = count * bytes, .to = world_ranks_.at(root)};
  if (size_ == 1) return Copy(operation, data, receive, after);
  return Enqueue(operation, after, [&, type = nccl_type](ncclComm_t comm, cudaStream_t stream) {
    return session_->nccl().reduce(data, receive, count, type, ncclSum, root, comm, stream);
  });
}

absl::StatusOr<DeviceTransfer> NcclCommunicator::Broadcast(Channel channel, void* data,
                                                           size_t bytes, int root,
                                                           cudaStream_t after) {
  const DeviceOperation operation = {
      .name = "broadcast", .channel = channel, .bytes = bytes, .from = world_ranks_.at(root)};
  if (size_ == 1) return Copy(operation, data, data, after);
  return Enqueue(operation, after, [&](ncclComm_t comm, cudaStream_t stream) {
    return session_->nccl().broadcast(data, data, bytes, ncclUint8, root, comm, stream);
  });
}

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> NcclCommunicator::Split(
    const std::vector<int>& ranks) {
  // Channels get ids of their own from the subset's first rank: no resources are shared, so the
  // parent and its parts never wait for each other.
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host, host_->Split(ranks));
  std::vector<int> members;
  members.reserve(ranks.size());
  for (const int rank : ranks) members.push_back(world_ranks_[rank]);
  return std::make_unique<NcclCommunicator>(session_, std::move(host), std::move(members));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> CreateNcclCommunicator(
    const NcclOptions& options, Communicator* host) {
  const NcclLibrary* nccl = nullptr;
  if (host->size() > 1) {
    ASSIGN_OR_RETURN(nccl, LoadNccl());
  }
  RETURN_IF_ERROR(CudaError(cudaSetDevice(options.device), "choosing the GPU"));
  // A group of its own: its messages never meet others' on the host's channels.
  std::vector<int> all(host->size());
  std::iota(all.begin(), all.end(), 0);
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> own, host->Split(all));
  auto session = std::make_shared<NcclSession>(options, nccl, host);
  return std::make_unique<NcclCommunicator>(std::move(session), std::move(own), std::move(all));
}

}  // namespace ringleader::comm
