// A rank beside a peer that a test plays frame by frame: what it makes of messages, goodbyes and
// nonsense, and what it says itself.
#include "worker/comm/testing/raw_peer.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringleader::comm {
namespace {

using testing::RawPeer;

constexpr Channel kChannel = Channel::kKvInner;
constexpr uint32_t kStream = static_cast<uint32_t>(kChannel);

// Another transfer, of which a test need not fear that it is never done: the test fails then.
class Bounded : public Transfer {
 public:
  explicit Bounded(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}

  absl::Status Wait() override {
    std::promise<absl::Status> promise;
    std::future<absl::Status> done = promise.get_future();
    std::thread([transfer = transfer_, promise = std::move(promise)]() mutable {
      promise.set_value(transfer->Wait());
    }).detach();
    if (done.wait_for(std::chrono::seconds(60)) == std::future_status::ready) return done.get();
    return absl::DeadlineExceededError("nothing has ended this transfer");
  }

 private:
  const std::shared_ptr<Transfer> transfer_;
};

std::unique_ptr<Transfer> Receive(Communicator& comm, std::string& text, Channel channel = kChannel,
                                  int from = 1) {
  return std::make_unique<Bounded>(
      comm.SendReceive(channel, nullptr, 0, -1, text.data(), text.size(), from));
}

class RawPeerTest : public ::testing::Test {
 protected:
  RawPeer peer_;
  std::unique_ptr<Communicator> comm_ = peer_.Connect();
  std::string text_ = std::string(10, '.');

  // What the peer does ends a receive, and the attempt, with this reason.
  void ExpectGone(Transfer& receive, const std::string& reason) {
    EXPECT_EQ(receive.Wait(), absl::AbortedError("rank 1 is gone: " + reason));
    EXPECT_EQ(comm_->status(), absl::AbortedError("rank 1 is gone: " + reason));
    EXPECT_TRUE(comm_->aborted_by_peer());
  }
};

TEST_F(RawPeerTest, MessagesArriveInOrderHoweverTheyWereCutUp) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "0123", 10);
  line->Send(1, "4", 10);
  line->Send(1, "56789", 10);
  line->Send(2, "");
  line->Send(3, "next");
  std::string empty, next(4, '.');
  const auto first = Receive(*comm_, text_);
  EXPECT_EQ(first->Wait(), absl::OkStatus());
  EXPECT_EQ(Receive(*comm_, empty)->Wait(), absl::OkStatus());
  EXPECT_EQ(Receive(*comm_, next)->Wait(), absl::OkStatus());
  EXPECT_EQ(text_, "0123456789");
  EXPECT_EQ(next, "next");
}

TEST_F(RawPeerTest, AMessageOfAnotherSizeCostsThatTransferAlone) {
  const auto line = peer_.Open(kChannel);
  for (uint64_t sequence = 1; const size_t bytes : {11, 9, 0}) {
    line->Send(sequence, std::string(bytes / 2, 'x'), bytes);
    if (bytes > 0) line->Send(sequence, std::string(bytes - bytes / 2, 'x'), bytes);
    line->Send(sequence + 1, "0123456789");
    sequence += 2;
    std::string wrong(10, '.');
    EXPECT_EQ(Receive(*comm_, wrong)->Wait().message(),
              "rank 1 sent " + std::to_string(bytes) + " bytes where 10 were expected");
    EXPECT_EQ(wrong, "..........");
    EXPECT_EQ(Receive(*comm_, text_)->Wait(), absl::OkStatus());
    EXPECT_EQ(text_, "0123456789");
  }
  EXPECT_EQ(comm_->status(), absl::OkStatus());
}

TEST_F(RawPeerTest, AReceiveThatWasDroppedTakesItsMessageWithIt) {
  { const auto dropped = Receive(*comm_, text_); }
  const auto line = peer_.Open(kChannel);
  line->Send(1, "abandoned!");
  line->Send(2, "0123456789");
  std::string second(10, '.');
  EXPECT_EQ(Receive(*comm_, second)->Wait(), absl::OkStatus());
  EXPECT_EQ(second, "0123456789");
  EXPECT_EQ(text_, "..........");
}

TEST_F(RawPeerTest, BehindASendThatWasDroppedNothingIsSent) {
  peer_.Pause();
  const std::string big(size_t{8} << 20, 'x');
  { const auto dropped = comm_->SendReceive(kChannel, big.data(), big.size(), 1, nullptr, 0, -1); }
  const auto next = comm_->SendReceive(kChannel, big.data(), 1, 1, nullptr, 0, -1);
  peer_.Resume();
  const absl::Status cancelled =
      absl::CancelledError("an earlier transfer of this stream was dropped");
  EXPECT_EQ(next->Wait(), cancelled);
  EXPECT_EQ(comm_->SendReceive(kChannel, big.data(), 1, 1, nullptr, 0, -1)->Wait(), cancelled);
  for (const v1::Frame& frame : peer_.Received()) {
    EXPECT_EQ(frame.total_bytes(), frame.payload().empty() ? 0 : big.size());
  }
}

TEST_F(RawPeerTest, AMessageOutOfTurnEndsTheAttempt) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "0123456789");
  line->Send(3, "0123456789");
  EXPECT_EQ(Receive(*comm_, text_)->Wait(), absl::OkStatus());
  ExpectGone(*Receive(*comm_, text_), "message 3 came after message 1");
  EXPECT_EQ(line->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(RawPeerTest, AMessageThatComesTwiceEndsTheAttempt) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "0123456789");
  line->Send(1, "0123456789");
  EXPECT_EQ(Receive(*comm_, text_)->Wait(), absl::OkStatus());
  ExpectGone(*Receive(*comm_, text_), "message 1 came after message 1");
}

TEST_F(RawPeerTest, BytesBehindTheEndOfAMessageAreWrittenNowhere) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "01234567", 10);
  line->Send(1, "89x", 10);
  text_.append("guard");
  Bounded receive(comm_->SendReceive(kChannel, nullptr, 0, -1, text_.data(), 10, 1));
  ExpectGone(receive, "message 1 runs over its end");
  EXPECT_EQ(text_, "01234567..guard");
}

TEST_F(RawPeerTest, AMessageThatBeginsInTheMiddleOfAnotherEndsTheAttempt) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "01234", 10);
  line->Send(2, "56789", 10);
  ExpectGone(*Receive(*comm_, text_), "message 2 runs over its end");
}

TEST_F(RawPeerTest, AStreamThatEndsWithoutAGoodbyeIsADeath) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "01234", 10);
  const auto receive = Receive(*comm_, text_);
  EXPECT_TRUE(line->Finish().ok());
  ExpectGone(*receive, "its stream broke");
}

TEST_F(RawPeerTest, AStreamThatBreaksOffWhileItsMessageWaitsIsADeath) {
  auto line = peer_.Open(kChannel);
  line->Send(1, "0123456789");
  line->Send(2, "for nobody");
  EXPECT_EQ(Receive(*comm_, text_)->Wait(), absl::OkStatus());
  const auto other = peer_.Open(Channel::kGradKv);
  other->Send(1, "0123456789");
  EXPECT_EQ(Receive(*comm_, text_, Channel::kGradKv)->Wait(), absl::OkStatus());
  line.reset();
  ExpectGone(*Receive(*comm_, text_, Channel::kGradKv), "its stream broke");
}

TEST_F(RawPeerTest, AGoodbyeOnAStreamOfDataIsNotThePeers) {
  const auto line = peer_.Open(kChannel);
  line->Leave();
  EXPECT_TRUE(line->Finish().ok());
  const auto other = peer_.Open(Channel::kGradKv);
  other->Send(1, "0123456789");
  EXPECT_EQ(Receive(*comm_, text_, Channel::kGradKv)->Wait(), absl::OkStatus());
}

TEST_F(RawPeerTest, APeerThatLeftOwesNothingAndFailsNobody) {
  const auto line = peer_.Open(kChannel);
  const auto waiting = Receive(*comm_, text_);
  peer_.life_line().Leave();
  EXPECT_TRUE(peer_.life_line().Finish().ok());
  const absl::Status left =
      absl::UnavailableError("rank 1 has left; it will not send what this rank waits for");
  EXPECT_EQ(waiting->Wait(), left);
  EXPECT_EQ(Receive(*comm_, text_)->Wait(), left);
  EXPECT_TRUE(line->Finish().ok());  // without a goodbye: it is known to have left
  EXPECT_EQ(comm_->status(), absl::OkStatus());
  EXPECT_FALSE(comm_->aborted_by_peer());
}

// It reads no more, and what it has left unread ends for its sender, too.
TEST_F(RawPeerTest, WhatAPeerThatLeftDoesNotReadEndsWithItsStream) {
  peer_.life_line().Leave();
  EXPECT_TRUE(peer_.life_line().Finish().ok());
  peer_.Refuse(grpc::Status(grpc::StatusCode::UNAVAILABLE, "nobody is here"));
  const std::string big(size_t{8} << 20, 'x');
  const absl::Status ended =
      absl::UnavailableError("the stream to the peer has ended: nobody is here");
  for (const size_t bytes : {big.size(), size_t{1}}) {
    Bounded send(comm_->SendReceive(kChannel, big.data(), bytes, 1, nullptr, 0, -1));
    EXPECT_EQ(send.Wait(), ended);
  }
  EXPECT_EQ(comm_->status(), absl::OkStatus());
}

TEST_F(RawPeerTest, APeersReasonEndsWhatWaitsOnEveryStream) {
  const auto line = peer_.Open(kChannel);
  line->Send(1, "01234", 10);
  std::string other(4, '.');
  const auto begun = Receive(*comm_, text_), never = Receive(*comm_, other, Channel::kGradKv);
  std::string byte(1, '.');
  const auto own = Receive(*comm_, byte, kChannel, /*from=*/0);
  peer_.life_line().Leave("rank 1: found a NaN");
  const absl::Status aborted = absl::AbortedError("rank 1: found a NaN");
  for (Transfer* transfer : {begun.get(), never.get(), own.get()}) {
    EXPECT_EQ(transfer->Wait(), aborted);
  }
  comm_->Abort("too late");
  EXPECT_EQ(comm_->status(), aborted);
  EXPECT_TRUE(comm_->aborted_by_peer());
  EXPECT_EQ(comm_->SendReceive(kChannel, "x", 1, 1, nullptr, 0, -1)->Wait(), aborted);
  EXPECT_EQ(Receive(*comm_, text_)->Wait(), aborted);
}

// Not that the peer has left, which is no failure of its own.
TEST_F(RawPeerTest, AfterAnAbortItsReasonIsThatOfReceivesFromPeersThatLeft) {
  peer_.life_line().Leave();
  EXPECT_TRUE(peer_.life_line().Finish().ok());
  EXPECT_TRUE(absl::IsUnavailable(Receive(*comm_, text_)->Wait()));
  comm_->Abort("out of memory");
  EXPECT_EQ(Receive(*comm_, text_)->Wait(), absl::AbortedError("rank 0: out of memory"));
}

TEST_F(RawPeerTest, WhatAPeerAnswersInsteadOfReadingIsItsEnd) {
  peer_.Refuse(grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "another attempt's"));
  const auto unread = comm_->SendReceive(kChannel, "x", 1, 1, nullptr, 0, -1);
  std::string never(1, '.');
  ExpectGone(*Receive(*comm_, never), "another attempt's");
}

TEST_F(RawPeerTest, GarbageOfAStrangerIsRefusedAndCostsNothing) {
  grpc::GenericStub generic(
      grpc::CreateChannel(peer_.address_of_rank_0(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice slice("\xff\xff\xff");
  const auto call = generic.PrepareUnaryCall(&context, "/ringleader.v1.PeerExchange/Stream",
                                             grpc::ByteBuffer(&slice, 1), &queue);
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->StartCall();
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_EQ(queue.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + std::chrono::seconds(30)),
            grpc::CompletionQueue::GOT_EVENT);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "a peer sent bytes that are not a frame");
  EXPECT_EQ(comm_->status(), absl::OkStatus());
}

TEST_F(RawPeerTest, GarbageOfAPeerEndsTheAttempt) {
  const auto line = peer_.Open(kChannel);
  v1::Frame frame;
  frame.set_payload("x");
  frame.set_leaving(true);  // behind the payload
  line->Write(frame);
  ExpectGone(*Receive(*comm_, text_), "a peer sent bytes that are not a frame");
}

TEST_F(RawPeerTest, SaysWhoItIsThenWhatItHasThenGoodbye) {
  const std::string big((size_t{2} << 20) + 5, 'x');
  for (const size_t bytes : {size_t{3}, size_t{0}, big.size()}) {
    const auto sent = comm_->SendReceive(kChannel, big.data(), bytes, 1, nullptr, 0, -1);
    EXPECT_EQ(sent->Wait(), absl::OkStatus());
  }
  comm_.reset();
  const std::vector<v1::Frame> all = peer_.Received();
  std::vector<v1::Frame> data, life_line;
  for (const v1::Frame& frame : all) {
    (frame.channel() == kStream ? data : life_line).push_back(frame);
  }
  const auto expected_hello = [](uint32_t stream) {
    v1::Frame hello = RawPeer::Hello(stream);
    hello.set_sender(0);
    return hello.SerializeAsString();
  };
  ASSERT_EQ(life_line.size(), 2u);
  EXPECT_EQ(life_line[0].SerializeAsString(), expected_hello(RawPeer::kLifeLine));
  EXPECT_TRUE(life_line[1].leaving());
  EXPECT_EQ(life_line[1].abort_reason(), "");
  EXPECT_EQ(all.back().channel(), RawPeer::kLifeLine) << "data first";

  ASSERT_EQ(data.size(), 1 + 1 + 1 + 3 + 1u) << "frames of at most 1 MiB";
  EXPECT_EQ(data[0].SerializeAsString(), expected_hello(kStream));
  const uint64_t sequences[] = {0, 1, 2, 3, 3, 3};
  size_t payload = 0;
  for (int i = 1; i < 6; ++i) {
    EXPECT_EQ(data[i].sequence(), sequences[i]);
    EXPECT_EQ(data[i].total_bytes(), i == 1 ? 3u : i == 2 ? 0u : big.size());
    EXPECT_FALSE(data[i].leaving());
    if (i >= 3) payload += data[i].payload().size();
  }
  EXPECT_EQ(payload, big.size());
  EXPECT_TRUE(data[6].leaving());
  EXPECT_EQ(peer_.BrokenOff(/*streams=*/2), 0) << "a goodbye is a stream's end";
}

// It waits while the hello is written, and has no byte that would still have to go.
TEST_F(RawPeerTest, AMessageWithoutBytesMayBeAStreamsFirst) {
  EXPECT_TRUE(comm_->SendReceive(kChannel, nullptr, 0, 1, nullptr, 0, -1)->Wait().ok());
  ASSERT_TRUE(comm_->SendReceive(kChannel, "x", 1, 1, nullptr, 0, -1)->Wait().ok());
  comm_.reset();
  std::vector<uint64_t> sequences, sizes;
  for (const v1::Frame& frame : peer_.Received()) {
    if (frame.sequence() == 0) continue;  // a hello or a goodbye
    sequences.push_back(frame.sequence());
    sizes.push_back(frame.total_bytes());
  }
  EXPECT_THAT(sequences, ::testing::ElementsAre(1, 2));
  EXPECT_THAT(sizes, ::testing::ElementsAre(0, 1));
}

// Its receiver takes nothing more of it: what the stream holds is let go at once, not with the
// communicator.
TEST_F(RawPeerTest, AnAbortThatAPeerHasHeardOfEndsTheStreamsToIt) {
  EXPECT_TRUE(comm_->SendReceive(kChannel, "x", 1, 1, nullptr, 0, -1)->Wait().ok());
  ASSERT_TRUE(peer_.AwaitReceived(/*frames=*/3)) << "two hellos and a message";
  comm_->Abort("out of memory");
  EXPECT_EQ(peer_.BrokenOff(/*streams=*/2), 1) << "the life line says goodbye";
}

// A peer that learns from the life line that this rank has left waits for nothing more of it.
TEST_F(RawPeerTest, SaysGoodbyeOnTheLifeLineOnceAllElseIsRead) {
  peer_.Pause();
  constexpr int kMessages = 500;  // more than a goodbye can overtake by chance
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(comm_->SendReceive(kChannel, "x", 1, 1, nullptr, 0, -1)->Wait().ok());
  }
  std::thread leave([this] { comm_.reset(); });
  peer_.Resume();
  leave.join();
  const std::vector<v1::Frame> all = peer_.Received();
  ASSERT_EQ(all.size(), 2 + kMessages + 2u);
  EXPECT_EQ(all.back().channel(), RawPeer::kLifeLine);
}

TEST_F(RawPeerTest, SaysWhyItGivesUp) {
  comm_->Abort("out of memory");
  EXPECT_EQ(comm_->status(), absl::AbortedError("rank 0: out of memory"));
  EXPECT_FALSE(comm_->aborted_by_peer());
  ASSERT_TRUE(peer_.AwaitReceived(/*frames=*/2)) << "a hello and the reason";
  comm_.reset();
  const std::vector<v1::Frame> all = peer_.Received();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[1].leaving());
  EXPECT_EQ(all[1].abort_reason(), "rank 0: out of memory");
}

// To all: some may not have heard it of the peer, whose connections may be what broke.
TEST_F(RawPeerTest, PassesOnWhyAPeerGaveUp) {
  peer_.life_line().Leave("rank 1: found a NaN");
  EXPECT_TRUE(peer_.life_line().Finish().ok());
  ASSERT_TRUE(peer_.AwaitReceived(/*frames=*/2)) << "a hello and the reason";
  comm_.reset();
  const std::vector<v1::Frame> all = peer_.Received();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[1].leaving());
  EXPECT_EQ(all[1].abort_reason(), "rank 1: found a NaN");
}

TEST_F(RawPeerTest, APeerThatAnswersNothingDoesNotHoldUpARankThatGaveUp) {
  peer_.Pause();
  comm_->Abort("out of memory");
  const std::future<void> gone = std::async(std::launch::async, [this] { comm_.reset(); });
  EXPECT_EQ(gone.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  peer_.Resume();
}

}  // namespace
}  // namespace ringleader::comm
