#include "coordinator/scheduler/placement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "coordinator/planner/cost/shapes.h"

namespace ringleader::scheduler {
namespace {

using Indices = std::vector<size_t>;

uint32_t NodeLimit(const Request& request, size_t candidates) {
  const auto count = static_cast<uint32_t>(candidates);
  return request.max_nodes == 0 ? count : std::min(request.max_nodes, count);
}

bool RingFits(const Request& request, uint32_t nodes, uint32_t each) {
  if (request.context == 0) return true;
  planner::ClusterShape cluster;
  cluster.nodes = static_cast<int>(nodes);
  cluster.trainers_per_node = static_cast<int>(each);
  return planner::GroupOf(cluster, static_cast<int>(request.context),
                          static_cast<int>(request.heads))
      .regular;
}

// The same number of trainers on each of as few nodes as possible.
std::optional<std::vector<Share>> PlaceEvenly(const Request& request,
                                              const std::vector<Room>& rooms,
                                              const Indices& candidates) {
  for (uint32_t count = 1; count <= NodeLimit(request, candidates.size()); ++count) {
    if (request.trainers % count != 0) continue;
    const uint32_t each = request.trainers / count;
    if (!RingFits(request, count, each)) continue;
    Indices fitting;
    for (const size_t index : candidates) {
      if (rooms[index].available >= each) fitting.push_back(index);
    }
    if (fitting.size() < count) continue;
    std::stable_sort(fitting.begin(), fitting.end(),
                     [&](size_t a, size_t b) { return rooms[a].preference < rooms[b].preference; });
    fitting.resize(count);
    std::vector<Share> shares;
    for (const size_t index : fitting) shares.push_back({.node = index, .trainers = each});
    return shares;
  }
  return std::nullopt;
}

// The fullest use of the roomiest nodes.
std::optional<std::vector<Share>> PlaceUnevenly(const Request& request,
                                                const std::vector<Room>& rooms,
                                                Indices candidates) {
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](size_t a, size_t b) { return rooms[a].available > rooms[b].available; });
  candidates.resize(NodeLimit(request, candidates.size()));
  std::vector<Share> shares;
  uint32_t missing = request.trainers;
  for (const size_t index : candidates) {
    const uint32_t taken = std::min(missing, rooms[index].available);
    if (taken == 0) break;
    shares.push_back({.node = index, .trainers = taken});
    missing -= taken;
  }
  if (missing != 0) return std::nullopt;
  return shares;
}

}  // namespace

bool Eligible(const Request& request, const NodeSlots& node) {
  return node.ready && (node.has_gpus || !request.needs_gpus) && !request.avoid.contains(node.id);
}

std::optional<std::vector<Share>> Place(const Request& request, const std::vector<Room>& rooms) {
  if (!request.shun.empty()) {
    Request elsewhere = request;
    elsewhere.avoid.merge(std::exchange(elsewhere.shun, {}));
    if (auto found = Place(elsewhere, rooms)) return found;
  }
  Indices all;
  std::map<std::string, Indices> domains;
  for (size_t index = 0; index < rooms.size(); ++index) {
    if (rooms[index].available == 0 || !Eligible(request, *rooms[index].node)) continue;
    all.push_back(index);
    domains[rooms[index].node->domain].push_back(index);
  }
  std::optional<std::vector<Share>> best;
  const auto keep_smaller = [&](std::optional<std::vector<Share>> found) {
    if (found && (!best || found->size() < best->size())) best = std::move(found);
  };
  for (const auto& [domain, indices] : domains) keep_smaller(PlaceEvenly(request, rooms, indices));
  if (!best) best = PlaceEvenly(request, rooms, all);
  const bool may_be_uneven = request.context == 0;
  if (!best && may_be_uneven) {
    for (const auto& [domain, indices] : domains) {
      keep_smaller(PlaceUnevenly(request, rooms, indices));
    }
  }
  if (!best && may_be_uneven) best = PlaceUnevenly(request, rooms, all);
  // Neighbours in rank should be neighbours in the network.
  if (best) {
    std::sort(best->begin(), best->end(), [&](const Share& a, const Share& b) {
      const NodeSlots& left = *rooms[a.node].node;
      const NodeSlots& right = *rooms[b.node].node;
      return std::tie(left.domain, left.id) < std::tie(right.domain, right.id);
    });
  }
  return best;
}

}  // namespace ringleader::scheduler
