#include "worker/comm/grpc/grpc_communicator.h"

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "base/testing/test_certificates.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ringleader/v1/comm.grpc.pb.h"
#include "worker/comm/testing/grpc_communicators.h"
#include "worker/comm/testing/run_ranks.h"

namespace ringleader::comm {
namespace {

using testing::GrpcCommunicators;
using ::testing::HasSubstr;
using testing::RunRanks;

constexpr uint64_t kToken = 7;

TEST(GrpcCommunicatorTest, LargeMessagesCrossInBothDirections) {
  RunRanks(GrpcCommunicators(2), [](Communicator& comm) {
    const size_t bytes = (size_t{5} << 20) + 3;
    std::vector<char> out(bytes), in(bytes);
    for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<char>(i * 31 + comm.rank());
    const int peer = 1 - comm.rank();
    for (int round = 0; round < 3; ++round) {
      const absl::Status status =
          comm.SendReceive(Channel::kKvInner, out.data(), bytes, peer, in.data(), bytes, peer)
              ->Wait();
      ASSERT_TRUE(status.ok()) << status;
      for (size_t i = 0; i < bytes; ++i) {
        ASSERT_EQ(in[i], static_cast<char>(i * 31 + peer)) << i;
      }
    }
  });
}

TEST(GrpcCommunicatorTest, AChannelWhoseReceiverIsLateHoldsUpNoOther) {
  RunRanks(GrpcCommunicators(2), [](Communicator& comm) {
    const size_t bytes = size_t{32} << 20;  // more than any window
    std::vector<char> big(bytes, 5);
    const int peer = 1 - comm.rank();
    int out = comm.rank(), in = -1;
    if (comm.rank() == 0) {
      auto slow = comm.SendReceive(Channel::kKvOuter, big.data(), bytes, peer, nullptr, 0, -1);
      ASSERT_TRUE(comm.SendReceive(Channel::kGradKv, &out, 4, peer, &in, 4, peer)->Wait().ok());
      ASSERT_TRUE(slow->Wait().ok());
    } else {
      std::fill(big.begin(), big.end(), 0);
      ASSERT_TRUE(comm.SendReceive(Channel::kGradKv, &out, 4, peer, &in, 4, peer)->Wait().ok());
      ASSERT_TRUE(comm.SendReceive(Channel::kKvOuter, nullptr, 0, -1, big.data(), bytes, peer)
                      ->Wait()
                      .ok());
      EXPECT_EQ(big.back(), 5);
    }
    EXPECT_EQ(in, peer);
  });
}

TEST(GrpcCommunicatorTest, AbortReleasesPeersInTheMiddleOfLargeTransfers) {
  absl::BlockingCounter released(2);  // a rank that leaves waits a second at most until it is heard
  RunRanks(GrpcCommunicators(3), [&released](Communicator& comm) {
    std::vector<char> big(size_t{64} << 20);
    if (comm.rank() == 2) {
      std::vector<char> byte(1);
      ASSERT_TRUE(
          comm.SendReceive(Channel::kControl, nullptr, 0, -1, byte.data(), 1, 0)->Wait().ok());
      comm.Abort("found a NaN");
      return released.Wait();
    }
    const absl::Cleanup count = [&released] { released.DecrementCount(); };
    // Nobody receives the first; the second never comes.
    auto sending = comm.SendReceive(Channel::kKvInner, big.data(), big.size(), 2, nullptr, 0, -1);
    auto receiving = comm.SendReceive(Channel::kGradKv, nullptr, 0, -1, big.data(), 8, 2);
    const char go = 1;
    if (comm.rank() == 0) {
      // What it brings about may end it, too, before it is known to have arrived.
      comm.SendReceive(Channel::kControl, &go, 1, 2, nullptr, 0, -1)->Wait().IgnoreError();
    }
    const absl::Status received = receiving->Wait();
    EXPECT_EQ(received.code(), absl::StatusCode::kAborted) << received;
    EXPECT_THAT(std::string(received.message()), HasSubstr("rank 2: found a NaN"));
    EXPECT_EQ(sending->Wait().code(), absl::StatusCode::kAborted);
    EXPECT_TRUE(comm.aborted_by_peer());
  });
}

TEST(GrpcCommunicatorTest, ARankMayLeaveBeforeItsPeersReadItsLastMessage) {
  auto communicators = GrpcCommunicators(2);
  std::promise<void> leaving;
  RunRanks(std::move(communicators), [&](Communicator& comm) {
    int value = 11;
    if (comm.rank() == 0) {
      ASSERT_TRUE(comm.SendReceive(Channel::kControl, &value, 4, 1, nullptr, 0, -1)->Wait().ok());
      leaving.set_value();
      return;
    }
    leaving.get_future().wait();
    value = 0;
    ASSERT_TRUE(comm.SendReceive(Channel::kControl, nullptr, 0, -1, &value, 4, 0)->Wait().ok());
    EXPECT_EQ(value, 11);
    // What it never sent cannot come any more: an error instead of a wait for ever.
    EXPECT_FALSE(comm.SendReceive(Channel::kControl, nullptr, 0, -1, &value, 4, 0)->Wait().ok());
  });
}

TEST(GrpcCommunicatorTest, ConnectNamesTheRanksThatDoNotCome) {
  for (const int rank : {0, 1}) {
    auto listener = GrpcListener::Listen({.rank = rank,
                                          .size = 2,
                                          .fencing_token = kToken,
                                          .connect_timeout = absl::Milliseconds(200)})
                        .value();
    std::vector<std::string> addresses(2, "127.0.0.1:1");
    addresses[rank] = listener->address();
    const auto communicator = listener->Connect(addresses);
    ASSERT_FALSE(communicator.ok());
    const std::string message(communicator.status().message());
    EXPECT_THAT(message, HasSubstr(absl::StrFormat("rank(s) %d did not connect to rank %d within "
                                                   "200ms (they at 127.0.0.1:1, this one at %s)",
                                                   1 - rank, rank, listener->address())));
    EXPECT_THAT(message, HasSubstr("--address"));
  }
}

TEST(GrpcCommunicatorTest, ConnectShowsNoMoreMissingRanksThanOneCanRead) {
  auto listener = GrpcListener::Listen({.rank = 0,
                                        .size = 100,
                                        .fencing_token = kToken,
                                        .connect_timeout = absl::Milliseconds(200)})
                      .value();
  std::vector<std::string> addresses(100, "127.0.0.1:1");
  addresses[0] = listener->address();
  EXPECT_THAT(std::string(listener->Connect(addresses).status().message()),
              HasSubstr("rank(s) 1, 2, 3, 4, 5, 6, 7, 8 and 91 more did not connect"));
}

TEST(GrpcCommunicatorTest, RefusesAnotherFencingTokenProtocolVersionOrRank) {
  auto listener = GrpcListener::Listen({.rank = 0, .size = 2, .fencing_token = kToken}).value();
  auto stub = v1::PeerExchange::NewStub(
      grpc::CreateChannel(listener->address(), grpc::InsecureChannelCredentials()));
  const auto answer_to = [&](const v1::Frame& hello) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    v1::StreamEnd end;
    auto writer = stub->Stream(&context, &end);
    writer->Write(hello);
    return writer->Finish().error_code();
  };
  v1::Frame hello;
  hello.set_sender(1);
  // The token is of an attempt before this one, or after it: a rank that was replaced learns so
  // here.
  for (const uint64_t token : {uint64_t{0}, kToken - 1, kToken + 1}) {
    hello.set_fencing_token(token);
    EXPECT_EQ(answer_to(hello), grpc::StatusCode::PERMISSION_DENIED) << token;
  }
  hello.set_fencing_token(kToken);
  EXPECT_EQ(answer_to(hello), grpc::StatusCode::FAILED_PRECONDITION);  // of an older release
  hello.set_protocol_version(kProtocolVersion + 1);
  EXPECT_EQ(answer_to(hello), grpc::StatusCode::FAILED_PRECONDITION);
  hello.set_protocol_version(kProtocolVersion);
  hello.set_sender(2);
  EXPECT_EQ(answer_to(hello), grpc::StatusCode::INVALID_ARGUMENT);
}

// The node's one certificate, as server and as client.
std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> ConnectTwo(
    const TlsOptions& first, const TlsOptions& second, const std::vector<std::string>& names = {},
    absl::Duration patience = absl::Minutes(1)) {
  std::vector<std::unique_ptr<GrpcListener>> listeners;
  for (const TlsOptions& tls : {first, second}) {
    listeners.push_back(GrpcListener::Listen({.rank = static_cast<int>(listeners.size()),
                                              .size = 2,
                                              .fencing_token = kToken,
                                              .tls = tls,
                                              .connect_timeout = patience})
                            .value());
  }
  const std::vector<std::string> addresses = {listeners[0]->address(), listeners[1]->address()};
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> communicators(2);
  std::jthread other([&] { communicators[1] = listeners[1]->Connect(addresses, names); });
  communicators[0] = listeners[0]->Connect(addresses, names);
  other.join();
  return communicators;
}

// Whatever the machine's users have set for their downloads.
TEST(GrpcCommunicatorTest, AProxyFromTheEnvironmentDoesNotComeBetweenRanks) {
  const absl::Cleanup restore = [] { unsetenv("http_proxy"); };
  setenv("http_proxy", "http://127.0.0.1:1", 1);
  for (const auto& communicator : ConnectTwo({}, {})) {
    EXPECT_TRUE(communicator.ok()) << communicator.status();
  }
}

TEST(GrpcCommunicatorTest, RanksOfOneAuthorityTalkMutualTlsAndAStrangerStaysOut) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  auto connected = ConnectTwo(certificates.Options("server"), certificates.Options("client"));
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& communicator : connected) {
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    communicators.push_back(*std::move(communicator));
  }
  RunRanks(std::move(communicators), [](Communicator& comm) {
    const int out = comm.rank(), peer = 1 - comm.rank();
    int in = -1;
    ASSERT_TRUE(comm.SendReceive(Channel::kControl, &out, 4, peer, &in, 4, peer)->Wait().ok());
    EXPECT_EQ(in, peer);
  });
  for (const TlsOptions& stranger : {certificates.Options("stranger", "other"), TlsOptions()}) {
    for (const auto& refused :
         ConnectTwo(certificates.Options("server"), stranger, {}, absl::Seconds(3))) {
      EXPECT_EQ(refused.status().code(), absl::StatusCode::kDeadlineExceeded) << refused.status();
    }
  }
}

// A certificate of the authority and the token, which others may guess, are not enough.
TEST(GrpcCommunicatorTest, ARankIsTakenFromItsNodeAlone) {
  const TestCertificates certificates;
  for (const char* name : {"node/a", "node/b", "user/mallory"}) {
    const std::string file(absl::StripPrefix(name, "node/"));
    ASSERT_TRUE(certificates.Sign("ca", file == name ? "mallory" : file,
                                  {.more_names = absl::StrCat(",URI:ringleader://", name)}));
  }
  const std::vector<std::string> names = {"uri ringleader://node/a", "uri ringleader://node/b"};
  for (const auto& communicator :
       ConnectTwo(certificates.Options("a"), certificates.Options("b"), names)) {
    EXPECT_TRUE(communicator.ok()) << communicator.status();
  }
  for (const char* forger : {"mallory", "a"}) {
    // The forger itself hears from rank 0, and is none the wiser for a moment.
    EXPECT_FALSE(ConnectTwo(certificates.Options("a"), certificates.Options(forger), names,
                            absl::Seconds(3))[0]
                     .ok());
  }
  // A stream of rank 1 that is there before rank 0 knows its peers.
  auto listener = GrpcListener::Listen({.rank = 0,
                                        .size = 2,
                                        .fencing_token = kToken,
                                        .tls = certificates.Options("a"),
                                        .connect_timeout = absl::Milliseconds(500)})
                      .value();
  const Address address = ParseAddress(listener->address()).value();
  auto stub = v1::PeerExchange::NewStub(grpc::CreateChannel(
      listener->address(), *ChannelCredentials(certificates.Options("mallory"), address)));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::StreamEnd end;
  auto writer = stub->Stream(&context, &end);
  v1::Frame hello;
  hello.set_sender(1);
  hello.set_fencing_token(kToken);
  hello.set_protocol_version(kProtocolVersion);
  hello.set_channel(0xffffffff);
  ASSERT_TRUE(writer->Write(hello));
  EXPECT_EQ(listener->Connect({listener->address(), "127.0.0.1:1"}, names).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  const grpc::Status refused = writer->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("uri ringleader://node/b"));
}

TEST(GrpcCommunicatorTest, PlainTextStaysOnLoopback) {
  const auto listen = [](bool insecure) {
    TlsOptions tls;
    tls.insecure = insecure;
    return GrpcListener::Listen({.listen_host = "0.0.0.0", .tls = tls}).status();
  };
  EXPECT_EQ(listen(false).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(listen(false).message()), HasSubstr("--insecure"));
  EXPECT_TRUE(listen(true).ok()) << listen(true);
}

// A rank in a process of its own; GrpcCommunicatorTest.ADeadPeerIsNamed starts it. It waits for a
// message that never comes, until it is killed.
TEST(GrpcCommunicatorTest, DISABLED_ChildRank) {
  const char* const parents = std::getenv("PARENT_ADDRESSES");
  const char* const descriptor = std::getenv("ADDRESS_FD");
  ASSERT_TRUE(parents != nullptr && descriptor != nullptr) << "ADeadPeerIsNamed starts this";
  const std::vector<std::string> addresses = absl::StrSplit(parents, ',');
  auto listener = GrpcListener::Listen({.rank = 2, .size = 3, .fencing_token = kToken}).value();
  // The parents learn this rank's address from its standard output.
  dprintf(std::atoi(descriptor), "%s\n", listener->address().c_str());
  auto comm = listener->Connect({addresses[0], addresses[1], listener->address()}).value();
  char byte = 0;
  comm->SendReceive(Channel::kControl, nullptr, 0, -1, &byte, 1, 0)->Wait().IgnoreError();
}

TEST(GrpcCommunicatorTest, ADeadPeerIsNamed) {
  std::vector<std::unique_ptr<GrpcListener>> listeners;
  for (int rank : {0, 1}) {
    listeners.push_back(
        GrpcListener::Listen({.rank = rank, .size = 3, .fencing_token = kToken}).value());
  }
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const std::string parents =
      absl::StrCat("PARENT_ADDRESSES=", listeners[0]->address(), ",", listeners[1]->address());
  const std::string fd = absl::StrCat("ADDRESS_FD=", pipe_fds[1]);
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable)
    environment.push_back(*variable);
  environment.push_back(const_cast<char*>(parents.c_str()));
  environment.push_back(const_cast<char*>(fd.c_str()));
  environment.push_back(nullptr);
  const char* arguments[] = {"child", "--gtest_also_run_disabled_tests",
                             "--gtest_filter=*DISABLED_ChildRank", nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, "/proc/self/exe", nullptr, nullptr,
                        const_cast<char* const*>(arguments), environment.data()),
            0);
  const absl::Cleanup reap = [child] {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  };
  close(pipe_fds[1]);  // or a child that ends without a word would be waited for
  std::string child_address;
  for (char letter; read(pipe_fds[0], &letter, 1) == 1 && letter != '\n';) child_address += letter;
  close(pipe_fds[0]);

  const std::vector<std::string> addresses = {listeners[0]->address(), listeners[1]->address(),
                                              child_address};
  auto communicators = testing::ConnectAll(listeners, addresses);
  listeners.clear();

  const absl::Time start = absl::Now();
  RunRanks(std::move(communicators), [child, start](Communicator& comm) {
    if (comm.rank() == 0) {
      ASSERT_EQ(kill(child, SIGKILL), 0);
    }
    char byte = 0;
    const absl::Status status =
        comm.SendReceive(Channel::kKvInner, nullptr, 0, -1, &byte, 1, 2)->Wait();
    EXPECT_LT(absl::Now() - start, testing::kReleaseLimit);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2 is gone"));
    EXPECT_TRUE(comm.aborted_by_peer());
  });
}

}  // namespace
}  // namespace ringleader::comm
