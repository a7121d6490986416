#include "worker/model/memory/autograd_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model_shape/parameter_layout.h"

namespace ringleader::model {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class MemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    auto config = LoadModelConfig("tests/golden/qwen2/config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *std::move(config);
  }
  ModelConfig config_;
};

TEST_F(MemoryTest, OptimizerIsSharedAndActivationsFollowTheTokens) {
  const MemoryEstimate one = EstimateMemory(config_, 1, 1 << 20, Recompute::kNone);
  const MemoryEstimate four = EstimateMemory(config_, 4, 1 << 18, Recompute::kNone);
  EXPECT_EQ(one.weights, int64_t{2} * 4 * MakeParameterLayout(config_).elements);
  EXPECT_NEAR(static_cast<double>(one.optimizer) / four.optimizer, 4.0, 0.1);
  EXPECT_NEAR(static_cast<double>(one.activations) / four.activations, 4.0, 0.1);
  EXPECT_GE(four.weights, one.weights);
}

TEST_F(MemoryTest, RecomputingTakesLess) {
  EXPECT_LT(EstimateMemory(config_, 1, 1 << 20, Recompute::kFull).activations,
            EstimateMemory(config_, 1, 1 << 20, Recompute::kNone).activations);
}

TEST_F(MemoryTest, TooLargeAModelIsAnErrorWithNumbers) {
  const MemoryEstimate estimate = EstimateMemory(config_, 4, 1 << 22, Recompute::kNone);
  EXPECT_TRUE(CheckMemory(estimate, estimate.total()).ok());
  const absl::Status status = CheckMemory(estimate, int64_t{1} << 30);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("does not fit"), HasSubstr("has 1.00"), HasSubstr("trainers")));
}

}  // namespace
}  // namespace ringleader::model
