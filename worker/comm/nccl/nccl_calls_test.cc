// What ranks ask of NCCL and of CUDA, on GPUs that are none: the calls, their order and their ends.
#include <barrier>
#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/comm/testing/fake_gpu.h"
#include "worker/comm/testing/run_ranks.h"

namespace ringleader::comm {
namespace {

using testing::At;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TakeCalls;
using testing::TheFakeGpu;

constexpr Channel kChannel = Channel::kKvInner;
const cudaStream_t kAfter = testing::Stream(100);

// `body(device)` for each of `ranks`, on a thread of its own.
template <typename Body>
void OnRanks(int ranks, NcclOptions options, Body body) {
  testing::ResetFakeGpu();
  options.device = 3;
  testing::RunRanks(ranks, [&](Communicator& host) {
    auto device = CreateNcclCommunicator(options, &host);
    ASSERT_TRUE(device.ok()) << device.status();
    TakeCalls();
    body(*device);
  });
}

// Makes the channel's communicator, with a stream and an event.
void Open(DeviceCommunicator& device, Channel channel = kChannel) {
  ASSERT_TRUE(device.Broadcast(channel, At(1), 0, 0, kAfter).ok());
  TakeCalls();
}

TEST(NcclCallsTest, AChannelIsMadeWithItsFirstTransferAndOrderedBehindTheCaller) {
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    const int peer = 1 - device->rank();
    const std::string rank = std::to_string(device->rank()), other = std::to_string(peer);
    ASSERT_TRUE(device->SendReceive(kChannel, At(500), 16, peer, At(600), 8, peer, kAfter).ok());
    EXPECT_THAT(
        TakeCalls(),
        ElementsAre("device 3", "s1 has priority -5",
                    "c1 is rank " + rank + " of 2, id 1, blocking 0, blocks 16", "e1 on s100",
                    "s1 waits for e1", "{", "send 16 of type 1 at 500 to " + other + " by c1 on s1",
                    "receive 8 of type 1 at 600 from " + other + " by c1 on s1", "}", "e2 on s1"));
    const auto transfer = device->SendReceive(kChannel, At(500), 16, peer, nullptr, 0, -1, kAfter);
    EXPECT_THAT(TakeCalls(), ElementsAre("e1 on s100", "s1 waits for e1", "{",
                                         "send 16 of type 1 at 500 to " + other + " by c1 on s1",
                                         "}", "e3 on s1"));
    ASSERT_TRUE(transfer.ok() && (*transfer)->Order(kAfter).ok());
    EXPECT_THAT(TakeCalls(), ElementsAre("s100 waits for e3"));
    ASSERT_TRUE(device->SendReceive(kChannel, nullptr, 0, -1, At(600), 8, peer, kAfter).ok());
    EXPECT_THAT(TakeCalls()[3], "receive 8 of type 1 at 600 from " + other + " by c1 on s1");
    ASSERT_TRUE(device->Broadcast(Channel::kGradKv, At(600), 8, 1, kAfter).ok());
    EXPECT_THAT(TakeCalls()[2], "c2 is rank " + rank + " of 2, id 2, blocking 0, blocks 16");
  });
}

TEST(NcclCallsTest, WhatARankSendsItselfIsCopied) {
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    const int rank = device->rank(), peer = 1 - rank;
    const auto send_receive = [&](size_t bytes, int to, int from) {
      return device->SendReceive(kChannel, At(500), bytes, to, At(600), 8, from, kAfter).status();
    };
    EXPECT_EQ(send_receive(8, rank, rank), absl::OkStatus());
    EXPECT_THAT(TakeCalls(), ElementsAre("e1 on s100", "s1 waits for e1",
                                         "copy 8 from 500 to 600 on s1", "e3 on s1"));
    for (const auto& [to, from] : {std::pair{rank, peer},
                                   {peer, rank},
                                   {2, peer},
                                   {peer, 2},
                                   {-2, peer},
                                   {peer, -2},
                                   {rank, -1}}) {
      EXPECT_EQ(send_receive(8, to, from).code(), absl::StatusCode::kInvalidArgument)
          << to << " " << from;
    }
    EXPECT_EQ(send_receive(7, rank, rank).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(TakeCalls(), ElementsAre());
    EXPECT_EQ(device->status(), absl::OkStatus());
  });
}

TEST(NcclCallsTest, CollectivesAreNccls) {
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    const auto call = [](const absl::StatusOr<DeviceTransfer>& transfer) {
      EXPECT_TRUE(transfer.ok()) << transfer.status();
      std::vector<std::string> calls = TakeCalls();
      // Before: what the channel's stream waits for; behind: what marks the transfer's end.
      calls.erase(calls.begin(), calls.begin() + 2);
      calls.pop_back();
      return calls;
    };
    const std::string where = " by c1 on s1";
    const std::pair<ElementType, std::string> types[] = {{ElementType::kFloat32, "7"},
                                                         {ElementType::kBfloat16, "9"},
                                                         {ElementType::kInt32, "2"},
                                                         {ElementType::kInt64, "4"},
                                                         {ElementType::kFloat64, "8"}};
    for (const auto& [type, name] : types) {
      EXPECT_THAT(
          call(device->AllReduceSum(kChannel, At(500), 5, type, kAfter)),
          ElementsAre(absl::StrCat("all-reduce 0 5 of type ", name, " from 500 to 500", where)));
    }
    const ElementType type = ElementType::kFloat32;
    EXPECT_THAT(call(device->AllReduceMax(kChannel, At(500), 5, type, kAfter)),
                ElementsAre("all-reduce 2 5 of type 7 from 500 to 500" + where));
    EXPECT_THAT(call(device->AllGather(kChannel, At(500), 5, At(600), kAfter)),
                ElementsAre("all-gather 5 of type 1 from 500 to 600" + where));
    EXPECT_THAT(call(device->ReduceScatterSum(kChannel, At(500), 5, At(600), type, kAfter)),
                ElementsAre("reduce-scatter 0 5 of type 7 from 500 to 600" + where));
    EXPECT_THAT(call(device->ReduceSum(kChannel, At(500), 5, At(600), type, 1, kAfter)),
                ElementsAre("reduce 0 5 of type 7 from 500 to 600 at 1" + where));
    EXPECT_THAT(call(device->Broadcast(kChannel, At(500), 5, 1, kAfter)),
                ElementsAre("broadcast 5 of type 1 from 500 to 500 of 1" + where));
    EXPECT_THAT(call(device->AllToAll(kChannel, At(500), 5, At(600), kAfter)),
                ElementsAre("{", "send 5 of type 1 at 500 to 0" + where,
                            "receive 5 of type 1 at 600 from 0" + where,
                            "send 5 of type 1 at 505 to 1" + where,
                            "receive 5 of type 1 at 605 from 1" + where, "}"));
  });
}

TEST(NcclCallsTest, OneRankCopiesAndNeedsNoNccl) {
  OnRanks(1, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    const auto copies = [](const absl::StatusOr<DeviceTransfer>& transfer) {
      EXPECT_TRUE(transfer.ok()) << transfer.status();
      std::vector<std::string> calls = TakeCalls();
      std::erase_if(calls, [](const std::string& call) { return !call.starts_with("copy"); });
      return calls;
    };
    const ElementType type = ElementType::kBfloat16;
    EXPECT_THAT(copies(device->SendReceive(kChannel, nullptr, 0, -1, nullptr, 0, -1, kAfter)),
                ElementsAre());
    EXPECT_THAT(copies(device->AllReduceSum(kChannel, At(500), 5, type, kAfter)), ElementsAre());
    EXPECT_THAT(copies(device->Broadcast(kChannel, At(500), 5, 0, kAfter)), ElementsAre());
    EXPECT_THAT(copies(device->AllGather(kChannel, At(500), 5, At(600), kAfter)),
                ElementsAre("copy 5 from 500 to 600 on s1"));
    EXPECT_THAT(copies(device->AllToAll(kChannel, At(500), 5, At(600), kAfter)),
                ElementsAre("copy 5 from 500 to 600 on s1"));
    const std::pair<ElementType, std::string> types[] = {{ElementType::kFloat32, "20"},
                                                         {ElementType::kBfloat16, "10"},
                                                         {ElementType::kInt32, "20"},
                                                         {ElementType::kInt64, "40"},
                                                         {ElementType::kFloat64, "40"}};
    for (const auto& [each, bytes] : types) {
      EXPECT_THAT(copies(device->ReduceScatterSum(kChannel, At(500), 5, At(600), each, kAfter)),
                  ElementsAre("copy " + bytes + " from 500 to 600 on s1"));
    }
    EXPECT_THAT(copies(device->ReduceSum(kChannel, At(500), 5, At(600), type, 0, kAfter)),
                ElementsAre("copy 10 from 500 to 600 on s1"));
    EXPECT_THAT(copies(device->AllGather(kChannel, At(500), 0, At(600), kAfter)), ElementsAre());
  });
  EXPECT_EQ(TheFakeGpu().ids, 0);
}

TEST(NcclCallsTest, ChannelsAreFinishedBeforeTheyAreDestroyed) {
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device, Channel::kGradKv);
    Open(*device, Channel::kControl);
    device.reset();
    EXPECT_THAT(TakeCalls(), ElementsAre("device 3", "finalize c2", "destroy c2", "destroy s2",
                                         "finalize c1", "destroy c1", "destroy s1"));
  });
  EXPECT_EQ(TheFakeGpu().aborted, 0);
  // What NCCL cannot finish, it cannot destroy either.
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    TheFakeGpu().finalize = ncclInternalError;
    device.reset();
    EXPECT_THAT(TakeCalls(), ElementsAre("device 3", "finalize c1", "abort c1", "destroy s1"));
  });
  EXPECT_EQ(TheFakeGpu().destroyed, 0);
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    TheFakeGpu().finalize = ncclInProgress;  // and then done
  });
  EXPECT_EQ(TheFakeGpu().destroyed, 2);
}

TEST(NcclCallsTest, AfterAnAbortNothingIsEnqueuedAndEverythingIsAborted) {
  std::latch all_open(2);
  OnRanks(2, {}, [&](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    all_open.arrive_and_wait();
    device->Abort("out of memory");
    EXPECT_EQ(device->status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(device->Broadcast(kChannel, At(500), 5, 0, kAfter).status(), device->status());
    EXPECT_EQ(device->Allocate(8, {}).status(), device->status());
    device.reset();
    for (const std::string& call : TakeCalls()) {
      EXPECT_TRUE(call == "device 3" || call == "abort c1") << call;
    }
  });
  EXPECT_EQ(TheFakeGpu().aborted, 2);
  EXPECT_EQ(TheFakeGpu().destroyed, 0);
}

TEST(NcclCallsTest, AnErrorOfACallIsNamedAndEndsTheAttempt) {
  std::latch all_open(2);
  OnRanks(2, {}, [&](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    all_open.arrive_and_wait();
    TheFakeGpu().reduction = ncclRemoteError;
    const absl::Status status =
        device->AllReduceSum(kChannel, At(500), 5, ElementType::kBfloat16, kAfter).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(" of 2: kv_inner all-reduce of 10 bytes: NCCL: remote error"));
    EXPECT_EQ(device->status().code(), absl::StatusCode::kAborted);
  });
}

TEST(NcclCallsTest, AGroupOfCallsFailsWithItsEnd) {
  std::barrier all_open(2);
  OnRanks(2, {}, [&](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    all_open.arrive_and_wait();
    TheFakeGpu().group_end = ncclRemoteError;
    const int peer = 1 - device->rank();
    EXPECT_THAT(
        std::string(device->SendReceive(kChannel, At(500), 16, peer, At(600), 8, peer, kAfter)
                        .status()
                        .message()),
        HasSubstr(" of 2: kv_inner send and receive of 16 bytes, to rank "));
  });
  OnRanks(2, {}, [&](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    all_open.arrive_and_wait();
    TheFakeGpu().group_end = ncclRemoteError;
    EXPECT_THAT(
        std::string(device->AllToAll(kChannel, At(500), 5, At(600), kAfter).status().message()),
        HasSubstr(" of 2: kv_inner all-to-all of 10 bytes: NCCL: remote error"));
  });
}

TEST(NcclCallsTest, ACallInTheBackgroundIsWaitedFor) {
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device);
    TheFakeGpu().reduction = ncclInProgress;
    const ElementType type = ElementType::kInt64;
    EXPECT_TRUE(device->AllReduceSum(kChannel, At(500), 5, type, kAfter).ok());
  });
  OnRanks(2, {.create_timeout = absl::Milliseconds(20)},
          [](std::unique_ptr<DeviceCommunicator>& device) {
            TheFakeGpu().state = ncclInProgress;
            const absl::Status status = device->Broadcast(kChannel, At(500), 5, 0, kAfter).status();
            EXPECT_THAT(std::string(status.message()),
                        HasSubstr("kv_inner set-up of 0 bytes: NCCL is not done in time"));
          });
  EXPECT_EQ(TheFakeGpu().destroyed, 0);
  std::latch all_open(2);
  OnRanks(2, {.create_timeout = absl::Milliseconds(20)},
          [&](std::unique_ptr<DeviceCommunicator>& device) {
            Open(*device);
            all_open.arrive_and_wait();
            TheFakeGpu().state = TheFakeGpu().reduction = ncclInProgress;
            const absl::Status status =
                device->AllReduceSum(kChannel, At(500), 5, ElementType::kInt64, kAfter).status();
            EXPECT_THAT(std::string(status.message()),
                        HasSubstr("kv_inner all-reduce of 40 bytes: NCCL is not done in time"));
          });
}

// An error names ranks as the attempt does, and so does one of a group.
TEST(NcclCallsTest, AGroupHasChannelsOfItsOwnAndNamesTheAttemptsRanks) {
  OnRanks(
      3, {.transfer_timeout = absl::Milliseconds(1)},
      [](std::unique_ptr<DeviceCommunicator>& device) {
        if (device->rank() == 1) return;
        const auto group = device->Split({2, 0});
        ASSERT_TRUE(group.ok()) << group.status();
        const int peer = 1 - (*group)->rank();
        EXPECT_EQ((*group)->size(), 2);
        EXPECT_EQ((*group)->rank(), device->rank() == 2 ? 0 : 1);
        ASSERT_TRUE((*group)->SendReceive(kChannel, At(1), 5, peer, At(2), 5, peer, kAfter).ok());
        for (int i = 0; i < 3000 && device->status().ok(); ++i) {
          absl::SleepFor(absl::Milliseconds(10));
        }
        EXPECT_THAT(std::string(device->status().message()),
                    ::testing::AnyOf(HasSubstr("rank 0 of 3: kv_inner send and receive of 5 "
                                               "bytes, to rank 2, from rank 2 has not ended"),
                                     HasSubstr("rank 2 of 3: kv_inner send and receive of 5 "
                                               "bytes, to rank 0, from rank 0 has not ended")));
        EXPECT_EQ((*group)->status(), device->status());
      });
}

TEST(NcclCallsTest, MemoryIsRegisteredWithTheChannelsThatItIsFor) {
  OnRanks(2, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    Open(*device, Channel::kKvInner);
    const Channel channels[] = {Channel::kKvInner, Channel::kGradKv};
    auto memory = device->Allocate(64, channels);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(memory->get(), At(1000));
    EXPECT_THAT(TakeCalls(), ElementsAre("device 3", "nccl gives 64", "register 64 with c1"));
    EXPECT_EQ(device->allocated_bytes(), 64u);
    ASSERT_TRUE(device->Broadcast(Channel::kKvOuter, At(1), 0, 0, kAfter).ok());
    EXPECT_THAT(TakeCalls(), ::testing::Not(::testing::Contains(HasSubstr("register"))));
    ASSERT_TRUE(device->Broadcast(Channel::kGradKv, At(1), 0, 0, kAfter).ok());
    EXPECT_THAT(TakeCalls(), ::testing::Contains("register 64 with c3"));
    *memory = nullptr;
    EXPECT_THAT(TakeCalls(), ElementsAre("device 3", "synchronize", "deregister 1 from c1",
                                         "deregister 2 from c3", "nccl takes it back"));
    EXPECT_EQ(device->allocated_bytes(), 0u);
    ASSERT_TRUE(device->Broadcast(Channel::kGradients, At(1), 0, 0, kAfter).ok());
    EXPECT_THAT(TakeCalls(), ::testing::Not(::testing::Contains(HasSubstr("register"))));
  });
  OnRanks(1, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
    ASSERT_TRUE(device->Allocate(64, {}).ok());
    EXPECT_THAT(TakeCalls(), ElementsAre("device 3", "cuda gives 64", "device 3", "synchronize",
                                         "cuda takes it back"));
  });
}

TEST(NcclCallsTest, MemoryThatThereIsNotIsRefusedWithTheNumbers) {
  for (const int ranks : {1, 2}) {
    OnRanks(ranks, {}, [](std::unique_ptr<DeviceCommunicator>& device) {
      TheFakeGpu().is_full = true;
      TheFakeGpu().free_bytes = size_t{256} << 20;
      const absl::Status refused = device->Allocate(size_t{1} << 30, {}).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(refused.message()),
                  HasSubstr("GPU 3 does not give 1.00 GiB for what travels between ranks; 0.25 GiB "
                            "of 80.00 are free"));
      EXPECT_THAT(TakeCalls(), ElementsAre("device 3", "forget the last error"));
      EXPECT_EQ(device->allocated_bytes(), 0u);
      EXPECT_EQ(device->status(), absl::OkStatus());
    });
  }
}

}  // namespace
}  // namespace ringleader::comm
