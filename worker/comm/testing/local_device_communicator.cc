#include "worker/comm/testing/local_device_communicator.h"

#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "worker/comm/testing/reduce.h"

namespace ringleader::comm::testing {
namespace {

absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("%s: %s", what, cudaGetErrorString(error)));
}

// A point on a stream, for the streams of other ranks too.
class Point {
 public:
  static absl::StatusOr<std::shared_ptr<Point>> Record(cudaStream_t stream) {
    auto point = std::make_shared<Point>();
    RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&point->event_, cudaEventDisableTiming), "event"));
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(point->event_, stream), "event"));
    return point;
  }
  ~Point() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  absl::Status Order(cudaStream_t stream) const {
    return CudaStatus(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event");
  }

 private:
  cudaEvent_t event_ = nullptr;
};
using PointPtr = std::shared_ptr<Point>;

class AllPoints : public DeviceEvent {
 public:
  explicit AllPoints(std::vector<PointPtr> points) : points_(std::move(points)) {}
  absl::Status Order(cudaStream_t stream) const override {
    for (const PointPtr& point : points_) RETURN_IF_ERROR(point->Order(stream));
    return absl::OkStatus();
  }

 private:
  const std::vector<PointPtr> points_;
};

// What a rank brings to a call.
struct Part {
  const void* send = nullptr;
  size_t send_bytes = 0;
  int to = -1;
  PointPtr point = nullptr;
};

// Where the ranks of a group meet.
class Group {
 public:
  explicit Group(int ranks) : ranks_(ranks) {}
  int ranks() const { return ranks_; }

  // The parts of all ranks, once they are there. `turn` numbers the meetings of a channel.
  absl::StatusOr<std::vector<Part>> Meet(int rank, Channel channel, uint64_t turn, Part part)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Meeting& meeting = meetings_[{channel, turn}];
    if (meeting.parts.empty()) meeting.parts.resize(ranks_);
    meeting.parts[rank] = std::move(part);
    ++meeting.arrived;
    const auto complete = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return meeting.arrived == ranks_ || !status_.ok();
    };
    mutex_.Await(absl::Condition(&complete));
    RETURN_IF_ERROR(status_);
    const std::vector<Part> parts = meeting.parts;
    if (++meeting.left == ranks_) meetings_.erase({channel, turn});
    return parts;
  }

  // The group of `ranks`, the same object for all of them. This group's Abort reaches it.
  std::shared_ptr<Group> Subgroup(const std::vector<int>& ranks, uint64_t turn) {
    absl::MutexLock lock(&mutex_);
    std::shared_ptr<Group>& group = subgroups_[{ranks, turn}];
    if (group == nullptr) group = std::make_shared<Group>(static_cast<int>(ranks.size()));
    return group;
  }

  void Abort(const std::string& reason) {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ = absl::AbortedError(reason);
    for (const auto& [key, group] : subgroups_) group->Abort(reason);
  }
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  struct Meeting {
    std::vector<Part> parts;
    int arrived = 0, left = 0;
  };

  const int ranks_;
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<Channel, uint64_t>, Meeting> meetings_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::vector<int>, uint64_t>, std::shared_ptr<Group>> subgroups_
      ABSL_GUARDED_BY(mutex_);
};

class LocalDeviceCommunicator : public DeviceCommunicator {
 public:
  LocalDeviceCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank) {
    for (cudaStream_t& stream : streams_) {
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    }
  }
  ~LocalDeviceCommunicator() override {
    for (const cudaStream_t stream : streams_) {
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return group_->ranks(); }

  absl::StatusOr<std::shared_ptr<void>> Allocate(size_t bytes, std::span<const Channel>) override {
    void* data = nullptr;
    RETURN_IF_ERROR(CudaStatus(cudaMalloc(&data, bytes), "memory"));
    // NaN in every floating format, so that what is read and nobody wrote shows. No stream of a
    // rank waits for the one that this is enqueued on.
    RETURN_IF_ERROR(CudaStatus(cudaMemset(data, 0xff, bytes), "memory"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(nullptr), "memory"));
    *allocated_ += bytes;
    return std::shared_ptr<void>(data, [allocated = allocated_, bytes](void* memory) {
      cudaDeviceSynchronize();  // what is enqueued may use it
      cudaFree(memory);
      *allocated -= bytes;
    });
  }
  size_t allocated_bytes() const override { return *allocated_; }

  absl::StatusOr<DeviceTransfer> SendReceive(Channel channel, const void* send, size_t send_bytes,
                                             int to, void* receive, size_t receive_bytes, int from,
                                             cudaStream_t after) override {
    return Call(channel, {.send = send, .send_bytes = send_bytes, .to = to}, after,
                [&](const std::vector<Part>& parts, cudaStream_t stream) -> absl::Status {
                  if (from < 0) return absl::OkStatus();
                  if (parts[from].to != rank_ || parts[from].send_bytes != receive_bytes) {
                    return absl::InvalidArgumentError(absl::StrFormat(
                        "rank %d awaits %d bytes of rank %d, which sends %d to %d", rank_,
                        receive_bytes, from, parts[from].send_bytes, parts[from].to));
                  }
                  return Copy(receive, parts[from].send, receive_bytes, stream);
                });
  }

  absl::StatusOr<DeviceTransfer> AllReduceSum(Channel channel, void* data, size_t count,
                                              ElementType type, cudaStream_t after) override {
    return ReduceTo(channel, data, 0, data, count, type, /*maximum=*/false, after);
  }
  absl::StatusOr<DeviceTransfer> AllReduceMax(Channel channel, void* data, size_t count,
                                              ElementType type, cudaStream_t after) override {
    return ReduceTo(channel, data, 0, data, count, type, /*maximum=*/true, after);
  }
  absl::StatusOr<DeviceTransfer> AllGather(Channel channel, const void* send, size_t bytes,
                                           void* receive, cudaStream_t after) override {
    return Call(channel, {.send = send}, after,
                [&](const std::vector<Part>& parts, cudaStream_t stream) -> absl::Status {
                  for (size_t peer = 0; peer < parts.size(); ++peer) {
                    RETURN_IF_ERROR(Copy(static_cast<char*>(receive) + peer * bytes,
                                         parts[peer].send, bytes, stream));
                  }
                  return absl::OkStatus();
                });
  }
  absl::StatusOr<DeviceTransfer> AllToAll(Channel channel, const void* send, size_t bytes,
                                          void* receive, cudaStream_t after) override {
    return Call(channel, {.send = send}, after,
                [&](const std::vector<Part>& parts, cudaStream_t stream) -> absl::Status {
                  for (size_t peer = 0; peer < parts.size(); ++peer) {
                    RETURN_IF_ERROR(Copy(static_cast<char*>(receive) + peer * bytes,
                                         static_cast<const char*>(parts[peer].send) + rank_ * bytes,
                                         bytes, stream));
                  }
                  return absl::OkStatus();
                });
  }
  absl::StatusOr<DeviceTransfer> ReduceScatterSum(Channel channel, const void* data, size_t count,
                                                  void* receive, ElementType type,
                                                  cudaStream_t after) override {
    return ReduceTo(channel, data, rank_ * count, receive, count, type, /*maximum=*/false, after);
  }
  absl::StatusOr<DeviceTransfer> ReduceSum(Channel channel, const void* data, size_t count,
                                           void* receive, ElementType type, int root,
                                           cudaStream_t after) override {
    return ReduceTo(channel, data, 0, rank_ == root ? receive : nullptr, count, type,
                    /*maximum=*/false, after);
  }
  absl::StatusOr<DeviceTransfer> Broadcast(Channel channel, void* data, size_t bytes, int root,
                                           cudaStream_t after) override {
    return Call(channel, {.send = data}, after,
                [&](const std::vector<Part>& parts, cudaStream_t stream) {
                  return Copy(data, parts[root].send, bytes, stream);
                });
  }

  absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Split(
      const std::vector<int>& ranks) override {
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] != rank_) continue;
      return std::make_unique<LocalDeviceCommunicator>(group_->Subgroup(ranks, splits_[ranks]++),
                                                       static_cast<int>(i));
    }
    return absl::InvalidArgumentError(absl::StrFormat("rank %d is not in the split", rank_));
  }

  void Abort(const std::string& reason) override { group_->Abort(reason); }
  absl::Status status() const override { return group_->status(); }

 private:
  static size_t BytesOf(ElementType type) {
    switch (type) {
      case ElementType::kBfloat16:
        return 2;
      case ElementType::kInt64:
      case ElementType::kFloat64:
        return 8;
      case ElementType::kInt32:
      case ElementType::kFloat32:
        break;
    }
    return 4;
  }
  static absl::Status Copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    if (to == from || bytes == 0) return absl::OkStatus();
    return CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy");
  }

  // Enqueues `read` once all ranks' buffers are ready, then `write` once all ranks have read.
  template <typename Read, typename Write>
  absl::StatusOr<DeviceTransfer> Call(Channel channel, Part part, cudaStream_t after, Read read,
                                      Write write) {
    const size_t at = static_cast<size_t>(channel);
    const cudaStream_t stream = streams_[at];
    ASSIGN_OR_RETURN(part.point, Point::Record(after));
    ASSIGN_OR_RETURN(const std::vector<Part> parts,
                     group_->Meet(rank_, channel, turns_[at]++, std::move(part)));
    for (const Part& peer : parts) RETURN_IF_ERROR(peer.point->Order(stream));
    RETURN_IF_ERROR(read(parts, stream));
    Part done;
    ASSIGN_OR_RETURN(done.point, Point::Record(stream));
    ASSIGN_OR_RETURN(const std::vector<Part> all_done,
                     group_->Meet(rank_, channel, turns_[at]++, std::move(done)));
    std::vector<PointPtr> points;
    for (const Part& peer : all_done) {
      points.push_back(peer.point);
      RETURN_IF_ERROR(peer.point->Order(stream));
    }
    RETURN_IF_ERROR(write(stream));
    ASSIGN_OR_RETURN(PointPtr written, Point::Record(stream));
    points.push_back(std::move(written));
    return std::make_shared<AllPoints>(std::move(points));
  }
  template <typename Read>
  absl::StatusOr<DeviceTransfer> Call(Channel channel, Part part, cudaStream_t after, Read read) {
    return Call(channel, std::move(part), after, read,
                [](cudaStream_t) { return absl::OkStatus(); });
  }

  // `receive` may be null, or overlap with `data`.
  absl::StatusOr<DeviceTransfer> ReduceTo(Channel channel, const void* data, size_t offset,
                                          void* receive, size_t count, ElementType type,
                                          bool maximum, cudaStream_t after) {
    const size_t bytes = count * BytesOf(type);
    void* sum = nullptr;
    return Call(
        channel, {.send = data}, after,
        [&](const std::vector<Part>& parts, cudaStream_t stream) -> absl::Status {
          RETURN_IF_ERROR(CudaStatus(cudaMallocAsync(&sum, bytes, stream), "memory of a sum"));
          std::vector<const void*> inputs;
          inputs.reserve(parts.size());
          for (const Part& peer : parts) {
            inputs.push_back(static_cast<const char*>(peer.send) + offset * BytesOf(type));
          }
          return CudaStatus(Reduce(inputs, count, type, maximum, sum, stream), "sum");
        },
        [&](cudaStream_t stream) -> absl::Status {
          if (receive != nullptr) RETURN_IF_ERROR(Copy(receive, sum, bytes, stream));
          return CudaStatus(cudaFreeAsync(sum, stream), "memory of a sum");
        });
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
  std::array<cudaStream_t, kChannels> streams_ = {};
  std::array<uint64_t, kChannels> turns_ = {};
  std::map<std::vector<int>, uint64_t> splits_;
  const std::shared_ptr<std::atomic<size_t>> allocated_ = std::make_shared<std::atomic<size_t>>(0);
};

}  // namespace

std::vector<std::unique_ptr<DeviceCommunicator>> LocalDeviceCommunicators(int ranks) {
  auto group = std::make_shared<Group>(ranks);
  std::vector<std::unique_ptr<DeviceCommunicator>> communicators;
  communicators.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(std::make_unique<LocalDeviceCommunicator>(group, rank));
  }
  return communicators;
}

void RunDeviceRanks(int ranks, const std::function<void(DeviceCommunicator&)>& body) {
  const auto communicators = LocalDeviceCommunicators(ranks);
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (const auto& communicator : communicators) {
    threads.emplace_back([&, communicator = communicator.get()] {
      try {
        body(*communicator);
      } catch (...) {
        {
          std::lock_guard lock(mutex);
          if (first_error == nullptr) first_error = std::current_exception();
        }
        communicator->Abort("its test body threw");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

}  // namespace ringleader::comm::testing
