// On real GPUs: one thread a rank, each with a GPU of its own. Under tests/gpu/hosts.sh ranks of
// different processes may share one.
#include "worker/comm/nccl/nccl_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "worker/comm/testing/hosts.h"

namespace ringleader::comm {
namespace {

int Gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void CheckCuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(value.status().ToString());
  return *std::move(value);
}

// Device memory of one rank, filled from and read to the host.
class Buffer {
 public:
  explicit Buffer(const std::vector<float>& values) : count_(values.size()) {
    CheckCuda(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()));
    CheckCuda(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  explicit Buffer(size_t count) : Buffer(std::vector<float>(count, -1.0f)) {}
  ~Buffer() { cudaFree(data_); }
  float* data() const { return data_; }
  size_t bytes() const { return count_ * sizeof(float); }
  std::vector<float> Read(cudaStream_t stream) const {
    std::vector<float> values(count_);
    CheckCuda(cudaMemcpyAsync(values.data(), data_, bytes(), cudaMemcpyDeviceToHost, stream));
    CheckCuda(cudaStreamSynchronize(stream));
    return values;
  }

 private:
  const size_t count_;
  float* data_ = nullptr;
};

struct Rank {
  int rank, size;
  DeviceCommunicator& device;
  Communicator& host;
  cudaStream_t stream;
};

// `body(Rank&)` on a thread and GPU for each of `ranks`.
template <typename Body>
void OnGpus(int ranks, NcclOptions options, Body body) {
  testing::RunRanks(testing::HostCommunicators(ranks), [&](Communicator& host) {
    NcclOptions own = options;
    own.device = host.rank() % std::max(Gpus(), 1);
    CheckCuda(cudaSetDevice(own.device));
    cudaStream_t stream = nullptr;
    CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    auto device = Must(CreateNcclCommunicator(own, &host));
    Rank rank{host.rank(), host.size(), *device, host, stream};
    body(rank);
    device.reset();
    host.Barrier().IgnoreError();  // ranks in other processes leave together
  });
}

// All of this with one rank, and with two and more where there are as many GPUs, or hosts that
// share them.
class NcclCommunicatorTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const int hosts = testing::TestHosts().count;
    if (Gpus() * hosts < GetParam()) {
      GTEST_SKIP() << "needs " << GetParam() << " GPUs, has " << Gpus() << " for each of " << hosts
                   << " hosts";
    }
  }
};

TEST_P(NcclCommunicatorTest, RingTransfersReachTheNextRank) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    const size_t count = 1 << 20;
    Buffer send(std::vector<float>(count, static_cast<float>(r.rank))), receive(count);
    const int next = (r.rank + 1) % r.size, previous = (r.rank + r.size - 1) % r.size;
    for (const Channel channel : {Channel::kKvInner, Channel::kGradKv}) {
      const DeviceTransfer transfer =
          Must(r.device.SendReceive(channel, send.data(), send.bytes(), next, receive.data(),
                                    receive.bytes(), previous, r.stream));
      EXPECT_TRUE(transfer->Order(r.stream).ok());
      EXPECT_EQ(receive.Read(r.stream), std::vector<float>(count, static_cast<float>(previous)));
    }
  });
}

// Slots of one piece of memory that travel once around, as those of ring attention do.
TEST_P(NcclCommunicatorTest, AllocatedMemoryTravelsLikeAnyOther) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    const size_t count = 4 << 20;
    const int next = (r.rank + 1) % r.size, previous = (r.rank + r.size - 1) % r.size;
    Buffer other(count);  // opens one of the channels before there is memory for it
    Must(r.device.SendReceive(Channel::kKvInner, other.data(), 4, next, other.data() + 1, 4,
                              previous, r.stream));
    const Channel channels[] = {Channel::kKvInner, Channel::kGradKv};
    std::shared_ptr<void> memory = Must(r.device.Allocate(2 * count * sizeof(float), channels));
    EXPECT_EQ(r.device.allocated_bytes(), 2 * count * sizeof(float));
    const auto slots = static_cast<float*>(memory.get());
    for (const Channel channel : channels) {
      const std::vector<float> own(count, static_cast<float>(r.rank));
      CheckCuda(cudaMemcpyAsync(slots, own.data(), count * sizeof(float), cudaMemcpyHostToDevice,
                                r.stream));
      for (int hop = 0; hop < r.size; ++hop) {
        float* const from = slots + hop % 2 * count;
        float* const to = slots + (hop + 1) % 2 * count;
        const DeviceTransfer transfer =
            Must(r.device.SendReceive(channel, from, count * sizeof(float), next, to,
                                      count * sizeof(float), previous, r.stream));
        EXPECT_TRUE(transfer->Order(r.stream).ok());
        std::vector<float> arrived(count);
        CheckCuda(cudaMemcpyAsync(arrived.data(), to, count * sizeof(float), cudaMemcpyDeviceToHost,
                                  r.stream));
        CheckCuda(cudaStreamSynchronize(r.stream));
        EXPECT_EQ(arrived, std::vector<float>(
                               count, static_cast<float>((r.rank + r.size - hop - 1) % r.size)));
      }
    }
    memory.reset();
    EXPECT_EQ(r.device.allocated_bytes(), 0u);
  });
}

TEST_P(NcclCommunicatorTest, MemoryThatTheGpuDoesNotHaveIsRefusedWithTheNumbers) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    const Channel channels[] = {Channel::kKvInner};
    const auto memory = r.device.Allocate(size_t{1} << 42, channels);
    EXPECT_TRUE(absl::IsResourceExhausted(memory.status())) << memory.status();
    EXPECT_THAT(memory.status().message(), ::testing::HasSubstr("4096.00 GiB"));
    EXPECT_EQ(r.device.allocated_bytes(), 0u);
  });
}

TEST_P(NcclCommunicatorTest, ATransferWaitsForWhatIsEnqueuedBeforeIt) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    const size_t count = 64 << 20;  // 256 MiB: the copies below take long enough to overtake
    Buffer source(std::vector<float>(count, 1.0f + static_cast<float>(r.rank))), data(count);
    for (int i = 0; i < 20; ++i) {
      CheckCuda(cudaMemcpyAsync(data.data(), source.data(), data.bytes(), cudaMemcpyDeviceToDevice,
                                r.stream));
    }
    Must(r.device.AllReduceSum(Channel::kGradients, data.data(), count, ElementType::kFloat32,
                               r.stream))
        ->Order(r.stream)
        .IgnoreError();
    const float sum = static_cast<float>(r.size * (r.size + 1)) / 2;
    const std::vector<float> result = data.Read(r.stream);
    EXPECT_EQ(result.front(), sum);
    EXPECT_EQ(result.back(), sum);
  });
}

TEST_P(NcclCommunicatorTest, CollectivesMatchTheirDefinition) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    const size_t count = 1000;
    std::vector<float> whole(count * r.size);
    std::iota(whole.begin(), whole.end(), static_cast<float>(r.rank));
    const auto sum_at = [&](size_t i) {
      return static_cast<float>(i * r.size) + static_cast<float>(r.size * (r.size - 1)) / 2;
    };

    Buffer data(whole), part(count);
    Must(r.device.ReduceScatterSum(Channel::kGradients, data.data(), count, part.data(),
                                   ElementType::kFloat32, r.stream))
        ->Order(r.stream)
        .IgnoreError();
    EXPECT_EQ(part.Read(r.stream)[7], sum_at(r.rank * count + 7));

    Buffer gathered(whole.size());
    Must(
        r.device.AllGather(Channel::kControl, part.data(), part.bytes(), gathered.data(), r.stream))
        ->Order(r.stream)
        .IgnoreError();
    EXPECT_EQ(gathered.Read(r.stream).back(), sum_at(whole.size() - 1));

    // Part s of rank r holds r + s × count and what follows.
    Buffer parts(whole.size());
    Must(r.device.AllToAll(Channel::kKvInner, data.data(), count * sizeof(float), parts.data(),
                           r.stream))
        ->Order(r.stream)
        .IgnoreError();
    const std::vector<float> received = parts.Read(r.stream);
    for (int sender = 0; sender < r.size; ++sender) {
      EXPECT_EQ(received[sender * count + 9], static_cast<float>(sender + r.rank * count + 9));
    }

    const int root = r.size - 1;
    Buffer reduced(whole.size());
    Must(r.device.ReduceSum(Channel::kGradients, data.data(), whole.size(), reduced.data(),
                            ElementType::kFloat32, root, r.stream))
        ->Order(r.stream)
        .IgnoreError();
    EXPECT_EQ(reduced.Read(r.stream)[11], r.rank == root ? sum_at(11) : -1.0f);
    Must(r.device.Broadcast(Channel::kControl, reduced.data(), reduced.bytes(), root, r.stream))
        ->Order(r.stream)
        .IgnoreError();
    EXPECT_EQ(reduced.Read(r.stream)[11], sum_at(11));

    Buffer largest(std::vector<float>(3, static_cast<float>(r.rank)));
    Must(r.device.AllReduceMax(Channel::kControl, largest.data(), 3, ElementType::kFloat32,
                               r.stream))
        ->Order(r.stream)
        .IgnoreError();
    EXPECT_EQ(largest.Read(r.stream)[2], static_cast<float>(r.size - 1));
  });
}

TEST_P(NcclCommunicatorTest, AGroupHasTransfersOfItsOwn) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    // Ranks in pairs, the last one alone where their number is odd, in reverse order.
    std::vector<int> members;
    for (int m = std::min(r.size - 1, r.rank / 2 * 2 + 1); m >= r.rank / 2 * 2; --m) {
      members.push_back(m);
    }
    const auto pair = Must(r.device.Split(members));
    Buffer value(std::vector<float>(1, static_cast<float>(r.rank)));
    Must(pair->AllReduceSum(Channel::kControl, value.data(), 1, ElementType::kFloat32, r.stream))
        ->Order(r.stream)
        .IgnoreError();
    const int expected = std::accumulate(members.begin(), members.end(), 0);
    EXPECT_EQ(value.Read(r.stream)[0], static_cast<float>(expected));
    EXPECT_EQ(members[pair->rank()], r.rank);
  });
}

TEST_P(NcclCommunicatorTest, AbortEndsWhatIsEnqueuedOnAllRanks) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank waits for nobody";
  OnGpus(GetParam(), {}, [](Rank& r) {
    Buffer data(std::vector<float>(1 << 20, 1.0f));
    Must(r.device.AllReduceSum(Channel::kKvInner, data.data(), 1 << 20, ElementType::kFloat32,
                               r.stream))
        ->Order(r.stream)
        .IgnoreError();
    data.Read(r.stream);
    if (r.rank == 0) {
      // Its peers' transfer can never end by itself.
      absl::SleepFor(absl::Milliseconds(300));
      r.device.Abort("rank 0 has had enough");
    } else {
      const DeviceTransfer transfer = Must(r.device.AllReduceSum(
          Channel::kKvInner, data.data(), 1 << 20, ElementType::kFloat32, r.stream));
      transfer->Order(r.stream).IgnoreError();
      cudaStreamSynchronize(r.stream);  // hangs unless the abort arrives
    }
    EXPECT_EQ(r.device.status().code(), absl::StatusCode::kAborted);
    EXPECT_NE(std::string(r.device.status().message()).find("had enough"), std::string::npos);
    EXPECT_EQ(
        r.device.AllReduceSum(Channel::kKvInner, data.data(), 1, ElementType::kFloat32, r.stream)
            .status()
            .code(),
        absl::StatusCode::kAborted);
    EXPECT_FALSE(r.host.status().ok());
  });
}

// The first transfer between two ranks connects them, which takes both.
TEST_P(NcclCommunicatorTest, AbortEndsACallThatWaitsForItsPeer) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank waits for nobody";
  OnGpus(GetParam(), {}, [](Rank& r) {
    Buffer data(std::vector<float>(1 << 20, 1.0f));
    Must(r.device.AllReduceSum(Channel::kKvInner, data.data(), 1, ElementType::kFloat32, r.stream));
    data.Read(r.stream);
    const absl::Time start = absl::Now();
    if (r.rank == 0) {
      absl::SleepFor(absl::Milliseconds(300));
      r.device.Abort("rank 0 has had enough");
    } else if (r.rank == 1) {
      r.device
          .SendReceive(Channel::kKvInner, nullptr, 0, -1, data.data(), data.bytes(), 0, r.stream)
          .IgnoreError();
      cudaStreamSynchronize(r.stream);
    }
    while (r.device.status().ok()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_LT(absl::Now() - start, absl::Seconds(5));
    EXPECT_NE(std::string(r.device.status().message()).find("had enough"), std::string::npos);
  });
}

TEST_P(NcclCommunicatorTest, ATransferCostsTheHostLittle) {
  OnGpus(GetParam(), {}, [](Rank& r) {
    constexpr int kTransfers = 200;
    Buffer send(1024), receive(1024);
    const auto transfer = [&] {
      Must(r.device.SendReceive(Channel::kKvInner, send.data(), send.bytes(), (r.rank + 1) % r.size,
                                receive.data(), receive.bytes(), (r.rank + r.size - 1) % r.size,
                                r.stream));
    };
    transfer();  // connects
    receive.Read(r.stream);
    const absl::Time start = absl::Now();
    for (int i = 0; i < kTransfers; ++i) transfer();
    const double microseconds = absl::ToDoubleMicroseconds(absl::Now() - start) / kTransfers;
    receive.Read(r.stream);
    std::printf("rank %d of %d: a transfer costs the host %.0f us\n", r.rank, r.size, microseconds);
    EXPECT_LT(microseconds, 10'000);
  });
}

TEST_P(NcclCommunicatorTest, TheWatchdogNamesAnOverdueTransfer) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank waits for nobody";
  OnGpus(GetParam(), {.transfer_timeout = absl::Seconds(1)}, [](Rank& r) {
    Buffer data(std::vector<float>(1024, 1.0f)), received(1024);
    // One transfer around the ring connects all pairs.
    Must(r.device.SendReceive(Channel::kKvInner, data.data(), data.bytes(), (r.rank + 1) % r.size,
                              received.data(), received.bytes(), (r.rank + r.size - 1) % r.size,
                              r.stream))
        ->Order(r.stream)
        .IgnoreError();
    received.Read(r.stream);
    if (r.rank == 1) {
      // Rank 0 does not send again.
      Must(r.device.SendReceive(Channel::kKvInner, nullptr, 0, -1, data.data(), data.bytes(), 0,
                                r.stream))
          ->Order(r.stream)
          .IgnoreError();
      cudaStreamSynchronize(r.stream);
    }
    while (r.device.status().ok()) absl::SleepFor(absl::Milliseconds(10));
    const std::string message(r.device.status().message());
    EXPECT_NE(message.find("kv_inner send and receive of 4096 bytes, from rank 0"),
              std::string::npos)
        << message;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclCommunicatorTest, ::testing::Values(1, 2, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Gpus"; });

}  // namespace
}  // namespace ringleader::comm
