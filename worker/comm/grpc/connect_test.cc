// How ranks come together, or say what keeps them apart.
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/grpc/grpc_communicator.h"
#include "worker/comm/testing/grpc_communicators.h"
#include "worker/comm/testing/raw_peer.h"
#include "worker/comm/testing/run_ranks.h"

namespace ringleader::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kNobody[] = "127.0.0.1:1";

std::unique_ptr<GrpcListener> Listen(int rank, int size) {
  return GrpcListener::Listen({.rank = rank, .size = size, .fencing_token = 7}).value();
}

TEST(ConnectTest, NeedsAnAddressForEveryRank) {
  EXPECT_EQ(Listen(0, 2)->Connect({kNobody}).status(),
            absl::InvalidArgumentError("1 addresses for 2 ranks"));
  EXPECT_EQ(Listen(0, 1)->Connect({kNobody, kNobody}).status(),
            absl::InvalidArgumentError("2 addresses for 1 ranks"));
  EXPECT_EQ(Listen(0, 2)->Connect({kNobody, "nowhere"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ConnectTest, NeedsACertificatesNameForEveryRankOrNone) {
  EXPECT_EQ(Listen(0, 2)->Connect({kNobody, kNobody}, {"uri ringleader://node/a"}).status(),
            absl::InvalidArgumentError("certificates of 1 nodes for 2 ranks"));
}

// Its stream is kept until this rank knows whom to expect, which it never will.
TEST(ConnectTest, APeerThatCameBeforeItsRankGaveUpHoldsUpNothing) {
  auto listener = Listen(0, 2);
  const auto stub = v1::PeerExchange::NewStub(
      grpc::CreateChannel(listener->address(), grpc::InsecureChannelCredentials()));
  testing::RawPeer::Line early(*stub), stranger(*stub);
  ASSERT_TRUE(early.Write(testing::RawPeer::Hello(testing::RawPeer::kLifeLine)));
  // One that came later over the same connection has its answer.
  v1::Frame hello = testing::RawPeer::Hello(testing::RawPeer::kLifeLine);
  hello.set_fencing_token(testing::RawPeer::kToken + 1);
  ASSERT_TRUE(stranger.Write(hello));
  EXPECT_EQ(stranger.Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  listener.reset();
  EXPECT_FALSE(early.Finish().ok());
}

TEST(ConnectTest, OneRankIsConnectedAtOnce) {
  const auto listener = Listen(0, 1);
  EXPECT_THAT(listener->address(), StartsWith("127.0.0.1:"));
  const auto communicator = listener->Connect({listener->address()});
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  EXPECT_EQ((*communicator)->rank(), 0);
  EXPECT_EQ((*communicator)->size(), 1);
}

TEST(ConnectTest, PlainTextGoesToNoRankOffLoopback) {
  const auto listener = Listen(0, 2);
  // Whichever of the addresses it is.
  for (const std::vector<std::string>& addresses :
       {std::vector<std::string>{kNobody, "192.0.2.1:5"}, {"192.0.2.1:5", kNobody}}) {
    EXPECT_EQ(listener->Connect(addresses).status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(ConnectTest, AnAddressOfAnotherMachineCannotBeListenedOn) {
  TlsOptions tls;
  tls.insecure = true;
  const absl::Status status =
      GrpcListener::Listen({.listen_host = "192.0.2.1", .tls = tls}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(HasSubstr("192.0.2.1"), HasSubstr("--address")));
}

// It takes no leave: others would take it for one that has done its part, and wait on.
TEST(ConnectTest, ARankThatGaveUpWaitingForAnotherIsGone) {
  std::vector<std::unique_ptr<GrpcListener>> listeners;
  for (const absl::Duration timeout : {absl::Seconds(6), absl::Seconds(60)}) {
    listeners.push_back(GrpcListener::Listen({.rank = static_cast<int>(listeners.size()),
                                              .size = 3,
                                              .fencing_token = 7,
                                              .connect_timeout = timeout})
                            .value());
  }
  const std::vector<std::string> addresses = {listeners[0]->address(), listeners[1]->address(),
                                              kNobody};
  std::jthread impatient([&] {
    const absl::Status gave_up = listeners[0]->Connect(addresses).status();
    EXPECT_EQ(gave_up.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(gave_up.message()),
                StartsWith("rank(s) 2 did not connect to rank 0 within 6s (they at 127.0.0.1:1, "))
        << "rank 1 has come";
    listeners[0].reset();
  });
  const absl::Status status = listeners[1]->Connect(addresses).status();
  impatient.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("rank 0 is gone"));
}

TEST(ConnectTest, AStreamOfDataIsNoArrival) {
  const auto listener = GrpcListener::Listen({.rank = 0,
                                              .size = 2,
                                              .fencing_token = testing::RawPeer::kToken,
                                              .connect_timeout = absl::Milliseconds(300)})
                            .value();
  const auto stub = v1::PeerExchange::NewStub(
      grpc::CreateChannel(listener->address(), grpc::InsecureChannelCredentials()));
  testing::RawPeer::Line line(*stub);
  ASSERT_TRUE(line.Write(testing::RawPeer::Hello(/*stream=*/1)));
  EXPECT_EQ(listener->Connect({listener->address(), kNobody}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(ConnectTest, AnAbortEndsTheWaitWithItsReason) {
  const auto listener = Listen(0, 2);
  std::jthread abort([&] { listener->Abort("told to stop"); });
  EXPECT_EQ(listener->Connect({listener->address(), kNobody}).status(),
            absl::AbortedError("rank 0: told to stop"));
}

// A process may end right after this, without taking its communicators down.
TEST(ConnectTest, AnAbortThatWasAwaitedHasBeenHeard) {
  int heard = 0;
  for (int trial = 0; trial < 100 && heard < 8; ++trial) {  // some are heard at once by chance
    std::vector<std::unique_ptr<GrpcListener>> listeners;
    for (int rank : {0, 1}) listeners.push_back(Listen(rank, 2));
    const auto communicators =
        testing::ConnectAll(listeners, {listeners[0]->address(), listeners[1]->address()});
    listeners[0]->Abort("out of memory");
    if (!listeners[0]->AwaitAbortHeard()) continue;  // on a machine that stood still
    ++heard;
    EXPECT_EQ(communicators[1]->status(), absl::AbortedError("rank 0: out of memory"));
    EXPECT_TRUE(communicators[1]->aborted_by_peer());
  }
  EXPECT_EQ(heard, 8);
}

// Whoever goes first leaves the others in peace.
TEST(ConnectTest, RanksGoOnWithoutOneThatLeft) {
  auto communicators = testing::GrpcCommunicators(3);
  std::vector<std::unique_ptr<Communicator>> stay;
  stay.push_back(std::move(communicators[0]));
  stay.push_back(std::move(communicators[1]));
  communicators.clear();
  testing::RunRanks(std::move(stay), [](Communicator& comm) {
    const int out = comm.rank(), peer = 1 - comm.rank();
    for (int round = 0; round < 100; ++round) {
      int in = -1;
      ASSERT_TRUE(comm.SendReceive(Channel::kControl, &out, 4, peer, &in, 4, peer)->Wait().ok());
      ASSERT_EQ(in, peer);
    }
    int never = 0;
    EXPECT_EQ(comm.SendReceive(Channel::kControl, nullptr, 0, -1, &never, 4, 2)->Wait(),
              absl::UnavailableError("rank 2 has left; it will not send what this rank waits for"));
    EXPECT_EQ(comm.status(), absl::OkStatus());
  });
}

TEST(ConnectTest, WhatIsAwaitedOfOthersIsAwaitedOn) {
  auto communicators = testing::GrpcCommunicators(3);
  int of_one = -1, of_two = -1;
  const auto receive = [&](int* in, int from) {
    return communicators[0]->SendReceive(Channel::kControl, nullptr, 0, -1, in, 4, from);
  };
  const auto one = receive(&of_one, 1), two = receive(&of_two, 2);
  communicators[2].reset();
  EXPECT_TRUE(absl::IsUnavailable(two->Wait()));
  const int sent = 5;
  EXPECT_TRUE(
      communicators[1]->SendReceive(Channel::kControl, &sent, 4, 0, nullptr, 0, -1)->Wait().ok());
  EXPECT_EQ(one->Wait(), absl::OkStatus());
  EXPECT_EQ(of_one, sent);
}

}  // namespace
}  // namespace ringleader::comm
