// What ranks agree on at a step boundary, whatever each of them was told.
#include "worker/trainer/steps/step_agreement.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/trainer/testing/attempt_in_process.h"

namespace ringleader::trainer {
namespace {

using testing::RecordingHost;

constexpr int kRanks = 3;

Plan PlanOf(uint64_t version) {
  Plan plan;
  plan.version = version;
  return plan;
}

class StepAgreementTest : public ::testing::Test {
 protected:
  std::vector<RecordingHost> hosts_ = std::vector<RecordingHost>(kRanks);

  std::vector<Agreement> AgreeAll() {
    std::vector<Agreement> agreements(kRanks);
    comm::testing::RunRanks(kRanks, [&](comm::Communicator& world) {
      auto agreement = Agree(world, hosts_[world.rank()]);
      ASSERT_TRUE(agreement.ok()) << agreement.status();
      agreements[world.rank()] = *std::move(agreement);
    });
    return agreements;
  }
};

TEST_F(StepAgreementTest, NothingNewIsNothingToDo) {
  for (const Agreement& agreement : AgreeAll()) {
    EXPECT_FALSE(agreement.stop);
    EXPECT_FALSE(agreement.plan.has_value());
    EXPECT_EQ(agreement.refused_plan, "");
    EXPECT_EQ(agreement.profile_steps, 0u);
  }
}

TEST_F(StepAgreementTest, AnyRankStopsAll) {
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int other = 0; other < kRanks; ++other) hosts_[other].stop = other == rank;
    for (const Agreement& agreement : AgreeAll()) EXPECT_TRUE(agreement.stop) << rank;
  }
}

// Plans of many layers are some kilobytes, and any byte may stand in them.
TEST_F(StepAgreementTest, APlanOfAnySizeReachesEveryRankWhole) {
  for (const size_t bytes : {size_t{1}, size_t{499}, size_t{501}, size_t{70'000}}) {
    std::string plan(bytes, '\0');
    for (size_t i = 0; i < bytes; ++i) plan[i] = static_cast<char>(i * 31);
    hosts_[0].plan_bytes = plan;
    for (RecordingHost& host : hosts_) host.plans = {{plan, PlanOf(bytes)}};
    for (const Agreement& agreement : AgreeAll()) {
      ASSERT_TRUE(agreement.plan.has_value()) << agreement.refused_plan.size();
      EXPECT_EQ(agreement.plan->version, bytes);
      EXPECT_EQ(agreement.refused_plan, "");
    }
    for (const Agreement& agreement : AgreeAll()) EXPECT_FALSE(agreement.plan.has_value());
  }
}

TEST_F(StepAgreementTest, APlanThatMakesNoSenseIsRefusedByAll) {
  hosts_[0].plan_bytes = "nonsense";
  for (const Agreement& agreement : AgreeAll()) {
    EXPECT_FALSE(agreement.plan.has_value());
    EXPECT_EQ(agreement.refused_plan, "no plan: nonsense");
  }
}

TEST_F(StepAgreementTest, PlansAndTracesAreTheFirstRanks) {
  for (RecordingHost& host : hosts_) {
    host.plan_bytes = "other";
    host.profile_steps = 100;
    host.plans = {{"first", PlanOf(1)}, {"other", PlanOf(2)}};
  }
  hosts_[0].plan_bytes = "first";
  hosts_[0].profile_steps = 3;
  for (const Agreement& agreement : AgreeAll()) {
    ASSERT_TRUE(agreement.plan.has_value());
    EXPECT_EQ(agreement.plan->version, 1u);
    EXPECT_EQ(agreement.profile_steps, 3u);
  }
  for (const Agreement& agreement : AgreeAll()) EXPECT_EQ(agreement.profile_steps, 0u);
}

}  // namespace
}  // namespace ringleader::trainer
