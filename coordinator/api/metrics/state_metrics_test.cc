// What /metrics says of nodes.
#include "coordinator/api/metrics/state_metrics.h"

#include <map>
#include <string>

#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::api {
namespace {

using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class StateMetricsTest : public lifecycle::testing::ControllerTest {
 protected:
  // [value of the only label] → the gauge.
  std::map<std::string, double> Series(const std::string& name) {
    std::map<std::string, double> series;
    const StateCollector collector(sqlite_.get(), controller_.get(), dir_.File("db"));
    for (const prometheus::MetricFamily& family : collector.Collect()) {
      if (family.name != name) continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        EXPECT_EQ(metric.label.size(), 1u);
        series[metric.label.at(0).value] = metric.gauge.value;
      }
    }
    return series;
  }
};

// Those of nodes that take no trainers are no room, and trainers are counted where they run.
TEST_F(StateMetricsTest, SlotsAreThoseOfReadyNodesAndThoseInUse) {
  constexpr char kSlots[] = "ringleader_coordinator_trainer_slots";
  EXPECT_THAT(Series(kSlots), UnorderedElementsAre(Pair("ready", 0), Pair("in_use", 0)));
  const auto a = RunJob();  // with both trainers of its node
  EXPECT_THAT(Series(kSlots), UnorderedElementsAre(Pair("ready", 2), Pair("in_use", 2)));
  const auto b = Connect("b", "b.1"), c = Connect("c", "c.1");
  EXPECT_THAT(Series(kSlots), UnorderedElementsAre(Pair("ready", 6), Pair("in_use", 2)));
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("c", {}); }).ok());
  EXPECT_THAT(Series(kSlots), UnorderedElementsAre(Pair("ready", 4), Pair("in_use", 2)));
  std::map<std::string, double> nodes = Series("ringleader_coordinator_nodes");
  EXPECT_EQ(nodes["READY"], 2);
  EXPECT_EQ(nodes["DRAINED"], 1);
}

}  // namespace
}  // namespace ringleader::api
