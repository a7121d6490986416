#include "worker/model/memory/offload_schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace ringleader::model {
namespace {

// A pass through a model, as SavedLayers makes it.
struct Walk {
  std::set<int> on_device;
  std::map<int, int> left, came;  // how often, by layer
  size_t most = 0;                // on the device at a time
  int least_ahead = 1 << 20;      // backward passes between a layer's return and its own

  Walk(int layers, int slots) {
    const OffloadSchedule schedule(layers, slots);
    for (int layer = 0; layer < layers; ++layer) {
      if (const auto gone = schedule.LeftBeforeForward(layer)) {
        EXPECT_TRUE(schedule.Leaves(*gone)) << *gone;
        EXPECT_EQ(on_device.erase(*gone), 1u) << *gone;
        ++left[*gone];
      }
      on_device.insert(layer);
      most = std::max(most, on_device.size());
    }
    for (int layer = layers - 1; layer >= 0; --layer) {
      EXPECT_EQ(on_device.erase(layer), 1u) << "backward of " << layer << " finds nothing";
      if (const auto back = schedule.ReturnsAfterBackward(layer)) {
        EXPECT_TRUE(on_device.insert(*back).second);
        ++came[*back];
        least_ahead = std::min(least_ahead, layer - *back - 1);
      }
      most = std::max(most, on_device.size());
    }
    EXPECT_TRUE(on_device.empty());
    EXPECT_EQ(static_cast<int>(left.size()), schedule.on_host());
  }
};

TEST(OffloadScheduleTest, EveryLayerIsThereForItsBackwardAndTravelsOnce) {
  for (int layers = 1; layers <= 12; ++layers) {
    for (int slots = 1; slots <= layers + 2; ++slots) {
      SCOPED_TRACE(testing::Message() << layers << " layers, " << slots << " slots");
      const Walk walk(layers, slots);
      EXPECT_EQ(walk.most, static_cast<size_t>(std::min(layers, slots)));
      EXPECT_EQ(walk.left, walk.came);
      for (const auto& [layer, times] : walk.left) {
        EXPECT_LT(layer, layers - slots);
        EXPECT_EQ(times, 1);
      }
    }
  }
}

TEST(OffloadScheduleTest, LayersComeBackWellAhead) {
  EXPECT_EQ(Walk(36, 3).least_ahead, 2);
  EXPECT_EQ(Walk(36, 10).least_ahead, 9);
  EXPECT_EQ(Walk(36, 1).least_ahead, 0);
}

TEST(OffloadScheduleTest, NothingLeavesWhereAllFit) {
  const Walk walk(4, 4);
  EXPECT_TRUE(walk.left.empty());
  EXPECT_FALSE(OffloadSchedule(4, 4).Leaves(0));
}

}  // namespace
}  // namespace ringleader::model
