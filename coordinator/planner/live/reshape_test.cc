#include "coordinator/planner/live/reshape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/planner/candidates.h"
#include "coordinator/planner/testing/planner_problems.h"

namespace ringleader::planner {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::StepReport OfDocuments(const std::map<uint64_t, uint64_t>& counts) {
  v1::StepReport report;
  for (const auto& [tokens, count] : counts) {
    v1::DocumentReport* const bin = report.add_documents();
    bin->set_tokens(tokens);
    bin->set_count(count);
  }
  return report;
}

TEST(DocumentsFromTest, ASequenceHoldsThemInTheirProportions) {
  // 3 of 3,072 and 1 of 12,288 tokens: a sequence of 43,008 holds two of that.
  const std::vector<v1::StepReport> reports = {OfDocuments({{4096, 3}, {16384, 1}})};
  EXPECT_THAT(DocumentsFrom(reports, 43008),
              ElementsAre(12288, 12288, 3072, 3072, 3072, 3072, 3072, 3072));
  EXPECT_THAT(DocumentsFrom(reports, 4096), IsEmpty()) << "one is longer than the sequence";
  EXPECT_THAT(DocumentsFrom({}, 43008), IsEmpty());
}

// A report may say anything.
TEST(DocumentsFromTest, TheyAreNoMoreThanTokens) {
  const auto from = [](const std::map<uint64_t, uint64_t>& counts) {
    return DocumentsFrom(std::vector<v1::StepReport>{OfDocuments(counts)}, 65536);
  };
  EXPECT_THAT(from({{0, 1}}), IsEmpty());
  EXPECT_EQ(from({{0, 7}, {4096, 3}}), from({{4096, 3}}));
  EXPECT_LE(from({{1, 5}}).size(), 65536u);
}

// One rank that stopped for a minute once is no reason to change what all do.
TEST(MedianOfTest, OneStepThatTookLongSaysNothing) {
  std::vector<v1::StepReport> steps;
  for (const double seconds : {1.0, 1.2, 61.0, 0.9, 1.1}) {
    steps.emplace_back().set_step_seconds(seconds);
    steps.back().mutable_phases()->set_exposed_communication(seconds - 0.5);
  }
  EXPECT_DOUBLE_EQ(MedianOf(steps).seconds, 1.1);
  EXPECT_DOUBLE_EQ(MedianOf(steps).exposed_communication, 0.6);
  steps.emplace_back().set_step_seconds(0.001);
  steps.back().set_skipped(true);
  EXPECT_DOUBLE_EQ(MedianOf(steps).seconds, 1.1);
  steps.back().set_skipped(false);
  EXPECT_DOUBLE_EQ(MedianOf(steps).seconds, 1.05);
  EXPECT_EQ(MedianOf({}).seconds, 0);
}

class ReshapeTest : public ::testing::Test {
 protected:
  ReshapeTest() {
    spec_ = LongJob(4, 262144);
    spec_.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
    spec_.mutable_data()->set_document_mask(true);
  }
  // Steps that took `slower` times what is predicted of the plan in force, and waited for `waits`
  // s.
  ReshapeRequest Request(double slower, double waits) {
    ReshapeRequest request = {.spec = spec_,
                              .model = model_,
                              .cluster = Gpus(2, 2),
                              .costs = CostModel(spec_, model_, Gpus(2, 2)),
                              .hints = hints_,
                              .plan = plan_,
                              .misses = misses_,
                              .steps_left = 1000,
                              .change_costs = {.layout = 2, .ring = 2}};
    const auto now = Predict(spec_, model_, request.cluster, request.costs, plan_, hints_);
    EXPECT_TRUE(now.ok()) << now.status();
    request.taken = {.seconds = slower * now->step_seconds(), .exposed_communication = waits};
    return request;
  }
  Reshaping Look(const ReshapeRequest& request) {
    const auto found = Reshape(request, {});
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? *found : Reshaping();
  }
  void Start(v1::ParallelismSpec::Layout layout, v1::ParallelismSpec::Ring ring) {
    v1::JobSpec asked = spec_;
    asked.mutable_parallelism()->set_layout(layout);
    asked.mutable_parallelism()->set_ring(ring);
    const auto plan =
        MakePlan(asked, model_, Gpus(2, 2), CostModel(asked, model_, Gpus(2, 2)), hints_);
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *plan;
  }

  v1::JobSpec spec_;
  const model::ModelConfig model_ = ThreeBillion();
  patterns::PatternHints hints_;
  v1::StepPlan plan_;
  std::map<std::string, double> misses_;
};

TEST_F(ReshapeTest, AnUnevenLayoutIsLeftForAnEvenOne) {
  Start(v1::ParallelismSpec::CONTIGUOUS, v1::ParallelismSpec::FLAT);
  const Reshaping found = Look(Request(1.1, 0));
  EXPECT_NEAR(found.miss, 1.1, 1e-9);
  ASSERT_TRUE(found.better.has_value());
  EXPECT_EQ(found.better->layout(), v1::ParallelismSpec::STRIPED);
  EXPECT_THAT(found.better->reasons(0), HasSubstr("in place of contiguous, flat"));
  // The same look from there finds nothing, also where that shape did better when it was in force
  // before.
  plan_ = *found.better;
  EXPECT_FALSE(Look(Request(1.1, 0)).better.has_value());
  misses_[NameOf(plan_)] = 0.8;
  EXPECT_FALSE(Look(Request(1.1, 0)).better.has_value());
}

TEST_F(ReshapeTest, AGainIsWorthTwiceWhatTheChangeCosts) {
  Start(v1::ParallelismSpec::CONTIGUOUS, v1::ParallelismSpec::FLAT);
  ReshapeRequest request = Request(1, 0);
  const Reshaping found = Look(request);
  ASSERT_TRUE(found.better.has_value());
  const double gain = request.taken.seconds - found.better->prediction().step_seconds();
  request.change_costs = {.layout = 0.49 * 100 * gain, .ring = 1e9};
  EXPECT_TRUE(Look(request).better.has_value());
  request.change_costs = {.layout = 0.52 * 100 * gain, .ring = 0.52 * 100 * gain};
  EXPECT_FALSE(Look(request).better.has_value());
  request.change_costs.layout = 0.49 * 100 * gain;
  request.steps_left = 50;
  EXPECT_FALSE(Look(request).better.has_value()) << "the job ends before";
}

TEST_F(ReshapeTest, WhatTheJobFileAsksForStays) {
  Start(v1::ParallelismSpec::CONTIGUOUS, v1::ParallelismSpec::FLAT);
  spec_.mutable_parallelism()->set_layout(v1::ParallelismSpec::CONTIGUOUS);
  spec_.mutable_parallelism()->set_ring(v1::ParallelismSpec::FLAT);
  EXPECT_FALSE(Look(Request(2, 1)).better.has_value());
}

// A shape that turned out slower than was predicted of it is not gone back to.
TEST_F(ReshapeTest, AShapeThatDisappointedIsRemembered) {
  Start(v1::ParallelismSpec::CONTIGUOUS, v1::ParallelismSpec::FLAT);
  for (const v1::ParallelismSpec::Layout layout :
       {v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::ZIGZAG}) {
    for (const v1::ParallelismSpec::Ring ring :
         {v1::ParallelismSpec::FLAT, v1::ParallelismSpec::HIERARCHICAL,
          v1::ParallelismSpec::ALL_GATHER}) {
      v1::StepPlan tried = plan_;
      tried.set_layout(layout);
      tried.set_stripe(layout == v1::ParallelismSpec::STRIPED ? spec_.attention().tile() : 0);
      tried.mutable_ring()->set_kind(ring);
      tried.mutable_ring()->set_inner(ring == v1::ParallelismSpec::HIERARCHICAL ? 2 : 4);
      misses_[NameOf(tried)] = 5;
    }
  }
  const Reshaping found = Look(Request(1, 0));
  EXPECT_FALSE(found.better.has_value() &&
               found.better->layout() != v1::ParallelismSpec::CONTIGUOUS);
}

// Links that were found slow stay so while short documents lie whole and nothing travels: on links
// as they were given stripes, which were left for their waits, would look better than what is
// taken.
TEST_F(ReshapeTest, SlowLinksAreRememberedWhereNothingTravels) {
  hints_.document_tokens = std::vector<int64_t>(64, 4096);
  Start(v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::FLAT);
  ReshapeRequest request = Request(1, 0);
  request.taken.exposed_communication = request.taken.seconds;
  request.taken.seconds *= 2;
  const Reshaping found = Look(request);
  EXPECT_GT(found.link_halvings, 1);
  ASSERT_TRUE(found.better.has_value());
  EXPECT_EQ(found.better->layout(), v1::ParallelismSpec::DOCUMENTS);
  misses_[NameOf(plan_)] = found.miss;
  plan_ = *found.better;
  request = Request(1.3, 0);
  EXPECT_TRUE(Look(request).better.has_value()) << "as if nothing were known of links";
  request.link_halvings = found.link_halvings;
  const Reshaping later = Look(request);
  EXPECT_EQ(later.link_halvings, found.link_halvings);
  EXPECT_FALSE(later.better.has_value());
}

TEST_F(ReshapeTest, LinksThatAreFastAgainAreNoLongerTakenForSlow) {
  hints_.document_tokens = std::vector<int64_t>(64, 4096);
  Start(v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::FLAT);
  ReshapeRequest request = Request(1, 0);
  request.link_halvings = 8;
  EXPECT_LT(Look(request).link_halvings, 4) << "stripes would wait for such links";
}

// Prices of other layouts do not know the lengths of documents: what they miss would look like a
// gain.
TEST_F(ReshapeTest, LengthsOfDocumentsCountWhereAllPricesKnowThem) {
  Start(v1::ParallelismSpec::ZIGZAG, v1::ParallelismSpec::FLAT);
  const Reshaping without = Look(Request(1, 0));
  ReshapeRequest request = Request(1, 0);
  request.hints.document_tokens = std::vector<int64_t>(64, 4096);
  const Reshaping with = Look(request);
  EXPECT_NEAR(with.miss, 1, 1e-9);
  EXPECT_EQ(with.better.has_value(), without.better.has_value());
  EXPECT_FALSE(with.better.has_value() && with.better->layout() == v1::ParallelismSpec::DOCUMENTS);
}

// Where nothing travels there is no ring step of others' keys, which stripes pay for though links
// be fast.
TEST_F(ReshapeTest, ShortDocumentsAreLaidOutWholeForTheStepsThatStripesTake) {
  hints_.document_tokens = std::vector<int64_t>(64, 4096);
  Start(v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::FLAT);
  ReshapeRequest request = Request(1, 0);
  request.cluster = Gpus(1, 4);
  request.change_costs.layout = 0.25 * request.taken.seconds;
  const Reshaping found = Look(request);
  ASSERT_TRUE(found.better.has_value());
  EXPECT_EQ(found.better->layout(), v1::ParallelismSpec::DOCUMENTS);
}

// Links that turn out slow leave less to travel.
TEST_F(ReshapeTest, ShortDocumentsAreLaidOutWholeWhereLinksAreSlow) {
  hints_.document_tokens = std::vector<int64_t>(64, 4096);
  Start(v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::FLAT);
  const double waits = 0.5 * Request(1, 0).taken.seconds;
  const Reshaping found = Look(Request(1.5, waits));
  ASSERT_TRUE(found.better.has_value());
  EXPECT_EQ(found.better->layout(), v1::ParallelismSpec::DOCUMENTS);
  EXPECT_FALSE(found.better->sample_weights().empty());
}

// What a sample takes by documents is of one rank, in stripes of all: a change brings the weights
// that a job has which begins so.
TEST_F(ReshapeTest, SamplesAreWeighedAsTheirLayoutWantsIt) {
  spec_.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  const auto weights = [](const v1::StepPlan& plan) {
    std::vector<std::pair<uint64_t, double>> rows;
    for (const v1::SampleWeight& row : plan.sample_weights()) {
      rows.emplace_back(row.tokens(), row.milliseconds());
    }
    return rows;
  };
  Start(v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::FLAT);
  const v1::StepPlan stripes = plan_;
  Start(v1::ParallelismSpec::DOCUMENTS, v1::ParallelismSpec::FLAT);
  ASSERT_NE(weights(stripes), weights(plan_));
  hints_.document_tokens = std::vector<int64_t>(64, 4096);
  ReshapeRequest request = Request(1, 0);
  request.change_costs = {};
  request.taken.seconds *= 10;
  request.misses[NameOf(stripes)] = 1;
  const auto back = Look(request).better;
  ASSERT_TRUE(back.has_value());
  ASSERT_EQ(back->layout(), v1::ParallelismSpec::STRIPED);
  EXPECT_EQ(weights(*back), weights(stripes));
}

TEST_F(ReshapeTest, SlowLinksShowInWhatRanksWaitFor) {
  Start(v1::ParallelismSpec::STRIPED, v1::ParallelismSpec::FLAT);
  const ReshapeRequest quick = Request(1, 0);
  ReshapeRequest slow = quick;
  slow.taken.seconds *= 1.5;
  slow.taken.exposed_communication = 0.5 * quick.taken.seconds;
  // With links as they usually are all of the rest would be a miss of the model.
  EXPECT_NEAR(Look(quick).miss, 1, 1e-9);
  EXPECT_LT(Look(slow).miss, 1.3);
}

}  // namespace
}  // namespace ringleader::planner
