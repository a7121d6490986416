// The DeviceCommunicator of GPUs: NCCL, which is loaded at run time.
//
// A channel's communicator is made when the channel is first used: rank 0 of the group draws an id,
// and the host's communicator carries it to the others. Creation never blocks inside NCCL, so it
// ends with an error when a peer does not come. NCCL sums bf16 in fp32 within an addition and
// rounds the sum at every hop.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::comm {

struct NcclOptions {
  int device = 0;  // CUDA's number of this rank's GPU
  // How long to wait until all ranks of a group have come to make a channel.
  absl::Duration create_timeout = absl::Seconds(60);
  // How long a channel may go without the end of any transfer while one is under way: after that a
  // peer is taken to hang. Longer than the longest computation between two transfers.
  absl::Duration transfer_timeout = absl::Seconds(180);
};

// Spans all ranks of `host`, which carries ids and news of failures and must outlive the result and
// what is split off it. A failure anywhere (an asynchronous error, an overdue transfer, the host's
// abort) aborts all of it, and the host with it, so that every rank leaves. Collective over `host`.
// UNAVAILABLE where NCCL does not load; with one rank it is not needed.
absl::StatusOr<std::unique_ptr<DeviceCommunicator>> CreateNcclCommunicator(
    const NcclOptions& options, Communicator* host);

}  // namespace ringleader::comm
