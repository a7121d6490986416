#include "worker/attention/cpu/travelling_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "absl/synchronization/notification.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::attention {
namespace {

// Rank 1 starts its half of a hop only when rank 0 has read what it sends. (A read that waited for
// the transfer would never end.)
TEST(TravellingBuffersTest, ReadingDoesNotWaitForThoseWhoSend) {
  absl::Notification read;
  comm::testing::RunRanks(2, [&](comm::Communicator& communicator) {
    double exposed = 0;
    TravellingBuffers buffers(&communicator, 2, /*floats_per_slot=*/1, /*rows_per_part=*/1,
                              comm::Channel::kKvInner, comm::Channel::kKvOuter, &exposed);
    const int rank = communicator.rank(), other = 1 - rank;
    buffers.data(0)[0] = static_cast<float>(rank);
    if (rank == 1) read.WaitForNotification();
    ASSERT_TRUE(
        buffers.Start({.to = other, .from = other, .send_slot = 0, .receive_slot = 1}).ok());
    if (rank == 0) {
      ASSERT_TRUE(buffers.AwaitContent(0).ok());
      EXPECT_EQ(buffers.data(0)[0], 0);
      read.Notify();
    }
    ASSERT_TRUE(buffers.AwaitContent(1).ok());
    EXPECT_EQ(buffers.data(1)[0], static_cast<float>(other));
  });
}

TEST(TravellingBuffersTest, OverwritingWaitsForThoseWhoSend) {
  comm::testing::RunRanks(2, [&](comm::Communicator& communicator) {
    double exposed = 0;
    TravellingBuffers buffers(&communicator, 2, 1 << 20, /*rows_per_part=*/1,
                              comm::Channel::kKvInner, comm::Channel::kKvOuter, &exposed);
    const int rank = communicator.rank(), other = 1 - rank;
    std::fill_n(buffers.data(0), buffers.floats_per_slot(), static_cast<float>(rank));
    ASSERT_TRUE(
        buffers.Start({.to = other, .from = other, .send_slot = 0, .receive_slot = 1}).ok());
    ASSERT_TRUE(buffers.AwaitIdle(0).ok());
    std::fill_n(buffers.data(0), buffers.floats_per_slot(), -1.0f);
    ASSERT_TRUE(communicator.Barrier().ok());
    EXPECT_EQ(*std::min_element(buffers.data(1), buffers.data(1) + buffers.floats_per_slot()),
              static_cast<float>(other));
  });
}

// Of two parts of four rows of two floats, the second and third row travel one way, none the other.
TEST(TravellingBuffersTest, RowsTravelAlone) {
  comm::testing::RunRanks(2, [&](comm::Communicator& communicator) {
    double exposed = 0;
    TravellingBuffers buffers(&communicator, 2, 16, /*rows_per_part=*/4, comm::Channel::kKvInner,
                              comm::Channel::kKvOuter, &exposed);
    const int rank = communicator.rank(), other = 1 - rank;
    for (int i = 0; i < 16; ++i) buffers.data(0)[i] = static_cast<float>(i);
    std::fill_n(buffers.data(1), 16, 100.0f);
    const ring::RowRuns some = {{1, 3}};
    ring::HopRows rows{.sent_shard = 4, .received_shard = 4};
    (rank == 0 ? rows.sent : rows.received) = some;
    buffers.Carry(std::make_shared<const std::vector<ring::HopRows>>(1, rows));
    ASSERT_TRUE(
        buffers.Start({.to = other, .from = other, .send_slot = 0, .receive_slot = 1}).ok());
    ASSERT_TRUE(buffers.AwaitAll().ok());
    for (int i = 0; i < 16; ++i) {
      const bool came = rank == 1 && i % 8 / 2 >= 1 && i % 8 / 2 < 3;
      EXPECT_EQ(buffers.data(1)[i], came ? static_cast<float>(i) : 100.0f) << i;
    }
    ASSERT_TRUE(buffers.Add(0, 1).ok());
    for (int i = 0; i < 16; ++i) {
      const bool came = rank == 1 && i % 8 / 2 >= 1 && i % 8 / 2 < 3;
      EXPECT_EQ(buffers.data(0)[i], static_cast<float>(came ? 2 * i : i)) << i;
    }
  });
}

}  // namespace
}  // namespace ringleader::attention
