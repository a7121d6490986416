#include "balance/sample_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "balance/length_densities.h"

namespace ringleader::balance {
namespace {

using ::testing::HasSubstr;

TEST(SampleWeightsTest, LinesRunBetweenRowsAndFromTheOriginBeyond) {
  const auto weights = SampleWeights::Create({{100, 2.0}, {200, 6.0}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->Microseconds(100), 2000);
  EXPECT_EQ(weights->Microseconds(150), 3750) << "25 microseconds a token, between 20 and 30";
  EXPECT_EQ(weights->Microseconds(200), 6000);
  EXPECT_EQ(weights->Microseconds(50), 1000);
  EXPECT_EQ(weights->Microseconds(400), 12000);
}

// A line between rows an octave apart would say an eighth more of the square.
TEST(SampleWeightsTest, WhatGrowsWithTheSquareIsMetBetweenRows) {
  const auto milliseconds = [](double tokens) { return 1e-3 * tokens + 1e-6 * tokens * tokens; };
  std::vector<SampleWeight> rows;
  for (uint64_t tokens = 1024; tokens <= 65536; tokens *= 2) {
    rows.push_back({tokens, milliseconds(static_cast<double>(tokens))});
  }
  const auto weights = SampleWeights::Create(rows);
  ASSERT_TRUE(weights.ok()) << weights.status();
  for (const uint64_t tokens : {1025, 1500, 3000, 24576, 48000, 65535}) {
    EXPECT_NEAR(static_cast<double>(weights->Microseconds(tokens)),
                1e3 * milliseconds(static_cast<double>(tokens)), 1);
  }
}

// A sample that costs as much at both lengths costs no more between them.
TEST(SampleWeightsTest, WhatDoesNotGrowDoesNotBulgeBetweenRows) {
  const auto weights = SampleWeights::Create({{100, 2.0, 1.9}, {200, 2.0, 2.0}, {400, 8.0, 2.0}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  for (uint64_t tokens = 100; tokens < 200; ++tokens) {
    EXPECT_EQ(weights->Microseconds(tokens), 2000);
  }
  for (uint64_t tokens = 100; tokens < 400; ++tokens) {
    EXPECT_LE(weights->Microseconds(tokens), weights->Microseconds(tokens + 1));
    EXPECT_LE(weights->AttentionMicroseconds(tokens), weights->Microseconds(tokens));
  }
}

TEST(SampleWeightsTest, TravelIsNoPartOfThem) {
  const auto weights =
      SampleWeights::Create({{.tokens = 100, .milliseconds = 2.0, .travel_milliseconds = 3.0},
                             {.tokens = 200, .milliseconds = 6.0, .travel_milliseconds = 6.0}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->Microseconds(100), 2000);
  EXPECT_DOUBLE_EQ(weights->TravelMicroseconds(150), 4500);
  EXPECT_DOUBLE_EQ(weights->TravelMicroseconds(400), 12000);
  EXPECT_EQ(SampleWeights::Create({{100, 2.0}})->TravelMicroseconds(100), 0);
  EXPECT_EQ(SampleWeights().TravelMicroseconds(100), 0);
  for (const double travel : {-1.0, 1e30, std::numeric_limits<double>::quiet_NaN()}) {
    const auto refused = SampleWeights::Create({{.tokens = 100, .travel_milliseconds = travel}});
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("travel")) << travel;
  }
}

TEST(SampleWeightsTest, AttentionIsAPartOfThem) {
  const auto weights = SampleWeights::Create({{100, 2.0, 1.0}, {200, 6.0, 4.0}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->AttentionMicroseconds(150), 2250);
  EXPECT_EQ(weights->AttentionMicroseconds(400), 8000);
  EXPECT_EQ(SampleWeights::Create({{100, 2.0}})->AttentionMicroseconds(100), 0);
  EXPECT_EQ(SampleWeights().AttentionMicroseconds(100), 0);
  EXPECT_FALSE(SampleWeights::Create({{100, 2.0, 2.5}}).ok());
  EXPECT_FALSE(SampleWeights::Create({{100, 2.0, -1}}).ok());
}

TEST(SampleWeightsTest, LengthsAreBinnedByTheRows) {
  const auto weights = SampleWeights::Create({{100, 2.0}, {200, 6.0}});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->BinOf(1), 100u);
  EXPECT_EQ(weights->BinOf(100), 100u);
  EXPECT_EQ(weights->BinOf(101), 200u);
  EXPECT_EQ(weights->BinOf(500), 200u);
  EXPECT_EQ(SampleWeights().BinOf(100), 128u);
}

TEST(LengthDensitiesTest, AFewStepsSayWhatALengthVisits) {
  LengthDensities densities;
  for (int i = 0; i < 3; ++i) densities.Observe(100, 0.4);
  EXPECT_FALSE(densities.Of(100).has_value());
  densities.Observe(100, 0.2);
  EXPECT_NEAR(densities.Of(100).value(), 0.35, 1e-12) << "the mean of the first";
  for (const double nonsense : {0.0, -1.0, 2.0, std::numeric_limits<double>::quiet_NaN()}) {
    densities.Observe(100, nonsense);
  }
  EXPECT_NEAR(densities.Of(100).value(), 0.35, 1e-12);
  EXPECT_FALSE(densities.Of(200).has_value());
  for (int i = 0; i < 300; ++i) densities.Observe(100, 0.1);
  EXPECT_NEAR(densities.Of(100).value(), 0.1, 1e-3) << "what is long ago hardly counts";
}

// Reports come from nodes, which may send what they like.
TEST(LengthDensitiesTest, MoreLengthsThanReportsHaveAreNotKept) {
  LengthDensities densities;
  for (int repeat = 0; repeat < 4; ++repeat) {
    for (uint64_t tokens = 1; tokens <= 1000; ++tokens) densities.Observe(tokens, 0.5);
  }
  int kept = 0;
  for (uint64_t tokens = 1; tokens <= 1000; ++tokens) kept += densities.Of(tokens).has_value();
  EXPECT_EQ(kept, 64);
  EXPECT_TRUE(densities.Of(1).has_value());
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
