#include "coordinator/scheduler/scheduler.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "coordinator/scheduler/placement.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::scheduler {
namespace {

uint32_t Free(const NodeSlots& node) {
  return node.total > node.in_use ? node.total - node.in_use : 0;
}

std::string Plural(uint64_t count, const std::string& noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string Need(const Request& request) {
  std::string need = absl::StrCat("needs ", Plural(request.trainers, "trainer"));
  if (request.needs_gpus) absl::StrAppend(&need, " with GPUs");
  if (request.max_nodes != 0) {
    absl::StrAppend(&need, " on at most ", Plural(request.max_nodes, "node"));
  }
  if (request.context != 0) {
    absl::StrAppend(&need, ", on each node equally many: whole rings of ", request.context,
                    ", or an equal part of one");
    if (request.heads > 1) {
      absl::StrAppend(&need, "; the ", request.heads, " ranks that share out heads on one node");
    }
    absl::StrAppend(&need, " (parallelism.ring: hierarchical; flat, or a ring_window, takes any)");
  }
  return need;
}

// Trainers held back on each node for the job at the head of the queue.
struct Reservation {
  std::string job;
  std::vector<uint32_t> held;
};

std::vector<Room> Rooms(const std::vector<NodeSlots>& nodes, const Reservation* reservation) {
  std::vector<Room> rooms;
  for (size_t index = 0; index < nodes.size(); ++index) {
    const uint32_t free = Free(nodes[index]);
    const uint32_t held = reservation ? reservation->held[index] : 0;
    // Best fit: a job goes where it leaves the least behind.
    rooms.push_back(
        {.node = &nodes[index], .available = free > held ? free - held : 0, .preference = free});
  }
  return rooms;
}

// Where the job would start if every running one had ended; nodes that are nearly free first, so
// that it waits for as few jobs as possible. While it waits nothing else is placed there, so the
// free room there only grows.
std::optional<Reservation> Reserve(const Request& request, const std::vector<NodeSlots>& nodes) {
  std::vector<Room> rooms;
  rooms.reserve(nodes.size());
  for (const NodeSlots& node : nodes) {
    rooms.push_back(
        {.node = &node, .available = node.total, .preference = std::min(node.in_use, node.total)});
  }
  const std::optional<std::vector<Share>> shares = Place(request, rooms);
  if (!shares) return std::nullopt;
  Reservation reservation{.job = request.id, .held = std::vector<uint32_t>(nodes.size(), 0)};
  for (const Share& share : *shares) reservation.held[share.node] = share.trainers;
  return reservation;
}

std::string WhyItWaits(const Request& request, const std::vector<NodeSlots>& nodes,
                       const Reservation* reservation) {
  if (nodes.empty()) {
    return absl::StrCat(Need(request), "; no worker has connected yet: start ringleader-worker");
  }
  uint64_t free = 0, free_nodes = 0, total = 0, eligible = 0, not_ready = 0, without_gpus = 0;
  for (const NodeSlots& node : nodes) {
    if (!node.ready) ++not_ready;
    if (node.ready && request.needs_gpus && !node.has_gpus) ++without_gpus;
    if (!Eligible(request, node)) continue;
    ++eligible;
    total += node.total;
    free += Free(node);
    if (Free(node) > 0) ++free_nodes;
  }
  std::string why =
      absl::StrFormat("%s; %d free on %s", Need(request), free, Plural(free_nodes, "node"));
  if (eligible == 0) {
    why = absl::StrCat(Need(request), "; no node may run it");
    if (without_gpus > 0) {
      absl::StrAppend(&why, ": ", Plural(without_gpus, "node"),
                      without_gpus == 1 ? " has" : " have", " no GPUs");
    }
  } else if (!Reserve(request, nodes)) {
    why = absl::StrFormat("%s; the %s that may run it can take %d in all", Need(request),
                          Plural(eligible, "node"), total);
  } else if (reservation != nullptr && Place(request, Rooms(nodes, nullptr))) {
    absl::StrAppend(&why, ", held for jobs/", reservation->job, ", which is ahead in the queue");
  }
  if (not_ready > 0) {
    absl::StrAppend(&why, " (", Plural(not_ready, "node"), " draining or unreachable)");
  }
  if (!request.avoid.empty()) {
    absl::StrAppend(&why, " (avoids nodes that refused it: ", absl::StrJoin(request.avoid, ", "),
                    ")");
  }
  return why;
}

}  // namespace

Request MakeRequest(const v1::Job& job) {
  const v1::JobSpec& spec = job.spec();
  Request request = {.id = spec.name(),
                     .priority = spec.scheduling().priority(),
                     .sequence = job.sequence(),
                     .trainers = spec.resources().trainers(),
                     .max_nodes = spec.resources().max_nodes(),
                     .needs_gpus = spec.resources().engine() == v1::ResourcesSpec::CUDA};
  const v1::ParallelismSpec& parallelism = spec.parallelism();
  if (parallelism.ring() != v1::ParallelismSpec::HIERARCHICAL || parallelism.ring_window() != 0) {
    return request;
  }
  request.context = parallelism.context();
  request.heads = jobspec::HeadRanks(parallelism);
  // Heads that the planner picked are kept once there is a checkpoint.
  if (job.progress().checkpoint_step() > 0 && job.attempts_size() > 0) {
    const v1::StepPlan& last = job.attempts(job.attempts_size() - 1).plan();
    request.heads = jobspec::HeadRanks(jobspec::PlannedJob(spec, last).parallelism());
  }
  return request;
}

std::vector<Decision> Schedule(std::vector<Request> requests, std::vector<NodeSlots> nodes) {
  std::sort(requests.begin(), requests.end(), [](const Request& a, const Request& b) {
    return std::tuple(-int64_t{a.priority}, a.sequence, a.id) <
           std::tuple(-int64_t{b.priority}, b.sequence, b.id);
  });
  std::vector<Decision> decisions;
  std::optional<Reservation> reservation;
  for (const Request& request : requests) {
    const Reservation* held = reservation ? &*reservation : nullptr;
    Decision decision{.id = request.id};
    if (const auto shares = Place(request, Rooms(nodes, held))) {
      uint32_t rank = 0;
      for (const Share& share : *shares) {
        v1::Placement& placement = decision.placements.emplace_back();
        placement.set_node(absl::StrCat("nodes/", nodes[share.node].id));
        placement.set_first_rank(rank);
        placement.set_trainers(share.trainers);
        rank += share.trainers;
        nodes[share.node].in_use += share.trainers;
      }
    } else {
      decision.pending_reason = WhyItWaits(request, nodes, held);
      if (!reservation) reservation = Reserve(request, nodes);
    }
    decisions.push_back(std::move(decision));
  }
  return decisions;
}

}  // namespace ringleader::scheduler
