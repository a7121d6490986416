// What this machine has to offer.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/address.h"
#include "ringleader/v1/node.pb.h"

namespace ringleader::agent {

struct InventoryOptions {
  uint32_t trainers = 0;      // 0: one a GPU; without GPUs, one
  std::string hostname = {};  // empty: the system's
  std::string address = {};   // that trainers on other nodes reach
  std::string topology_domain = {};
  // As NVML lists them; none: those of the driver's files, whose memory is not known.
  std::vector<v1::Gpu> gpus = {};
  // CUDA_VISIBLE_DEVICES as this worker has it; null: all GPUs.
  const char* visible_gpus = nullptr;
  // Root of the file system to look at; another one in tests.
  std::string root = {};
};

v1::NodeInventory TakeInventory(const InventoryOptions& options);

// The inventory while GPUs are out of order: `faults` is {UUID, why}. A trainer less for each that
// has a slot: slots take the GPUs in order.
v1::NodeInventory WithFaults(v1::NodeInventory inventory,
                             const std::map<std::string, std::string>& faults);

// This machine's address on the network through which it reaches `peer`; loopback if that is on
// this machine. A name that does not resolve and a network that is not up yet are tried again for
// as long as `patience`; then UNAVAILABLE says what is missing, and names --address.
absl::StatusOr<std::string> AddressFacing(const Address& peer, absl::Duration patience);

// The machine's host name, as a node id.
std::string DefaultNodeId();

}  // namespace ringleader::agent
