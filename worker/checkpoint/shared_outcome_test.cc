#include "worker/checkpoint/shared_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "worker/comm/testing/local_communicator.h"

namespace ringleader::checkpoint {
namespace {

using comm::Communicator;
using comm::testing::RunRanks;
using ::testing::ElementsAre;

constexpr int kRanks = 3;

// What every rank hears when each brings its outcome; all hear the same.
absl::Status AgreeOn(const std::vector<absl::Status>& outcomes) {
  std::vector<absl::Status> heard(kRanks);
  RunRanks(kRanks, [&](Communicator& comm) {
    heard[comm.rank()] = Agree(comm, outcomes[comm.rank()]).status();
  });
  EXPECT_EQ(heard[1], heard[0]);
  EXPECT_EQ(heard[2], heard[0]);
  return heard[0];
}

TEST(SharedOutcomeTest, AllHearEveryRanksNumber) {
  RunRanks(kRanks, [](Communicator& comm) {
    const auto numbers = Agree(comm, absl::OkStatus(), 10 + comm.rank());
    ASSERT_TRUE(numbers.ok()) << numbers.status();
    EXPECT_THAT(*numbers, ElementsAre(10, 11, 12));
  });
}

TEST(SharedOutcomeTest, TheLowestRanksFailureIsEverybodys) {
  const absl::Status second = absl::DataLossError("of rank 1"),
                     third = absl::UnavailableError("of rank 2");
  EXPECT_EQ(AgreeOn({absl::OkStatus(), second, third}), second);
  EXPECT_EQ(AgreeOn({absl::OkStatus(), absl::OkStatus(), third}), third);
}

TEST(SharedOutcomeTest, AMessageOfAnyLengthIsHeardAsFarAsThereIsRoom) {
  for (const size_t bytes : {498, 499, 500, 5000}) {
    const std::string message = std::string(bytes - 1, 'a') + 'b';
    EXPECT_EQ(AgreeOn({absl::OkStatus(), absl::DataLossError(message), absl::OkStatus()}),
              absl::DataLossError(message.substr(0, 499)))
        << bytes;
  }
}

// It goes into strings of the protocol, which are refused unless they are UTF-8.
TEST(SharedOutcomeTest, NoCharacterOfAMessageIsCutInTwo) {
  for (const std::string of : {"é", "中", "🙂"}) {
    for (size_t before = 490; before < 500; ++before) {
      std::string message(before, 'a'), whole = message;
      for (int i = 0; i < 20; ++i) message += of;
      while (whole.size() + of.size() < 500) whole += of;
      EXPECT_EQ(AgreeOn({absl::OkStatus(), absl::DataLossError(message), absl::OkStatus()}),
                absl::DataLossError(whole))
          << before;
    }
  }
}

TEST(SharedOutcomeTest, ATextIsTheFirstRanks) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'000}}) {
    const std::string text(bytes, '\0');
    RunRanks(kRanks, [&](Communicator& comm) {
      const auto shared = ShareText(comm, comm.rank() == 0 ? text : "another, which is longer");
      ASSERT_TRUE(shared.ok()) << shared.status();
      EXPECT_EQ(*shared, text);
    });
  }
}

}  // namespace
}  // namespace ringleader::checkpoint
