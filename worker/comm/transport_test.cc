// One direction of a transfer, and how sends and receives find each other.
#include "worker/comm/transport.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "worker/comm/rendezvous.h"

namespace ringleader::comm {
namespace {

PendingTransferPtr TransferOf(std::string& text) {
  return std::make_shared<PendingTransfer>(text.data(), text.size());
}

bool IsFinished(PendingTransfer& transfer) {
  if (!transfer.Claim()) return true;
  transfer.Release();
  return false;
}

TEST(PendingTransferTest, TheFirstEndDecides) {
  PendingTransfer transfer(nullptr, 0);
  EXPECT_FALSE(IsFinished(transfer));
  transfer.Finish(absl::AbortedError("first"));
  transfer.Finish(absl::OkStatus());
  transfer.FinishWhenReleased();
  EXPECT_TRUE(IsFinished(transfer));
  EXPECT_EQ(transfer.Wait(), absl::AbortedError("first"));
}

TEST(PendingTransferTest, EndsWithTheLastClaimOnceItMay) {
  PendingTransfer transfer(nullptr, 0);
  ASSERT_TRUE(transfer.Claim() && transfer.Claim());
  transfer.Release();
  transfer.Release();
  EXPECT_FALSE(IsFinished(transfer)) << "nobody said that it was done";
  ASSERT_TRUE(transfer.Claim() && transfer.Claim());
  transfer.FinishWhenReleased();
  transfer.Release();
  EXPECT_FALSE(IsFinished(transfer)) << "one claim is left";
  transfer.Release();
  EXPECT_TRUE(IsFinished(transfer));
  EXPECT_EQ(transfer.Wait(), absl::OkStatus());

  PendingTransfer unclaimed(nullptr, 0);
  unclaimed.FinishWhenReleased();
  EXPECT_TRUE(IsFinished(unclaimed));
}

// What Wait returns may be freed: not while somebody copies into it.
TEST(PendingTransferTest, AFailedTransferIsWaitedForUntilItsBufferIsLetGo) {
  PendingTransfer transfer(nullptr, 0);
  ASSERT_TRUE(transfer.Claim());
  transfer.Finish(absl::AbortedError("over"));
  std::atomic<bool> released = false;
  std::thread copy([&] {
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    released = true;
    transfer.Release();
  });
  EXPECT_EQ(transfer.Wait(/*patience=*/absl::Minutes(10)), absl::AbortedError("over"));
  EXPECT_TRUE(released);
  copy.join();
}

TEST(PendingTransferTest, APeerThatHoldsABufferForEverDoesNotHoldTheRank) {
  PendingTransfer transfer(nullptr, 0);
  ASSERT_TRUE(transfer.Claim());
  transfer.Finish(absl::AbortedError("over"));
  EXPECT_EQ(transfer.Wait(), absl::AbortedError("over"));
}

TEST(RendezvousTest, MatchesAStreamsTransfersInOrderWhoeverComesFirst) {
  std::string first = "first.", second = "second", a(6, ' '), b(6, ' ');
  Rendezvous rendezvous;
  const PendingTransferPtr sent = TransferOf(first), received = TransferOf(b);
  rendezvous.Send(1, 0, 1, sent);
  rendezvous.Send(1, 0, 1, TransferOf(second));
  EXPECT_FALSE(IsFinished(*sent));
  rendezvous.Receive(1, 0, 1, TransferOf(a));
  rendezvous.Receive(1, 0, 1, received);
  EXPECT_EQ(a, "first.");
  EXPECT_EQ(b, "second");
  EXPECT_EQ(sent->Wait(), absl::OkStatus());
  EXPECT_EQ(received->Wait(), absl::OkStatus());

  std::string c(6, ' ');
  rendezvous.Receive(1, 0, 1, TransferOf(c));
  rendezvous.Send(1, 0, 1, TransferOf(second));
  EXPECT_EQ(c, "second");
}

TEST(RendezvousTest, ABufferThatWasGivenUpIsNotWritten) {
  std::string text = "text", given_up(4, ' ');
  Rendezvous rendezvous;
  const PendingTransferPtr received = TransferOf(given_up);
  rendezvous.Receive(1, 0, 1, received);
  received->Finish(absl::CancelledError("dropped"));
  const PendingTransferPtr sent = TransferOf(text);
  rendezvous.Send(1, 0, 1, sent);
  EXPECT_EQ(given_up, "    ");
  ASSERT_TRUE(IsFinished(*sent));
  EXPECT_EQ(sent->Wait(), absl::OkStatus()) << "its sender has done its part";
}

TEST(RendezvousTest, WhatWasDroppedBeforeItWasReceivedIsAnErrorForItsReceiver) {
  std::string dropped = "text", other(4, ' ');
  Rendezvous rendezvous;
  const PendingTransferPtr sent = TransferOf(dropped), received = TransferOf(other);
  rendezvous.Send(1, 7, 1, sent);
  sent->Finish(absl::CancelledError("dropped"));
  rendezvous.Receive(1, 7, 1, received);
  EXPECT_EQ(received->Wait(), absl::CancelledError("rank 7 has dropped what it sent"));
  EXPECT_EQ(other, "    ");
}

TEST(RendezvousTest, StreamsAndPairsAreApart) {
  std::string text = "text", other(4, ' ');
  for (const auto& [stream, from, to] : {std::tuple{2, 0, 1}, {1, 1, 0}, {1, 2, 1}, {1, 0, 2}}) {
    Rendezvous rendezvous;
    const PendingTransferPtr sent = TransferOf(text), received = TransferOf(other);
    rendezvous.Send(1, 0, 1, sent);
    rendezvous.Receive(stream, from, to, received);
    EXPECT_FALSE(IsFinished(*sent));
    EXPECT_FALSE(IsFinished(*received));
  }
}

TEST(RendezvousTest, AnotherSizeIsAnErrorOnBothSidesThatNamesTheSender) {
  std::string text = "text", small(3, ' ');
  Rendezvous rendezvous;
  const PendingTransferPtr sent = TransferOf(text), received = TransferOf(small);
  rendezvous.Send(1, 7, 1, sent);
  rendezvous.Receive(1, 7, 1, received);
  EXPECT_EQ(sent->Wait().message(), "rank 7 sent 4 bytes where 3 were expected");
  EXPECT_EQ(received->Wait(), sent->Wait());
  EXPECT_EQ(small, "   ");
}

TEST(RendezvousTest, AFailureEndsWhatWaitsAndAllThatComes) {
  std::string text = "text";
  Rendezvous rendezvous;
  const PendingTransferPtr sent = TransferOf(text), received = TransferOf(text);
  rendezvous.Send(1, 0, 1, sent);
  rendezvous.Receive(2, 0, 1, received);
  EXPECT_EQ(rendezvous.status(), absl::OkStatus());
  rendezvous.Fail(absl::AbortedError("first"));
  rendezvous.Fail(absl::AbortedError("second"));
  EXPECT_EQ(rendezvous.status(), absl::AbortedError("first"));
  for (const PendingTransferPtr& transfer : {sent, received}) {
    ASSERT_TRUE(IsFinished(*transfer));
    EXPECT_EQ(transfer->Wait(), absl::AbortedError("first"));
  }
  const PendingTransferPtr late = TransferOf(text);
  rendezvous.Receive(1, 0, 1, late);
  ASSERT_TRUE(IsFinished(*late));
  EXPECT_EQ(late->Wait(), absl::AbortedError("first"));
}

}  // namespace
}  // namespace ringleader::comm
