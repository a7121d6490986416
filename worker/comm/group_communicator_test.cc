#include "worker/comm/group_communicator.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/testing/grpc_communicators.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::comm {
namespace {

using ::testing::ElementsAre;

constexpr Channel kChannel = Channel::kGradients;

using CommunicatorFactory = std::vector<std::unique_ptr<Communicator>> (*)(int ranks);

// The same behaviour is asked of threads and of gRPC streams.
class GroupCommunicatorTest : public ::testing::TestWithParam<CommunicatorFactory> {
 protected:
  template <typename Body>
  void RunRanks(int ranks, Body body) {
    testing::RunRanks(GetParam()(ranks), body);
  }
};

INSTANTIATE_TEST_SUITE_P(Implementations, GroupCommunicatorTest,
                         ::testing::Values(&testing::LocalCommunicators,
                                           &testing::GrpcCommunicators),
                         [](const auto& info) { return info.index == 0 ? "Threads" : "Grpc"; });

TEST_P(GroupCommunicatorTest, RingOfSendReceivePassesEveryRanksData) {
  RunRanks(4, [](Communicator& comm) {
    int held = comm.rank() * 10;
    for (int step = 1; step < comm.size(); ++step) {
      int arrived = -1;
      auto transfer = comm.SendReceive(Channel::kKvInner, &held, sizeof(int), (comm.rank() + 1) % 4,
                                       &arrived, sizeof(int), (comm.rank() + 3) % 4);
      ASSERT_TRUE(transfer->Wait().ok());
      held = arrived;
      EXPECT_EQ(held, (comm.rank() - step + 4) % 4 * 10);
    }
  });
}

TEST_P(GroupCommunicatorTest, SendsToItself) {
  RunRanks(2, [](Communicator& comm) {
    const int out = comm.rank() + 7;
    int in = 0;
    ASSERT_TRUE(
        comm.SendReceive(kChannel, &out, sizeof(out), comm.rank(), &in, sizeof(in), comm.rank())
            ->Wait()
            .ok());
    EXPECT_EQ(in, out);
  });
}

TEST_P(GroupCommunicatorTest, AnotherNumberOfBytesIsAnError) {
  RunRanks(2, [](Communicator& comm) {
    int64_t out = 1, in = 0;
    const int peer = 1 - comm.rank();
    const absl::Status status =
        comm.SendReceive(kChannel, &out, comm.rank() == 0 ? 8 : 4, peer, &in, 8, peer)->Wait();
    // Rank 1 sent too little; whether it is told depends on the implementation.
    if (comm.rank() == 0) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
  });
}

// Rank 1's part of rank 0's collective is too short, rank 2's, which comes after it, is whole.
TEST_P(GroupCommunicatorTest, ACollectiveFailsWithAnyOfItsTransfers) {
  RunRanks(3, [](Communicator& comm) {
    const int64_t out = 1;
    int64_t all[3] = {};
    if (comm.rank() != 1) {
      const absl::Status status = comm.AllGather(kChannel, &out, sizeof(out), all);
      if (comm.rank() == 0) {
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      }
      return;
    }
    const auto to_first = comm.SendReceive(kChannel, &out, 4, 0, &all[0], 8, 0);
    const auto to_last = comm.SendReceive(kChannel, &out, 8, 2, &all[2], 8, 2);
    to_first->Wait().IgnoreError();  // whether rank 1 is told depends on the implementation
    to_last->Wait().IgnoreError();
  });
}

TEST_P(GroupCommunicatorTest, ReducesInRankOrderAtEverySize) {
  // 1e8 + 1 - 1e8 depends on the order in fp32: rank order loses the one.
  const float addend[] = {1e8f, 1.0f, -1e8f};
  for (size_t count : {1, 3, 4096, 4097, 10001}) {
    RunRanks(3, [&](Communicator& comm) {
      std::vector<float> data(count, addend[comm.rank()]);
      ASSERT_TRUE(comm.AllReduceSum(kChannel, data.data(), count).ok());
      EXPECT_EQ(data, std::vector<float>(count, 0.0f));
    });
  }
}

TEST_P(GroupCommunicatorTest, LargeAllReduceTakesSeveralRounds) {
  const size_t count = (size_t{4} << 20) + 5;
  RunRanks(2, [&](Communicator& comm) {
    std::vector<float> data(count);
    std::iota(data.begin(), data.end(), comm.rank());
    ASSERT_TRUE(comm.AllReduceSum(kChannel, data.data(), count).ok());
    EXPECT_EQ(data[3], 7.0f);
    EXPECT_EQ(data.back(), static_cast<float>(count - 1) + static_cast<float>(count));
  });
}

TEST_P(GroupCommunicatorTest, OtherCollectives) {
  RunRanks(3, [](Communicator& comm) {
    const int rank = comm.rank();
    double sum = rank + 0.5;
    ASSERT_TRUE(comm.AllReduceSum(kChannel, &sum, 1).ok());
    EXPECT_EQ(sum, 4.5);

    float largest[] = {static_cast<float>(rank), static_cast<float>(-rank)};
    ASSERT_TRUE(comm.AllReduceMax(kChannel, largest, 2).ok());
    EXPECT_THAT(largest, ElementsAre(2.0f, 0.0f));

    int gathered[3] = {};
    gathered[rank] = rank + 1;
    ASSERT_TRUE(comm.AllGather(kChannel, &gathered[rank], sizeof(int), gathered).ok());
    EXPECT_THAT(gathered, ElementsAre(1, 2, 3));

    const float rows[] = {1.0f * rank, 2.0f, 10.0f * rank, 20.0f, 100.0f * rank, 200.0f};
    float mine[2] = {};
    ASSERT_TRUE(comm.ReduceScatterSum(kChannel, rows, 2, mine).ok());
    const float scale[] = {1.0f, 10.0f, 100.0f};
    EXPECT_THAT(mine, ElementsAre(3.0f * scale[rank], 6.0f * scale[rank]));

    int word = rank == 1 ? 42 : 0;
    ASSERT_TRUE(comm.Broadcast(kChannel, &word, sizeof(word), 1).ok());
    EXPECT_EQ(word, 42);
    EXPECT_TRUE(comm.Barrier().ok());
  });
}

// Of more ranks than a few, what is small goes from rank to rank; no number of them is special.
TEST_P(GroupCommunicatorTest, ManyRanksGatherAndBroadcast) {
  for (const int ranks : {8, 9, 16, 19}) {
    RunRanks(ranks, [ranks](Communicator& comm) {
      const int rank = comm.rank();
      for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{9000}}) {
        std::vector<int> all(ranks * count, -1), expected;
        std::fill_n(all.begin() + rank * count, count, 7 * rank);
        for (int r = 0; r < ranks; ++r) expected.insert(expected.end(), count, 7 * r);
        const int* const mine = all.data() + rank * count;
        ASSERT_TRUE(comm.AllGather(kChannel, mine, count * sizeof(int), all.data()).ok());
        EXPECT_EQ(all, expected) << count;
      }
      double sum = std::pow(2.0, rank);
      ASSERT_TRUE(comm.AllReduceSum(kChannel, &sum, 1).ok());
      EXPECT_EQ(sum, std::pow(2.0, ranks) - 1);
      for (int root = 0; root < ranks; ++root) {
        std::vector<int> words(3, rank == root ? root + 1 : 0);
        ASSERT_TRUE(comm.Broadcast(kChannel, words.data(), 3 * sizeof(int), root).ok());
        EXPECT_THAT(words, ElementsAre(root + 1, root + 1, root + 1));
      }
      EXPECT_TRUE(comm.Barrier().ok());
    });
  }
}

// Has done what it is asked for at once, and remembers whom it sent to.
class PromptTransport : public Transport {
 public:
  PromptTransport(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Send(StreamId /*stream*/, int to, PendingTransferPtr transfer) override {
    sent_to.push_back(to);
    transfer->Finish(absl::OkStatus());
  }
  void Receive(StreamId /*stream*/, int /*from*/, PendingTransferPtr transfer) override {
    transfer->Finish(absl::OkStatus());
  }
  void Abort(const std::string& /*reason*/) override {}
  absl::Status status() const override { return absl::OkStatus(); }
  bool aborted_by_peer() const override { return false; }
  std::vector<int> sent_to;

 private:
  const int rank_, size_;
};

// From each rank to each other they would be 16 million messages for every word.
TEST(ManyRanksTest, ARankOfFourThousandSendsToTwelve) {
  for (const int rank : {0, 1, 1999, 3999}) {
    const auto transport = std::make_shared<PromptTransport>(rank, 4000);
    GroupCommunicator comm(transport);
    EXPECT_TRUE(comm.Barrier().ok());
    EXPECT_EQ(transport->sent_to.size(), 12) << rank;
    transport->sent_to.clear();
    char word = 0;
    EXPECT_TRUE(comm.Broadcast(kChannel, &word, 1, /*root=*/0).ok());
    EXPECT_EQ(transport->sent_to.size(), rank == 0 ? 12 : 0) << rank;
  }
}

// Part r of each rank's goes to rank r, in its place, whatever else is under way.
TEST_P(GroupCommunicatorTest, AllToAllTurnsRowsIntoColumns) {
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Communicator& comm) {
      constexpr size_t kCount = 5;
      const size_t count = kCount * static_cast<size_t>(ranks);
      std::vector<int> first(count), second(count);
      for (size_t i = 0; i < first.size(); ++i) {
        first[i] = static_cast<int>(1000 * comm.rank() + i);
        second[i] = -first[i];
      }
      std::vector<int> from_first(first.size(), -1), from_second(first.size(), 1);
      const auto one =
                     comm.AllToAll(kChannel, first.data(), kCount * sizeof(int), from_first.data()),
                 two = comm.AllToAll(kChannel, second.data(), kCount * sizeof(int),
                                     from_second.data());
      ASSERT_TRUE(two->Wait().ok());
      ASSERT_TRUE(one->Wait().ok());
      for (size_t i = 0; i < first.size(); ++i) {
        const size_t sender = i / kCount, place = comm.rank() * kCount + i % kCount;
        EXPECT_EQ(from_first[i], static_cast<int>(1000 * sender + place));
        EXPECT_EQ(from_second[i], -from_first[i]);
      }
    });
  }
}

TEST_P(GroupCommunicatorTest, AllToAllOfUnequalPartsIsAnError) {
  RunRanks(2, [](Communicator& comm) {
    std::vector<char> sent(32), received(32);
    const size_t bytes = comm.rank() == 0 ? 8 : 16;
    const absl::Status status =
        comm.AllToAll(kChannel, sent.data(), bytes, received.data())->Wait();
    EXPECT_FALSE(status.ok());
    if (comm.rank() == 0) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
  });
}

TEST_P(GroupCommunicatorTest, AnAbortEndsAnAllToAllThatWaitsForAPeer) {
  absl::BlockingCounter waiting(1), released(1);
  RunRanks(2, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      waiting.Wait();
      comm.Abort("out of memory");
      return released.Wait();
    }
    std::vector<char> sent(32), received(32);
    const auto exchange = comm.AllToAll(kChannel, sent.data(), 16, received.data());
    waiting.DecrementCount();
    EXPECT_EQ(exchange->Wait(), absl::AbortedError("rank 1: out of memory"));
    released.DecrementCount();
  });
}

TEST_P(GroupCommunicatorTest, SplitsIntoContextAndDataGroups) {
  RunRanks(4, [](Communicator& comm) {
    const int rank = comm.rank();
    const int base = rank / 2 * 2;
    auto context = comm.Split({base, base + 1});
    auto data = comm.Split({rank % 2, rank % 2 + 2});
    auto reversed = comm.Split({3, 2, 1, 0});
    ASSERT_TRUE(context.ok() && data.ok() && reversed.ok());
    EXPECT_EQ((*context)->rank(), rank % 2);
    EXPECT_EQ((*data)->rank(), rank / 2);
    EXPECT_EQ((*reversed)->rank(), 3 - rank);
    float in_context = rank, in_data = rank;
    ASSERT_TRUE((*context)->AllReduceSum(kChannel, &in_context, 1).ok());
    ASSERT_TRUE((*data)->AllReduceSum(kChannel, &in_data, 1).ok());
    EXPECT_EQ(in_context, 2 * base + 1);
    EXPECT_EQ(in_data, 2 * (rank % 2) + 2);
  });
}

TEST_P(GroupCommunicatorTest, SplitRefusesABadList) {
  RunRanks(2, [](Communicator& comm) {
    EXPECT_FALSE(comm.Split({1 - comm.rank()}).ok());
    EXPECT_FALSE(comm.Split({0, 1, 1}).ok());
    EXPECT_FALSE(comm.Split({0, 1, 2}).ok());
  });
}

// Rank 0 of two; claims what it is to receive, as a transport does while it copies.
class HoldingTransport : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void Send(StreamId, int, PendingTransferPtr) override {}
  void Receive(StreamId, int, PendingTransferPtr transfer) override {
    EXPECT_TRUE(transfer->Claim());
    held_ = std::move(transfer);
  }
  void Abort(const std::string&) override {}
  absl::Status status() const override { return absl::OkStatus(); }
  bool aborted_by_peer() const override { return false; }

  PendingTransfer& held() { return *held_; }

 private:
  PendingTransferPtr held_;
};

// Its buffer may be freed next: not while somebody copies into it.
TEST(TransferTest, ADroppedOneIsWaitedForUntilItsBufferIsLetGo) {
  const auto transport = std::make_shared<HoldingTransport>();
  GroupCommunicator communicator(transport);
  char byte = 0;
  auto transfer = communicator.SendReceive(kChannel, nullptr, 0, -1, &byte, 1, 1);
  std::atomic<bool> released = false;
  std::thread copy([&] {
    while (transport->held().Claim()) {  // until it is dropped
      transport->held().Release();
      std::this_thread::yield();
    }
    released = true;
    transport->held().Release();
  });
  const absl::Time dropped = absl::Now();
  transfer.reset();
  // A buffer is waited for so long and no longer, on a machine that stands still, too.
  EXPECT_TRUE(released || absl::Now() - dropped >= absl::Milliseconds(1500));
  copy.join();
}

// Rank 0 of two. The transfer of this number fails at once; the others end well, at once or when
// they are told to.
class FailingTransport : public Transport {
 public:
  static absl::Status Failure() { return absl::InternalError("broken"); }

  explicit FailingTransport(int failing, bool is_slow = false)
      : failing_(failing), is_slow_(is_slow) {}

  int rank() const override { return 0; }
  int size() const override { return 2; }
  void Send(StreamId, int, PendingTransferPtr transfer) override { Start(std::move(transfer)); }
  void Receive(StreamId, int, PendingTransferPtr transfer) override { Start(std::move(transfer)); }
  void Abort(const std::string&) override {}
  absl::Status status() const override { return absl::OkStatus(); }
  bool aborted_by_peer() const override { return false; }

  int started() const { return started_; }
  std::vector<PendingTransferPtr>& others() { return others_; }

 private:
  void Start(PendingTransferPtr transfer) {
    if (started_++ == failing_) return transfer->Finish(Failure());
    if (!is_slow_) return transfer->Finish(absl::OkStatus());
    others_.push_back(std::move(transfer));
  }

  const int failing_;
  const bool is_slow_;
  int started_ = 0;
  std::vector<PendingTransferPtr> others_;
};

struct Operation {
  const char* name;
  int transfers;  // of rank 0 of two
  absl::Status (*run)(Communicator& comm);
};

TEST(TransferTest, AnOperationEndsWellOnlyIfAllOfItsTransfersDo) {
  constexpr size_t kSmall = 8, kLarge = 5000;  // elements: for one exchange, or for shares
  const Operation operations[] = {
      {"send and receive", 2,
       [](Communicator& comm) {
         char sent = 0, received = 0;
         return comm.SendReceive(kChannel, &sent, 1, 1, &received, 1, 1)->Wait();
       }},
      {"all-to-all", 4,
       [](Communicator& comm) {
         char sent[2] = {}, received[2] = {};
         return comm.AllToAll(kChannel, sent, 1, received)->Wait();
       }},
      {"small all-reduce", 2,
       [](Communicator& comm) {
         std::vector<float> data(kSmall);
         return comm.AllReduceMax(kChannel, data.data(), data.size());
       }},
      {"large all-reduce", 4,
       [](Communicator& comm) {
         std::vector<double> data(kLarge);
         return comm.AllReduceSum(kChannel, data.data(), data.size());
       }},
      {"all-gather", 2,
       [](Communicator& comm) {
         char all[2] = {};
         return comm.AllGather(kChannel, &all[0], 1, all);
       }},
      {"reduce-scatter", 2,
       [](Communicator& comm) {
         float data[2] = {}, mine = 0;
         return comm.ReduceScatterSum(kChannel, data, 1, &mine);
       }},
      {"broadcast to the other", 1,
       [](Communicator& comm) {
         char byte = 0;
         return comm.Broadcast(kChannel, &byte, 1, /*root=*/0);
       }},
      {"broadcast by the other", 1,
       [](Communicator& comm) {
         char byte = 0;
         return comm.Broadcast(kChannel, &byte, 1, /*root=*/1);
       }},
      {"barrier", 2, [](Communicator& comm) { return comm.Barrier(); }},
  };
  for (const Operation& operation : operations) {
    for (int failing = 0; failing <= operation.transfers; ++failing) {
      const auto transport = std::make_shared<FailingTransport>(failing);
      GroupCommunicator comm(transport);
      EXPECT_EQ(operation.run(comm),
                failing < operation.transfers ? FailingTransport::Failure() : absl::OkStatus())
          << operation.name << " " << failing;
    }
  }
}

// What Wait returns for may be freed, whichever part of it failed first.
TEST(TransferTest, OneThatFailedIsWaitedForUntilAllOfItIsDone) {
  for (const bool is_exchange : {false, true}) {
    const auto transport = std::make_shared<FailingTransport>(/*failing=*/1, /*is_slow=*/true);
    GroupCommunicator comm(transport);
    char sent[2] = {}, received[2] = {};
    const auto transfer = is_exchange ? comm.AllToAll(kChannel, sent, 1, received)
                                      : comm.SendReceive(kChannel, sent, 1, 1, received, 1, 1);
    ASSERT_EQ(transport->others().size(), is_exchange ? 3u : 1u);
    std::atomic<bool> all_done = false;
    std::thread others([&] {
      const PendingTransferPtr last = std::move(transport->others().back());
      transport->others().pop_back();
      for (const PendingTransferPtr& other : transport->others()) other->Finish(absl::OkStatus());
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
      all_done = true;
      last->Finish(absl::OkStatus());
    });
    EXPECT_EQ(transfer->Wait(), FailingTransport::Failure());
    EXPECT_TRUE(all_done);
    others.join();
  }
}

TEST_P(GroupCommunicatorTest, AbortReleasesEveryWaiterWithTheReason) {
  std::atomic<int64_t> aborted = 0;  // in nanoseconds
  absl::BlockingCounter waiting(2), released(2);
  RunRanks(3, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      waiting.Wait();
      aborted = absl::ToUnixNanos(absl::Now());
      comm.Abort("out of memory");
      EXPECT_FALSE(comm.aborted_by_peer());
      released.Wait();
    } else {
      char byte = 0;
      const auto receive = comm.SendReceive(kChannel, nullptr, 0, -1, &byte, 1, 1);
      waiting.DecrementCount();
      const absl::Status status = receive->Wait();
      EXPECT_LT(absl::Now() - absl::FromUnixNanos(aborted), testing::kReleaseLimit);
      EXPECT_EQ(status, absl::AbortedError("rank 1: out of memory"));
      EXPECT_TRUE(comm.aborted_by_peer());
      released.DecrementCount();
    }
    EXPECT_EQ(comm.status(), absl::AbortedError("rank 1: out of memory"));
    float value = 0;
    EXPECT_FALSE(comm.AllReduceSum(kChannel, &value, 1).ok());
    EXPECT_FALSE(comm.Barrier().ok());
  });
}

}  // namespace
}  // namespace ringleader::comm
