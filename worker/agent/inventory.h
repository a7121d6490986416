// What this machine has to offer.
#pragma once

#include <cstdint>
#include <string>

#include "base/address.h"
#include "ringleader/v1/node.pb.h"

namespace ringleader::agent {

struct InventoryOptions {
  uint32_t trainers = 0;     // 0: one a GPU; without GPUs, one
  std::string address = {};  // that trainers on other nodes reach
  std::string topology_domain = {};
  // CUDA_VISIBLE_DEVICES as this worker has it; null: all GPUs.
  const char* visible_gpus = nullptr;
  // Root of the file system to look at; another one in tests.
  std::string root = {};
};

v1::NodeInventory TakeInventory(const InventoryOptions& options);

// This machine's address on the network through which it reaches `peer`; loopback if that is on
// this machine, or cannot be told.
std::string AddressFacing(const Address& peer);

// The machine's host name, as a node id.
std::string DefaultNodeId();

}  // namespace ringleader::agent
