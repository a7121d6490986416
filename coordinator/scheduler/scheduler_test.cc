#include "coordinator/scheduler/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace ringleader::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

NodeSlots Node(const std::string& id, uint32_t total, uint32_t in_use = 0) {
  return {.id = id, .total = total, .in_use = in_use};
}

// `age`: the greater, the longer it has waited.
Request Job(const std::string& id, uint32_t trainers, int age = 0, int priority = 0) {
  return {.id = id,
          .priority = priority,
          .sequence = 1'000'000 - static_cast<uint64_t>(age),
          .trainers = trainers};
}

// "a:2 b:2" for two trainers on each of nodes a and b; the reason if it waits.
std::string Where(const Decision& decision) {
  if (decision.placements.empty()) return decision.pending_reason;
  std::string text;
  uint32_t next_rank = 0;
  for (const v1::Placement& placement : decision.placements) {
    EXPECT_EQ(placement.first_rank(), next_rank);
    next_rank += placement.trainers();
    if (!text.empty()) text += " ";
    text += placement.node().substr(6) + ":" + std::to_string(placement.trainers());
  }
  return text;
}

std::map<std::string, std::string> Placed(std::vector<Request> jobs, std::vector<NodeSlots> nodes) {
  std::map<std::string, std::string> where;
  for (const Decision& decision : Schedule(std::move(jobs), std::move(nodes))) {
    where[decision.id] = Where(decision);
  }
  return where;
}

TEST(SchedulerTest, OneNodeIfOneSuffices) {
  EXPECT_EQ(Placed({Job("j", 2)}, {Node("a", 2), Node("b", 4)})["j"], "a:2");
}

// Large jobs find whole nodes for longer.
TEST(SchedulerTest, AJobGoesWhereItLeavesTheLeastBehind) {
  EXPECT_EQ(Placed({Job("j", 2)}, {Node("a", 8), Node("b", 8, 6), Node("c", 8, 4)})["j"], "b:2");
}

TEST(SchedulerTest, ANodeThatIsShunnedIsTakenOnlyIfTheOthersDoNotSuffice) {
  Request job = Job("j", 2);
  job.shun = {"a"};
  EXPECT_EQ(Placed({job}, {Node("a", 2), Node("b", 4)})["j"], "b:2");
  EXPECT_EQ(Placed({job}, {Node("a", 2), Node("b", 4, 3)})["j"], "a:2");
  EXPECT_EQ(Placed({job}, {Node("a", 2)})["j"], "a:2");
}

TEST(SchedulerTest, SplitsEvenlyOverNodes) {
  EXPECT_EQ(Placed({Job("j", 4)}, {Node("a", 3), Node("b", 3)})["j"], "a:2 b:2");
}

TEST(SchedulerTest, SplitsUnevenlyWhereItMust) {
  EXPECT_EQ(Placed({Job("j", 5)}, {Node("a", 2), Node("b", 3)})["j"], "a:2 b:3");
}

// Of such a job there is no plan for unequal nodes: it waits for equal ones, and others do not take
// what it waits for.
TEST(SchedulerTest, ARingOfRingsWaitsForEqualShares) {
  Request job = Job("rings", 4, /*age=*/10);
  job.context = 4;
  const std::vector<NodeSlots> uneven = {Node("a", 4, 1), Node("b", 4, 3)};
  EXPECT_EQ(Placed({Job("any", 4)}, uneven)["any"], "a:3 b:1");
  auto placed = Placed({job, Job("other", 3)}, uneven);
  EXPECT_EQ(
      placed["rings"],
      "needs 4 trainers, on each node equally many: whole rings of 4, or an equal part of one "
      "(parallelism.ring: hierarchical; flat, or a ring_window, takes any); 4 free on 2 nodes");
  EXPECT_THAT(placed["other"], HasSubstr("held for jobs/rings"));
  EXPECT_EQ(Placed({job}, {Node("a", 4, 1), Node("b", 4, 2)})["rings"], "a:2 b:2");
  EXPECT_EQ(Placed({job}, {Node("a", 4), Node("b", 4, 2)})["rings"], "a:4");
  EXPECT_THAT(Placed({job}, {Node("a", 3), Node("b", 1)})["rings"],
              HasSubstr("the 2 nodes that may run it can take 4 in all"));
}

// Equal shares that do not divide the ring, or that ranks sharing heads would lie across, are none.
TEST(SchedulerTest, ARingOfRingsWaitsForSharesThatDivideIt) {
  Request job = Job("rings", 12);
  job.context = 4;
  const auto on = [&](int nodes, uint32_t each) {
    std::vector<NodeSlots> all;
    for (int i = 0; i < nodes; ++i)
      all.push_back(Node(std::string(1, static_cast<char>('a' + i)), each));
    return Placed({job}, all)["rings"];
  };
  EXPECT_THAT(on(2, 6), HasSubstr("whole rings of 4, or an equal part of one ("))
      << "six hold one and a half";
  EXPECT_EQ(on(3, 4), "a:4 b:4 c:4");
  EXPECT_EQ(on(6, 2), "a:2 b:2 c:2 d:2 e:2 f:2");
  job.heads = 2;
  EXPECT_EQ(on(6, 2), "a:2 b:2 c:2 d:2 e:2 f:2");
  EXPECT_THAT(on(12, 1), HasSubstr("; the 2 ranks that share out heads on one node ("));
}

TEST(SchedulerTest, JobsSayWhetherTheirRingTakesEqualShares) {
  v1::Job job;
  v1::ParallelismSpec& parallelism = *job.mutable_spec()->mutable_parallelism();
  parallelism.set_context(8);
  parallelism.set_heads(2);
  EXPECT_EQ(MakeRequest(job).context, 0U) << "auto";
  parallelism.set_ring(v1::ParallelismSpec::HIERARCHICAL);
  EXPECT_EQ(MakeRequest(job).context, 8U);
  EXPECT_EQ(MakeRequest(job).heads, 2U);
  // Where the planner picks heads, those of the last plan count once there is a checkpoint.
  parallelism.set_heads(0);
  job.add_attempts()->mutable_plan()->set_heads(4);
  EXPECT_EQ(MakeRequest(job).heads, 1U);
  job.mutable_progress()->set_checkpoint_step(3);
  EXPECT_EQ(MakeRequest(job).heads, 4U);
  parallelism.set_ring_window(2);
  EXPECT_EQ(MakeRequest(job).context, 0U) << "its inner rings lie anywhere";
}

TEST(SchedulerTest, PrefersOneDomain) {
  std::vector<NodeSlots> nodes = {Node("a", 2), Node("b", 2), Node("c", 2)};
  nodes[0].domain = "east";
  nodes[1].domain = "west";
  nodes[2].domain = "west";
  EXPECT_EQ(Placed({Job("j", 4)}, nodes)["j"], "b:2 c:2");
}

TEST(SchedulerTest, PrefersOneDomainWhereItMustSplitUnevenly) {
  std::vector<NodeSlots> nodes = {Node("a", 4), Node("b", 3), Node("c", 2)};
  nodes[0].domain = "east";
  nodes[1].domain = nodes[2].domain = "west";
  EXPECT_EQ(Placed({Job("j", 5)}, nodes)["j"], "b:3 c:2");
  EXPECT_EQ(Placed({Job("j", 9)}, nodes)["j"], "a:4 b:3 c:2");
}

// Ranks wait for each other, and those of a crowded node longer.
TEST(SchedulerTest, PrefersEvenSharesToFewerNodes) {
  EXPECT_EQ(Placed({Job("j", 4)}, {Node("a", 3), Node("b", 1), Node("c", 1), Node("d", 1)})["j"],
            "a:1 b:1 c:1 d:1");
}

TEST(SchedulerTest, AllOrNothingWithNumbers) {
  Request job = Job("j", 16);
  job.max_nodes = 2;
  EXPECT_EQ(Placed({job}, {Node("a", 8, 5), Node("b", 8, 5), Node("c", 8, 5)})["j"],
            "needs 16 trainers on at most 2 nodes; 9 free on 3 nodes");
}

TEST(SchedulerTest, SaysWhatCanNeverFit) {
  EXPECT_EQ(Placed({Job("j", 16)}, {Node("a", 8)})["j"],
            "needs 16 trainers; the 1 node that may run it can take 8 in all");
  EXPECT_THAT(Placed({Job("j", 1)}, {})["j"], HasSubstr("no worker has connected yet"));
}

TEST(SchedulerTest, GpuJobsGoToGpuNodes) {
  Request job = Job("j", 2);
  job.needs_gpus = true;
  NodeSlots gpu = Node("b", 2);
  gpu.has_gpus = true;
  EXPECT_EQ(Placed({job}, {Node("a", 2), gpu})["j"], "b:2");
  EXPECT_EQ(Placed({job}, {Node("a", 2)})["j"],
            "needs 2 trainers with GPUs; no node may run it: 1 node has no GPUs");
  gpu.ready = false;
  EXPECT_EQ(Placed({job}, {Node("a", 2), Node("c", 2), gpu})["j"],
            "needs 2 trainers with GPUs; no node may run it: 2 nodes have no GPUs (1 node draining "
            "or unreachable)");
}

TEST(SchedulerTest, PriorityThenAge) {
  const std::vector<Decision> decisions =
      Schedule({Job("young", 1, 1), Job("old", 1, 2), Job("urgent", 1, 0, 5)}, {Node("a", 1)});
  std::vector<std::string> order;
  order.reserve(decisions.size());
  for (const Decision& decision : decisions) order.push_back(decision.id);
  EXPECT_THAT(order, ElementsAre("urgent", "old", "young"));
  EXPECT_EQ(Where(decisions[0]), "a:1");
}

TEST(SchedulerTest, BackfillsAroundTheHeadWithoutStarvingIt) {
  // The head needs all of a (2 in use); b stays free for others.
  Request head = Job("head", 8, 9);
  head.max_nodes = 1;
  auto where = Placed({head, Job("small", 2, 1)}, {Node("a", 8, 2), Node("b", 4)});
  EXPECT_THAT(where["head"], HasSubstr("needs 8 trainers"));
  EXPECT_EQ(where["small"], "b:2");
  // It may not start on the held node, although there is room.
  where = Placed({head, Job("small", 2, 1)}, {Node("a", 8, 2)});
  EXPECT_EQ(where["small"],
            "needs 2 trainers; 6 free on 1 node, held for jobs/head, which is ahead in the queue");
}

TEST(SchedulerTest, AnImpossibleHeadHoldsNothing) {
  auto where = Placed({Job("impossible", 100, 9), Job("small", 2, 1)}, {Node("a", 2)});
  EXPECT_EQ(where["small"], "a:2");
}

TEST(SchedulerTest, DrainingNodesTakeNothing) {
  std::vector<NodeSlots> nodes = {Node("a", 4), Node("b", 4)};
  nodes[0].ready = false;
  EXPECT_EQ(Placed({Job("j", 4)}, nodes)["j"], "b:4");
  nodes[1].ready = false;
  EXPECT_EQ(Placed({Job("j", 4)}, nodes)["j"],
            "needs 4 trainers; no node may run it (2 nodes draining or unreachable)");
}

// Small jobs keep coming and each runs for a while; the large one must start all the same.
TEST(SchedulerTest, TheHeadStartsUnderAStreamOfSmallJobs) {
  std::mt19937 random(1);
  std::vector<NodeSlots> nodes = {Node("a", 4), Node("b", 4), Node("c", 4)};
  struct Running {
    std::vector<v1::Placement> placements;
    int ends;
  };
  std::vector<Running> running;
  std::vector<Request> queue;
  bool started = false;
  for (int now = 0; now < 300 && !started; ++now) {
    queue.push_back(Job("small" + std::to_string(now), 1 + random() % 3, -now));
    if (now == 20) queue.push_back(Job("large", 12, -now));
    std::erase_if(running, [&](const Running& job) {
      if (job.ends > now) return false;
      for (const v1::Placement& placement : job.placements) {
        for (NodeSlots& node : nodes) {
          if ("nodes/" + node.id == placement.node()) node.in_use -= placement.trainers();
        }
      }
      return true;
    });
    for (const Decision& decision : Schedule(queue, nodes)) {
      if (decision.placements.empty()) continue;
      for (const v1::Placement& placement : decision.placements) {
        for (NodeSlots& node : nodes) {
          if ("nodes/" + node.id == placement.node()) node.in_use += placement.trainers();
        }
      }
      for (const NodeSlots& node : nodes) ASSERT_LE(node.in_use, node.total);
      started = started || decision.id == "large";
      running.push_back({decision.placements, now + 1 + static_cast<int>(random() % 20)});
      std::erase_if(queue, [&](const Request& job) { return job.id == decision.id; });
    }
  }
  EXPECT_TRUE(started);
}

}  // namespace
}  // namespace ringleader::scheduler
