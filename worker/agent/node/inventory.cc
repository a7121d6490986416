#include "worker/agent/node/inventory.h"

#include <netdb.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"

namespace ringleader::agent {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kRouteRetryInterval = absl::Milliseconds(500);

uint32_t UsableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1u, static_cast<uint32_t>(CPU_COUNT(&set)));
  }
  return std::max(1u, static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN)));
}

std::string Strip(std::string_view text) {
  return std::string(absl::StripAsciiWhitespace(absl::string_view(text.data(), text.size())));
}

// "Key:   value" lines.
std::map<std::string, std::string> Fields(const fs::path& path) {
  std::map<std::string, std::string> fields;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    fields[Strip(std::string_view(line).substr(0, colon))] =
        Strip(std::string_view(line).substr(colon + 1));
  }
  return fields;
}

uint64_t MemoryBytes(const std::string& root) {
  uint64_t kibibytes = 0;
  const std::string total = Fields(root + "/proc/meminfo")["MemTotal"];
  (void)absl::SimpleAtoi(total.substr(0, total.find(' ')), &kibibytes);
  return kibibytes << 10;
}

std::vector<v1::Gpu> GpusFromDriver(const std::string& root) {
  std::error_code none;  // no such folder: no GPUs
  std::vector<fs::path> folders;
  for (fs::directory_iterator it(root + "/proc/driver/nvidia/gpus", none), end; it != end;
       it.increment(none)) {
    folders.push_back(it->path());
  }
  std::sort(folders.begin(), folders.end());  // by bus address, as CUDA_DEVICE_ORDER=PCI_BUS_ID
  std::vector<v1::Gpu> gpus;
  for (const fs::path& folder : folders) {
    auto fields = Fields(folder / "information");
    v1::Gpu& gpu = gpus.emplace_back();
    gpu.set_uuid(fields["GPU UUID"]);
    gpu.set_model(fields["Model"]);
  }
  return gpus;
}

// What CUDA_VISIBLE_DEVICES leaves of them: numbers, or beginnings of UUIDs.
std::vector<v1::Gpu> VisibleGpus(const std::vector<v1::Gpu>& all, const char* visible) {
  if (visible == nullptr) return all;
  std::vector<v1::Gpu> gpus;
  for (const std::string& name : std::vector<std::string>(absl::StrSplit(visible, ','))) {
    uint32_t number = 0;
    const bool is_number = absl::SimpleAtoi(Strip(name), &number);
    const auto found = std::find_if(all.begin(), all.end(), [&](const v1::Gpu& gpu) {
      return is_number ? &gpu == all.data() + number
                       : !Strip(name).empty() && gpu.uuid().starts_with(Strip(name));
    });
    if (found == all.end()) break;  // CUDA, too, ends the list at the first that it does not know
    gpus.push_back(*found);
  }
  return gpus;
}

// The local end of a connection to `peer`, were there one.
absl::StatusOr<std::string> RouteTo(const Address& peer) {
  const auto unknown = [&](const char* what, const char* why) {
    return absl::UnavailableError(absl::StrFormat(
        "the address at which other nodes reach this one is not known: %s %s: %s; give --address, "
        "or a --coordinator that this machine can reach",
        peer.host, what, why));
  };
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(peer.host.c_str(), std::to_string(peer.port).c_str(), &hints, &found);
      error != 0) {
    return unknown("does not resolve", gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  int error = 0;
  // A name may have addresses of a family for which there is no network here.
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    // Connecting a datagram socket sends nothing: it only looks the route up.
    const int fd = socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    char host[NI_MAXHOST] = {};
    const bool routed = connect(fd, entry->ai_addr, entry->ai_addrlen) == 0 &&
                        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0;
    if (!routed) error = errno;
    if (fd >= 0) close(fd);
    if (routed && getnameinfo(reinterpret_cast<sockaddr*>(&own), size, host, sizeof(host), nullptr,
                              0, NI_NUMERICHOST) == 0) {
      return host;
    }
  }
  return unknown("cannot be reached", std::strerror(error));
}

std::string SystemHostname() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

v1::NodeInventory TakeInventory(const InventoryOptions& options) {
  v1::NodeInventory inventory;
  inventory.set_hostname(options.hostname.empty() ? SystemHostname() : options.hostname);
  inventory.set_cpu_cores(UsableCores());
  inventory.set_memory_bytes(MemoryBytes(options.root));
  inventory.set_address(options.address);
  inventory.set_topology_domain(options.topology_domain);
  const std::vector<v1::Gpu> gpus =
      options.gpus.empty() ? GpusFromDriver(options.root) : options.gpus;
  for (const v1::Gpu& gpu : VisibleGpus(gpus, options.visible_gpus)) *inventory.add_gpus() = gpu;
  const uint32_t default_trainers = std::max(1u, static_cast<uint32_t>(inventory.gpus_size()));
  inventory.set_trainers(options.trainers == 0 ? default_trainers : options.trainers);
  return inventory;
}

v1::NodeInventory WithFaults(v1::NodeInventory inventory,
                             const std::map<std::string, std::string>& faults) {
  const uint32_t slots = inventory.trainers();
  for (uint32_t i = 0; i < static_cast<uint32_t>(inventory.gpus_size()); ++i) {
    v1::Gpu& gpu = *inventory.mutable_gpus(static_cast<int>(i));
    const auto fault = faults.find(gpu.uuid());
    if (fault == faults.end()) continue;
    gpu.set_fault(fault->second);
    if (i < slots) inventory.set_trainers(inventory.trainers() - 1);
  }
  return inventory;
}

absl::StatusOr<std::string> AddressFacing(const Address& peer, absl::Duration patience) {
  if (IsLoopback(peer)) return "127.0.0.1";
  const absl::Time give_up = BootNow() + patience;
  for (;;) {
    absl::StatusOr<std::string> address = RouteTo(peer);
    const absl::Duration left = give_up - BootNow();
    if (address.ok() || left <= absl::ZeroDuration()) return address;
    absl::SleepFor(std::min(kRouteRetryInterval, left));
  }
}

std::string DefaultNodeId() {
  std::string id = SystemHostname();
  for (char& c : id) {
    const bool valid = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.' || c == '_';
    if (!valid) c = '-';
  }
  return id.empty() ? "worker" : id;
}

}  // namespace ringleader::agent
