// How failures are found and told, on a GPU that is none.
#include "worker/comm/nccl/nccl_session.h"

#include <chrono>
#include <condition_variable>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/group_communicator.h"
#include "worker/comm/testing/fake_gpu.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::TheFakeGpu;

// The host of rank 0 of 2, which answers what a test says when it is asked how it is.
class PlayedHost : public Transport {
 public:
  explicit PlayedHost(std::function<absl::Status()> answer) : answer_(std::move(answer)) {}

  int rank() const override { return 0; }
  int size() const override { return 2; }
  void Send(StreamId /*stream*/, int /*to*/, PendingTransferPtr /*transfer*/) override {}
  void Receive(StreamId /*stream*/, int /*from*/, PendingTransferPtr /*transfer*/) override {}
  void Abort(const std::string& /*reason*/) override {}
  absl::Status status() const override { return answer_(); }
  bool aborted_by_peer() const override { return false; }

 private:
  const std::function<absl::Status()> answer_;
};

class NcclSessionTest : public ::testing::Test {
 protected:
  NcclSessionTest() { testing::ResetFakeGpu(); }

  std::unique_ptr<NcclSession> Session(const NcclOptions& options = {}) {
    return std::make_unique<NcclSession>(options, *LoadNccl(), hosts_[0].get());
  }
  static std::shared_ptr<WatchedComm> Comm() {
    auto comm = std::make_shared<WatchedComm>("set-up");
    comm->set_comm(reinterpret_cast<ncclComm_t>(testing::At(1)));
    return comm;
  }
  // Waits until the watchdog has found something. The test fails if it does not.
  static std::string Found(const NcclSession& session) {
    for (int i = 0; i < 3000 && !session.aborted(); ++i) absl::SleepFor(absl::Milliseconds(10));
    EXPECT_TRUE(session.aborted());
    return std::string(session.status().message());
  }

  const std::vector<std::unique_ptr<Communicator>> hosts_ = testing::LocalCommunicators(2);
};

TEST(DescribeTest, NamesOperationChannelBytesAndPeers) {
  EXPECT_EQ(Describe({.name = "send and receive",
                      .channel = Channel::kKvOuter,
                      .bytes = 4096,
                      .to = 0,
                      .from = 3}),
            "kv_outer send and receive of 4096 bytes, to rank 0, from rank 3");
  const char* const names[] = {"control", "kv_inner", "kv_outer", "grad_kv", "gradients"};
  for (int channel = 0; channel < kChannels; ++channel) {
    EXPECT_EQ(Describe({.name = "all-reduce", .channel = static_cast<Channel>(channel)}),
              std::string(names[channel]) + " all-reduce of 0 bytes");
  }
}

TEST_F(NcclSessionTest, TheFirstReasonStaysAndReachesTheHost) {
  const auto session = Session();
  EXPECT_EQ(session->status(), absl::OkStatus());
  session->Abort("out of memory");
  session->Abort("and something else");
  EXPECT_TRUE(session->aborted());
  EXPECT_EQ(session->status(), absl::AbortedError("out of memory"));
  EXPECT_EQ(hosts_[1]->status(), absl::AbortedError("rank 0: out of memory"));
}

TEST_F(NcclSessionTest, AHostsAbortIsFound) {
  const auto session = Session();
  hosts_[1]->Abort("found a NaN");
  EXPECT_EQ(Found(*session), "rank 1: found a NaN");
}

// NCCL sees a broken connection, the host's communicator whose death broke it.
TEST_F(NcclSessionTest, WhatAPeersDeathBringsAboutIsNotTheReason) {
  const auto session = Session();
  hosts_[1]->Abort("found a NaN");
  EXPECT_EQ(session->Fail(absl::InternalError("a socket closed")),
            absl::AbortedError("rank 1: found a NaN"));
  EXPECT_EQ(session->status(), absl::AbortedError("rank 1: found a NaN"));
}

// Its connections break at once; that it is gone may take the host a moment to find.
TEST_F(NcclSessionTest, NewsOfAPeersDeathAreAwaited) {
  const absl::Status gone = absl::AbortedError("rank 1 is gone: its stream broke");
  int asked = 0;
  GroupCommunicator host(
      std::make_shared<PlayedHost>([&, test = std::this_thread::get_id()]() -> absl::Status {
        // Nothing is known at first, and the watchdog hears nothing at all.
        if (std::this_thread::get_id() != test || ++asked <= 1) return absl::OkStatus();
        return gone;
      }));
  NcclSession session({}, *LoadNccl(), &host);
  EXPECT_EQ(session.Fail(absl::InternalError("a socket closed")), gone);
  EXPECT_EQ(session.status(), gone);
}

TEST_F(NcclSessionTest, AnErrorOfItsOwnIsTheReasonAndKeepsItsCode) {
  const auto session = Session();
  EXPECT_EQ(session->Fail(absl::InternalError("broken")), absl::InternalError("broken"));
  EXPECT_EQ(session->status(), absl::AbortedError("broken"));
  EXPECT_EQ(hosts_[1]->status(), absl::AbortedError("rank 0: broken"));
}

TEST_F(NcclSessionTest, AnErrorOfACommunicatorEndsAllOfThem) {
  const auto session = Session();
  session->Watch(std::make_shared<WatchedComm>("not made yet"));
  const auto first = Comm(), second = Comm();
  session->Watch(first);
  session->Watch(second);
  TheFakeGpu().state = ncclRemoteError;
  EXPECT_EQ(Found(*session),
            "rank 0 of 2: set-up: NCCL: remote error: a socket closed; NCCL_DEBUG=INFO says more");
  for (int i = 0; i < 3000 && TheFakeGpu().aborted < 2; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(TheFakeGpu().aborted, 2);
  EXPECT_EQ(first->Take(), nullptr);
  EXPECT_EQ(second->Take(), nullptr);
}

TEST_F(NcclSessionTest, WhatIsStillOpenIsAbortedInTheEndAndWhatIsForgottenIsNot) {
  auto session = Session();
  const auto open = Comm(), forgotten = Comm();
  session->Watch(open);
  session->Watch(forgotten);
  session->Forget(forgotten.get());
  session.reset();
  EXPECT_EQ(TheFakeGpu().aborted, 1);
  EXPECT_EQ(open->Take(), nullptr);
  EXPECT_NE(forgotten->Take(), nullptr);
  EXPECT_EQ(hosts_[0]->status(), absl::OkStatus()) << "an end is no failure";
}

TEST_F(NcclSessionTest, TheTransferThatDoesNotEndIsNamed) {
  const auto session = Session({.transfer_timeout = absl::Milliseconds(1)});
  const auto point = *session->events()->Record(nullptr);
  session->Watch({.name = "all-reduce", .channel = Channel::kGradients, .bytes = 8}, point);
  session->Watch({.name = "broadcast", .channel = Channel::kGradients, .bytes = 8}, point);
  EXPECT_THAT(Found(*session),
              ::testing::AllOf(
                  StartsWith("rank 0 of 2: gradients all-reduce of 8 bytes has not ended for "),
                  HasSubstr("resources.transfer_timeout_seconds")));
}

// However long it has been enqueued: others were before it.
TEST_F(NcclSessionTest, ATransferIsOverdueOnlyIfNoneOfItsChannelEnds) {
  std::latch all_enqueued(1);
  // The watchdog asks once in every round, and finds one more that has ended.
  GroupCommunicator host(std::make_shared<PlayedHost>([&]() -> absl::Status {
    all_enqueued.wait();
    ++TheFakeGpu().reached_events;
    return absl::OkStatus();
  }));
  NcclSession session({.transfer_timeout = absl::Milliseconds(1)}, *LoadNccl(), &host);
  std::weak_ptr<const DeviceEventPool::Event> last;
  for (int i = 0; i < 4; ++i) {
    const auto point = *session.events()->Record(nullptr);
    session.Watch({.name = "all-reduce"}, point);
    last = point;
  }
  all_enqueued.count_down();
  for (int i = 0; i < 3000 && !last.expired() && !session.aborted(); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_TRUE(last.expired()) << "it is watched no more";
  EXPECT_EQ(session.status(), absl::OkStatus());
}

TEST_F(NcclSessionTest, ATransferThatTheDeviceFailedEndsTheAttempt) {
  const auto session = Session();
  session->Watch({.name = "all-reduce"}, *session->events()->Record(nullptr));
  TheFakeGpu().events = cudaErrorIllegalAddress;
  EXPECT_EQ(Found(*session), "asking after a transfer: broken (out of order)");
}

TEST_F(NcclSessionTest, ErrorsForWantOfMemorySayWhatHelps) {
  const auto session = Session();
  const absl::Status other = session->NcclError(ncclUnhandledCudaError, "kv_inner set-up");
  EXPECT_EQ(other.code(), absl::StatusCode::kInternal) << "half of the memory is free";
  TheFakeGpu().free_bytes = size_t{256} << 20;
  EXPECT_EQ(session->NcclError(ncclRemoteError, "x").code(), absl::StatusCode::kInternal);
  const absl::Status full = session->NcclError(ncclUnhandledCudaError, "kv_inner set-up");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()),
              StartsWith("rank 0 of 2: kv_inner set-up: NCCL found no memory: 0.25 of 80.0 GiB"));
  session->Abort("over");
  EXPECT_EQ(session->NcclError(ncclRemoteError, "x"), absl::AbortedError("over"));
}

TEST(WatchedCommTest, WhatIsTakenAwayIsUsedNoMore) {
  WatchedComm comm("set-up");
  const auto use = [&] { return comm.Use([](ncclComm_t) { return ncclSuccess; }); };
  EXPECT_EQ(use(), ncclInvalidUsage) << "not made yet";
  const auto made = reinterpret_cast<ncclComm_t>(testing::At(1));
  comm.set_comm(made);
  EXPECT_EQ(use(), ncclSuccess);
  EXPECT_EQ(comm.Take(), made);
  EXPECT_EQ(comm.Take(), nullptr);
  EXPECT_EQ(use(), ncclInvalidUsage);
}

// Its abort is what sets the user free.
TEST(WatchedCommTest, AUserThatIsStuckDoesNotKeepIt) {
  WatchedComm comm("set-up");
  comm.set_comm(reinterpret_cast<ncclComm_t>(testing::At(1)));
  std::mutex mutex;
  std::condition_variable changed;
  bool is_stuck = false, is_free = false, was_freed = false;
  std::thread user([&] {
    comm.Use([&](ncclComm_t) {
      std::unique_lock lock(mutex);
      is_stuck = true;
      changed.notify_all();
      was_freed = changed.wait_for(lock, std::chrono::seconds(20), [&] { return is_free; });
      return ncclSuccess;
    });
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return is_stuck; });
  lock.unlock();
  EXPECT_NE(comm.Take(), nullptr);
  lock.lock();
  is_free = true;
  changed.notify_all();
  lock.unlock();
  user.join();
  EXPECT_TRUE(was_freed) << "it was waited for";
}

TEST(DeviceEventPoolTest, EventsAreUsedAgainAndEndWithThePool) {
  testing::ResetFakeGpu();
  {
    const auto pool = std::make_shared<DeviceEventPool>();
    const auto kept = *pool->Record(testing::Stream(7));
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(pool->Record(testing::Stream(8)).ok());
    EXPECT_EQ(TheFakeGpu().events_made, 2);
    EXPECT_THAT(testing::TakeCalls(),
                ::testing::ElementsAre("e1 on s7", "e2 on s8", "e2 on s8", "e2 on s8"));
    EXPECT_FALSE(*kept->reached());
    TheFakeGpu().events = cudaSuccess;
    EXPECT_TRUE(*kept->reached());
    EXPECT_EQ(kept->Order(testing::Stream(9)), absl::OkStatus());
    EXPECT_THAT(testing::TakeCalls(), ::testing::ElementsAre("s9 waits for e1"));
    TheFakeGpu().is_full = true;
    const auto another = *pool->Record(testing::Stream(8));
    EXPECT_EQ(pool->Record(testing::Stream(8)).status(),
              absl::ResourceExhaustedError("creating an event: no memory (out of memory)"));
  }
  EXPECT_EQ(TheFakeGpu().events_made, 0);
}

}  // namespace
}  // namespace ringleader::comm
