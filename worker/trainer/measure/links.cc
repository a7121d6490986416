#include "worker/trainer/measure/links.h"

#include <algorithm>
#include <cstdint>

#include "base/status_macros.h"

namespace ringleader::trainer {
namespace {

constexpr size_t kSmallBytes = 4096;
// As large as a rank's keys and values of a layer: over loopback, and over GPUs' links.
constexpr size_t kLargeBytesOnHost = size_t{4} << 20, kLargeBytesOnDevice = size_t{64} << 20;
constexpr int kRepeats = 7;

// Returns the median seconds of several exchanges after a first one.
absl::StatusOr<double> Median(EngineDevice& device, int partner, size_t bytes) {
  ASSIGN_OR_RETURN(std::vector<double> seconds, device.Exchange(partner, bytes, kRepeats + 1));
  seconds.erase(seconds.begin());
  std::nth_element(seconds.begin(), seconds.begin() + kRepeats / 2, seconds.end());
  return seconds[kRepeats / 2];
}

}  // namespace

absl::StatusOr<std::vector<balance::LinkSpeed>> MeasureLinks(const TrainingJob& job,
                                                             const balance::MeasureRequest& request,
                                                             EngineDevice& device,
                                                             comm::Communicator& world) {
  const auto is_known = [machine = device.Machine()](const auto& known) -> uint8_t {
    return std::find(known.begin(), known.end(), machine) != known.end() ? 1 : 0;
  };
  // Rank 0 says for all which links are known: inside nodes, between nodes.
  uint8_t known[] = {is_known(request.known_links_inside), is_known(request.known_links_between)};
  RETURN_IF_ERROR(world.Broadcast(comm::Channel::kControl, known, sizeof(known), 0));
  const int partners[] = {job.ranks_per_node > 1 ? 1 : job.world_size, job.ranks_per_node};
  const size_t large = device.is_host() ? kLargeBytesOnHost : kLargeBytesOnDevice;
  std::vector<balance::LinkSpeed> links;
  for (const bool between_nodes : {false, true}) {
    const int partner = partners[between_nodes ? 1 : 0];
    if (partner >= job.world_size || known[between_nodes ? 1 : 0] != 0) continue;
    if (job.rank != 0 && job.rank != partner) continue;
    const int other = job.rank == 0 ? partner : 0;
    ASSIGN_OR_RETURN(const double small_seconds, Median(device, other, kSmallBytes));
    ASSIGN_OR_RETURN(const double large_seconds, Median(device, other, large));
    // Noise may make the small message the slower one.
    const double difference = std::max(large_seconds - small_seconds, 0.1 * large_seconds);
    const double bytes_per_second = static_cast<double>(large - kSmallBytes) / difference;
    links.push_back(
        {.between_nodes = between_nodes,
         .bytes_per_second = bytes_per_second,
         .latency_seconds =
             std::max(0.0, small_seconds - static_cast<double>(kSmallBytes) / bytes_per_second)});
  }
  return links;
}

}  // namespace ringleader::trainer
