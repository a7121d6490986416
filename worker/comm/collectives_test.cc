// Collectives at sizes and on ranks where a wrong share, order or place shows.
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::comm {
namespace {

using ::testing::ElementsAre;
using testing::RunRanks;

constexpr Channel kChannel = Channel::kGradients;

// An element tells where it belongs and whose it is.
float Element(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 1021) - 500.0f;
}

// 4096 elements are the most that go in one exchange, 4194304 in one round.
class ReductionTest : public ::testing::TestWithParam<std::pair<int, size_t>> {
 protected:
  template <typename T, typename Reduce>
  static std::vector<T> Expected(Reduce reduce) {
    const auto [ranks, count] = GetParam();
    std::vector<T> expected(count);
    for (size_t i = 0; i < count; ++i) {
      expected[i] = Element(0, i);
      for (int rank = 1; rank < ranks; ++rank) {
        expected[i] = reduce(expected[i], static_cast<T>(Element(rank, i)));
      }
    }
    return expected;
  }
  template <typename T>
  static std::vector<T> Mine(int rank) {
    std::vector<T> data(GetParam().second);
    for (size_t i = 0; i < data.size(); ++i) data[i] = Element(rank, i);
    return data;
  }
};

TEST_P(ReductionTest, EveryElementIsReducedInItsPlace) {
  const auto sum = Expected<float>([](float x, float y) { return x + y; });
  const auto wide_sum = Expected<double>([](double x, double y) { return x + y; });
  const auto largest = Expected<float>([](float x, float y) { return std::max(x, y); });
  RunRanks(GetParam().first, [&](Communicator& comm) {
    std::vector<float> data = Mine<float>(comm.rank());
    ASSERT_TRUE(comm.AllReduceSum(kChannel, data.data(), data.size()).ok());
    EXPECT_TRUE(data == sum);
    data = Mine<float>(comm.rank());
    ASSERT_TRUE(comm.AllReduceMax(kChannel, data.data(), data.size()).ok());
    EXPECT_TRUE(data == largest);
    std::vector<double> wide = Mine<double>(comm.rank());
    ASSERT_TRUE(comm.AllReduceSum(kChannel, wide.data(), wide.size()).ok());
    EXPECT_TRUE(wide == wide_sum);
  });
}

INSTANTIATE_TEST_SUITE_P(RanksAndElements, ReductionTest,
                         ::testing::Values(std::pair{1, 10}, std::pair{5, 3}, std::pair{3, 4096},
                                           std::pair{3, 4097}, std::pair{5, 4099},
                                           std::pair{3, (4 << 20) + 7}));

TEST(CollectivesTest, SharesAreSummedInRankOrder) {
  // Summed in rank order, the ones are lost one by one; summed first, or last, they would not be.
  const std::vector<float> addends = {16777216.0f, 1.0f, 1.0f, -16777216.0f};
  RunRanks(4, [&](Communicator& comm) {
    std::vector<float> data(8, addends[comm.rank()]);
    float mine[2] = {};
    ASSERT_TRUE(comm.ReduceScatterSum(kChannel, data.data(), 2, mine).ok());
    EXPECT_THAT(mine, ElementsAre(0.0f, 0.0f));
    EXPECT_THAT(data, ::testing::Each(addends[comm.rank()])) << "the input stays";
  });
}

TEST(CollectivesTest, OneRankKeepsWhatItHas) {
  RunRanks(1, [](Communicator& comm) {
    float value = 3.0f, out = 0.0f;
    EXPECT_TRUE(comm.AllReduceSum(kChannel, &value, 1).ok());
    EXPECT_TRUE(comm.ReduceScatterSum(kChannel, &value, 1, &out).ok());
    EXPECT_EQ(out, 3.0f);
    out = 0.0f;
    EXPECT_TRUE(comm.AllGather(kChannel, &value, sizeof(value), &out).ok());
    EXPECT_EQ(out, 3.0f);
    EXPECT_TRUE(comm.Broadcast(kChannel, &value, sizeof(value), 0).ok());
    EXPECT_TRUE(comm.Barrier().ok());
    comm.Abort("over");
    EXPECT_EQ(comm.AllReduceSum(kChannel, &value, 1), absl::AbortedError("rank 0: over"));
    EXPECT_EQ(comm.ReduceScatterSum(kChannel, &value, 1, &out), absl::AbortedError("rank 0: over"));
    EXPECT_EQ(value, 3.0f);
  });
}

TEST(CollectivesTest, GatherAndBroadcastFromEveryRank) {
  RunRanks(3, [](Communicator& comm) {
    const std::string mine(3, static_cast<char>('a' + comm.rank()));
    std::string all(9, ' ');
    ASSERT_TRUE(comm.AllGather(kChannel, mine.data(), 3, all.data()).ok());
    EXPECT_EQ(all, "aaabbbccc");
    for (int root = 0; root < 3; ++root) {
      std::string text = mine;
      ASSERT_TRUE(comm.Broadcast(kChannel, text.data(), 3, root).ok());
      EXPECT_EQ(text, std::string(3, static_cast<char>('a' + root)));
    }
    ASSERT_TRUE(comm.AllGather(kChannel, nullptr, 0, nullptr).ok());
  });
}

// What a rank sends of a large one does not grow with the number of ranks.
TEST(CollectivesTest, ALargeAllReduceSendsShares) {
  constexpr int kRanks = 5;
  const auto sent = [](size_t count) {
    std::atomic<uint64_t> bytes = 0;
    RunRanks(testing::CountedCommunicators(kRanks, &bytes), [&](Communicator& comm) {
      std::vector<float> data(count);
      ASSERT_TRUE(comm.AllReduceSum(kChannel, data.data(), count).ok());
    });
    return bytes.load();
  };
  EXPECT_EQ(sent(4096), kRanks * (kRanks - 1) * 4096 * sizeof(float)) << "all to all at once";
  EXPECT_EQ(sent(4097), 2 * (kRanks - 1) * 4097 * sizeof(float)) << "shares, and their sums";
}

// Nobody passes a barrier before all have come: each rank sees all others' marks.
TEST(CollectivesTest, NobodyPassesABarrierBeforeAllHaveCome) {
  std::vector<std::atomic<int>> rounds(3);
  RunRanks(3, [&](Communicator& comm) {
    for (int round = 1; round <= 50; ++round) {
      rounds[comm.rank()] = round;
      ASSERT_TRUE(comm.Barrier().ok());
      for (const std::atomic<int>& other : rounds) EXPECT_GE(other, round);
    }
  });
}

// Two communicators over the same ranks, used in opposite orders: nothing of one reaches the other.
void ExpectApart(Communicator& first, Communicator& second, int rank,
                 Channel of_second = kChannel) {
  const int peer = 1 - rank;
  int a = 10 + rank, b = 20 + rank, from_a = 0, from_b = 0;
  std::vector<std::unique_ptr<Transfer>> transfers;
  const auto start_first = [&] {
    transfers.push_back(first.SendReceive(kChannel, &a, sizeof(a), peer, &from_a, sizeof(a), peer));
  };
  const auto start_second = [&] {
    transfers.push_back(
        second.SendReceive(of_second, &b, sizeof(b), peer, &from_b, sizeof(b), peer));
  };
  if (rank == 0) start_first();
  start_second();
  if (rank == 1) start_first();
  for (const auto& transfer : transfers) ASSERT_TRUE(transfer->Wait().ok());
  EXPECT_EQ(from_a, 10 + peer);
  EXPECT_EQ(from_b, 20 + peer);
}

TEST(SplitTest, GroupsOfTheSameRanksAreApart) {
  RunRanks(2, [](Communicator& comm) {
    const auto same = comm.Split({0, 1}), again = comm.Split({0, 1});
    const auto below = (*same)->Split({0, 1});
    ASSERT_TRUE(same.ok() && again.ok() && below.ok());
    ExpectApart(comm, **same, comm.rank());
    ExpectApart(**same, **again, comm.rank());
    ExpectApart(**same, **below, comm.rank());
    ExpectApart(**again, **below, comm.rank());
    ExpectApart(comm, comm, comm.rank(), Channel::kControl);
  });
}

TEST(SplitTest, GroupsThatShareSomeRanksAreApart) {
  RunRanks(3, [](Communicator& comm) {
    const auto all = comm.Split({0, 1, 2});
    ASSERT_TRUE(all.ok());
    if (comm.rank() == 2) return;
    const auto two = comm.Split({0, 1});
    ASSERT_TRUE(two.ok());
    ExpectApart(**all, **two, comm.rank());
  });
}

TEST(SplitTest, RanksOfAGroupAreCountedWithinIt) {
  RunRanks(4, [](Communicator& comm) {
    if (comm.rank() == 0) return;
    const auto odd = comm.Split({3, 1, 2});
    ASSERT_TRUE(odd.ok());
    const int expected[] = {-1, 1, 2, 0};
    ASSERT_EQ((*odd)->size(), 3);
    ASSERT_EQ((*odd)->rank(), expected[comm.rank()]);
    const auto pair = (*odd)->rank() < 2 ? (*odd)->Split({1, 0}) : (*odd)->Split({2});
    ASSERT_TRUE(pair.ok());
    EXPECT_EQ((*pair)->rank(), (*odd)->rank() == 2 ? 0 : 1 - (*odd)->rank());
    int word = comm.rank();
    ASSERT_TRUE((*pair)->Broadcast(kChannel, &word, sizeof(word), 0).ok());
    EXPECT_EQ(word, comm.rank() == 2 ? 2 : 1);
  });
}

TEST(SplitTest, ErrorsSayWhatTheListLacks) {
  RunRanks(2, [](Communicator& comm) {
    EXPECT_EQ(comm.Split({comm.rank(), 2}).status(),
              absl::InvalidArgumentError("cannot split off rank 2: the communicator has 2 ranks"));
    EXPECT_FALSE(comm.Split({comm.rank(), -1}).ok());
    EXPECT_FALSE(comm.Split({}).ok());
  });
}

TEST(SplitTest, AnAbortOfAGroupIsOneOfAll) {
  RunRanks(2, [](Communicator& comm) {
    const auto alone = comm.Split({comm.rank()});
    ASSERT_TRUE(alone.ok());
    if (comm.rank() == 1) {
      (*alone)->Abort("found a NaN");
      (*alone)->Abort("and something else");
    } else {
      char byte = 0;
      EXPECT_EQ(comm.SendReceive(kChannel, nullptr, 0, -1, &byte, 1, 1)->Wait(),
                absl::AbortedError("rank 1: found a NaN"));
    }
    EXPECT_EQ(comm.status(), absl::AbortedError("rank 1: found a NaN"));
    EXPECT_EQ((*alone)->status(), comm.status());
    EXPECT_EQ((*alone)->aborted_by_peer(), comm.rank() == 0);
    EXPECT_EQ(comm.aborted_by_peer(), comm.rank() == 0);
  });
}

}  // namespace
}  // namespace ringleader::comm
