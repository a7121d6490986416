#include "balance/sample_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace ringleader::balance {
namespace {

using ::testing::HasSubstr;

TEST(SampleWeightsTest, LinesRunBetweenRowsAndFromTheOriginBeyond) {
  const auto weights = SampleWeights::Create({{100, 2.0}, {200, 6.0}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->Microseconds(100), 2000);
  EXPECT_EQ(weights->Microseconds(150), 4000);
  EXPECT_EQ(weights->Microseconds(200), 6000);
  EXPECT_EQ(weights->Microseconds(50), 1000);
  EXPECT_EQ(weights->Microseconds(400), 12000);
}

TEST(SampleWeightsTest, WithoutRowsTheyAreTokensAndNeverNothing) {
  EXPECT_EQ(SampleWeights().Microseconds(4096), 4096);
  EXPECT_EQ(SampleWeights().Microseconds(0), 1);
  EXPECT_EQ(SampleWeights::Create({{100, 0}})->Microseconds(100), 1);
}

TEST(SampleWeightsTest, WhatDoesNotAscendIsRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& rows : {std::vector<SampleWeight>{{0, 1}},
                           {{100, 1}, {100, 2}},
                           {{100, 2}, {200, 1}},
                           {{100, -1}},
                           {{100, nan}},
                           {{100, 1e30}}}) {
    EXPECT_THAT(std::string(SampleWeights::Create(rows).status().message()), HasSubstr("ascend"));
  }
}

}  // namespace
}  // namespace ringleader::balance
