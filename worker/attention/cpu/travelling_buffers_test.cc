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
    TravellingBuffers buffers(&communicator, 2, 1, comm::Channel::kKvInner, comm::Channel::kKvOuter,
                              &exposed);
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
    TravellingBuffers buffers(&communicator, 2, 1 << 20, comm::Channel::kKvInner,
                              comm::Channel::kKvOuter, &exposed);
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

}  // namespace
}  // namespace ringleader::attention
