#include "worker/trainer/steps/eval_sums.h"

#include <gtest/gtest.h>

#include <cmath>

namespace ringleader::trainer {
namespace {

TEST(EvalSumsTest, AnswersCountForTheirTaskAndForAll) {
  const std::vector<std::string> tasks = {"lookup", "copy"};
  EvalSums sums(tasks);
  data::LocalSequence sequence;
  sequence.labels = {data::kIgnoreLabel, 7, 8, 9, 10};
  sequence.answers = {data::kPlainMark, data::kPlainMark, 1, 1, 2};
  RankScores scores;
  scores.losses = {100, 1, 2, 4, 8};
  scores.right = {1, 1, 0, 1, 1};
  sums.Add(sequence, scores);
  for (double& sum : sums.sums()) sum *= 2;  // another rank's are alike
  const EvalOutcome outcome = sums.Outcome();
  EXPECT_EQ(outcome.tokens, 8u);
  EXPECT_EQ(outcome.loss, 30.0 / 8);
  ASSERT_EQ(outcome.answers.size(), 2u);
  EXPECT_EQ(outcome.answers[0].task, "lookup");
  EXPECT_EQ(outcome.answers[0].asked, 4u);
  EXPECT_EQ(outcome.answers[0].right, 2u);
  EXPECT_EQ(outcome.answers[0].loss, 3.0);
  EXPECT_EQ(outcome.answers[1].asked, 2u);
  EXPECT_EQ(outcome.answers[1].right, 2u);
  EXPECT_EQ(outcome.answers[1].loss, 8.0);
}

TEST(EvalSumsTest, WhereNothingHasALabelThereIsNoLoss) {
  const std::vector<std::string> tasks = {"lookup"};
  const EvalOutcome outcome = EvalSums(tasks).Outcome();
  EXPECT_TRUE(std::isnan(outcome.loss));
  EXPECT_EQ(outcome.tokens, 0u);
  EXPECT_EQ(outcome.answers[0].loss, 0.0);
}

}  // namespace
}  // namespace ringleader::trainer
