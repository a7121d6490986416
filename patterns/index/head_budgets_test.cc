#include "patterns/index/head_budgets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "ringleader/kernels/index.h"

namespace ringleader::patterns {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr int64_t kOne = int64_t{1} << kernels::kMassBits;
constexpr int64_t kQueries = 64;

// A probe that found these percentages.
void Probe(int layer, const std::vector<int>& percent, LayerBudgets* budgets,
           int heads_together = 1) {
  std::vector<int64_t> visited;
  for (const int of_head : percent) visited.push_back(kQueries * (kOne * of_head / 100));
  FollowProbe(layer, visited, kQueries, heads_together, budgets);
  EXPECT_TRUE(IsSound(*budgets));
}

std::vector<int32_t> FirstHalves(int layer, const std::vector<int>& percent) {
  LayerBudgets budgets;
  Probe(layer, percent, &budgets);
  return budgets.halves;
}

TEST(HeadBudgetsTest, AreOfAModelOfTheirLayersAndHeads) {
  const LayerBudgets of_two = {.recall = {5, 6}, .halves = {1, 3}};
  const std::vector<LayerBudgets> layers = {of_two, {}, of_two};
  EXPECT_TRUE(AreOfModel(layers, 3, 2));
  EXPECT_TRUE(AreOfModel({}, 3, 2));
  EXPECT_FALSE(AreOfModel(layers, 4, 2));
  EXPECT_FALSE(AreOfModel(layers, 3, 1));
  EXPECT_FALSE(AreOfModel(layers, 3, 4));
}

TEST(HeadBudgetsTest, HeadsThatCameToShareABudgetHaveTheSameOnes) {
  std::vector<LayerBudgets> layers = {{.recall = {5, 6, 7, 8}, .halves = {1, 3, 1, 3}},
                                      {},
                                      {.recall = {5, 6, 7, 8}, .halves = {3, 3, 1, 1}},
                                      {.recall = {5, 6, 7, 8}, .halves = {2, 2, 3, 1}}};
  const std::vector<LayerBudgets> before = layers;
  ShareBudgets(1, layers);
  EXPECT_EQ(layers, before);
  ShareBudgets(2, layers);
  EXPECT_THAT(layers[0].halves, Each(2));
  EXPECT_EQ(layers[0].recall, before[0].recall);
  EXPECT_EQ(layers[1], before[1]);
  EXPECT_EQ(layers[2], before[2]);
  EXPECT_THAT(layers[3].halves, Each(2));
}

TEST(HeadBudgetsTest, HeadsThatRecallMuchGiveToThoseThatRecallLittle) {
  EXPECT_THAT(FirstHalves(0, {95, 30, 85, 70}), ElementsAre(1, 3, 1, 3));
  EXPECT_THAT(FirstHalves(0, {95, 30, 75, 70}), ElementsAre(1, 3, 2, 2)) << "one recalls much";
  EXPECT_THAT(FirstHalves(0, {79, 30, 75, 70}), Each(2)) << "none does";
  EXPECT_THAT(FirstHalves(0, {95, 81, 85}), ElementsAre(1, 3, 2)) << "the middle one has nobody";
  EXPECT_THAT(FirstHalves(0, {95}), ElementsAre(2));
}

TEST(HeadBudgetsTest, HeadsThatRecallAlikeAreNotFavoured) {
  EXPECT_THAT(FirstHalves(0, {90, 90, 90, 90}), Each(2));
  EXPECT_THAT(FirstHalves(0, {90, 90, 40}), ElementsAre(1, 2, 3));
  EXPECT_THAT(FirstHalves(1, {90, 90, 40}), ElementsAre(2, 1, 3));
}

TEST(HeadBudgetsTest, AHeadThatGaveRecallsLessAndDoesNotTakeItBack) {
  LayerBudgets budgets;
  Probe(0, {90, 50}, &budgets);
  for (int probe = 0; probe < 20; ++probe) {
    Probe(0, {70, 60}, &budgets);
    EXPECT_THAT(budgets.halves, ElementsAre(1, 3));
  }
  // It does where the other one has come to recall more.
  for (int probe = 0; probe < 20; ++probe) Probe(0, {55, 75}, &budgets);
  EXPECT_THAT(budgets.halves, ElementsAre(2, 2));
}

TEST(HeadBudgetsTest, OneProbeIsAQuarterOfTheMean) {
  LayerBudgets budgets;
  Probe(0, {100, 0}, &budgets);
  EXPECT_THAT(budgets.recall, ElementsAre(kOne, 0));
  Probe(0, {0, 100}, &budgets);
  EXPECT_THAT(budgets.recall, ElementsAre(kOne * 3 / 4, kOne / 4));
  EXPECT_THAT(budgets.halves, ElementsAre(1, 3));
}

TEST(HeadBudgetsTest, HeadsThatChooseTogetherHaveOneBudget) {
  LayerBudgets budgets;
  Probe(0, {99, 93, 20, 40, 85, 87, 80, 50}, &budgets, /*heads_together=*/2);
  EXPECT_THAT(budgets.halves, ElementsAre(1, 1, 3, 3, 1, 1, 3, 3));
  Probe(0, {60, 60, 70, 70, 90, 80, 90, 80}, &budgets, /*heads_together=*/2);
  EXPECT_THAT(budgets.halves, ElementsAre(1, 1, 3, 3, 1, 1, 3, 3)) << "by the means";
}

TEST(HeadBudgetsTest, APairKeepsItsSum) {
  for (const int32_t count : {1, 2, 7, 40}) {
    EXPECT_EQ(kernels::OfHalves(count, 1) + kernels::OfHalves(count, 3), 2 * count);
    EXPECT_EQ(kernels::OfHalves(count, 2), count);
    EXPECT_GE(kernels::OfHalves(count, 1), 1);
  }
}

TEST(HeadBudgetsTest, WhatNoProbeLeavesIsNotSound) {
  EXPECT_TRUE(IsSound({}));
  EXPECT_FALSE(IsSound({.recall = {1, 2}, .halves = {2}}));
  EXPECT_FALSE(IsSound({.recall = {1, 2}, .halves = {2, 3}}));
  EXPECT_FALSE(IsSound({.recall = {1, 2}, .halves = {0, 4}}));
}

}  // namespace
}  // namespace ringleader::patterns
