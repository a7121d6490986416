// Plans of sequences whose documents are known: parallelism.layout: documents.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "balance/document_dealing.h"
#include "coordinator/planner/planner.h"
#include "coordinator/planner/simulate/pricer.h"
#include "coordinator/planner/testing/planner_problems.h"
#include "model_shape/model_config.h"

namespace ringleader::planner {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using v1::ParallelismSpec;

// Nodes with slow links between them train long documents and short ones.
class PlanByDocumentsTest : public ::testing::Test {
 protected:
  PlanByDocumentsTest() {
    cluster_.inter_node.bytes_per_second = 1e9;
    spec_.mutable_attention()->Clear();
    spec_.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
    jobspec::ApplyDefaults(&spec_);
  }
  v1::StepPlan Plan(ParallelismSpec::Layout layout, std::vector<int64_t> documents) {
    spec_.mutable_parallelism()->set_layout(layout);
    const auto plan = MakePlan(spec_, model_, cluster_, CostModel(spec_, model_, cluster_),
                               {.document_tokens = std::move(documents)});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *plan : v1::StepPlan();
  }

  ClusterShape cluster_ = Gpus(2, 1);
  v1::JobSpec spec_ = LongJob(2, 262144);
  const model::ModelConfig model_ = ThreeBillion();
};

TEST_F(PlanByDocumentsTest, WhatLiesWholeDoesNotTravel) {
  const std::vector<int64_t> documents = {90000, 8000, 3000, 12000, 1000};
  const v1::StepPlan stripes = Plan(ParallelismSpec::STRIPED, documents);
  const v1::StepPlan plan = Plan(ParallelismSpec::DOCUMENTS, documents);
  EXPECT_EQ(plan.layout(), ParallelismSpec::DOCUMENTS);
  EXPECT_EQ(plan.stripe(), 64);
  const v1::Prediction &by_documents = plan.prediction(), &striped = stripes.prediction();
  EXPECT_LT(by_documents.communication_seconds(), 0.8 * striped.communication_seconds());
  EXPECT_GT(by_documents.communication_seconds(), 0);
  EXPECT_LT(by_documents.step_seconds(), striped.step_seconds());
  EXPECT_LT(by_documents.worker_imbalance(), 1.05);
  // The same documents visit as many tiles wherever they lie, and far fewer than one document.
  EXPECT_NEAR(by_documents.density(), striped.density(), 1e-9);
  EXPECT_LT(striped.density(), 0.5);
  EXPECT_THAT(plan.reasons(), Contains(HasSubstr("of a sequence's 11 documents")));
  // What a document takes on one rank: more than twice as much as one of half its length.
  ASSERT_GT(plan.sample_weights_size(), 10);
  const auto& rows = plan.sample_weights();
  EXPECT_EQ(rows.rbegin()->tokens(), 262144u);
  EXPECT_GT(rows.rbegin()->milliseconds(), 2.5 * (rows.rbegin() + 2)->milliseconds());
}

// Two ranks send each other the keys and values of half of a spread document, in bf16, forward and
// backward, and gradients home.
TEST_F(PlanByDocumentsTest, WeightsSayWhatSpreadDocumentsTakeToTravel) {
  const auto travel = [&](ParallelismSpec::Layout layout = ParallelismSpec::DOCUMENTS) {
    const v1::StepPlan plan = Plan(layout, {});
    if (layout != ParallelismSpec::DOCUMENTS) {
      EXPECT_TRUE(plan.sample_weights().empty());
      return 0.0;
    }
    const v1::SampleWeight& row = plan.sample_weights(3);
    const double of_a_token = row.travel_milliseconds() / static_cast<double>(row.tokens());
    const v1::SampleWeight& last = *plan.sample_weights().rbegin();
    EXPECT_NEAR(last.travel_milliseconds() / static_cast<double>(last.tokens()), of_a_token, 1e-12);
    return of_a_token;
  };
  const double values = 36 * 2 * 2 * 128 / 2.0;  // layers, keys and values, KV heads, half of them
  EXPECT_NEAR(travel(), 1e3 * values * (2 + 2 + 4) / 1e9, 1e-9);
  spec_.mutable_parallelism()->set_kv_gradients(ParallelismSpec::BFLOAT16);
  EXPECT_NEAR(travel(), 1e3 * values * (2 + 2 + 2) / 1e9, 1e-9);
  cluster_.inter_node.bytes_per_second = 2e9;
  EXPECT_NEAR(travel(), 1e3 * values * (2 + 2 + 2) / 2e9, 1e-9);
  cluster_ = Gpus(1, 2);
  EXPECT_NEAR(travel(), 1e3 * values * (2 + 2 + 2) / cluster_.intra_node.bytes_per_second, 1e-9);
  travel(ParallelismSpec::STRIPED);
}

TEST_F(PlanByDocumentsTest, OneDocumentIsInStripes) {
  const v1::StepPlan unknown = Plan(ParallelismSpec::DOCUMENTS, {});
  EXPECT_THAT(unknown.reasons(), Contains(HasSubstr("lengths of documents are not known here")));
  const v1::StepPlan one = Plan(ParallelismSpec::DOCUMENTS, {262144});
  const v1::StepPlan stripes = Plan(ParallelismSpec::STRIPED, {});
  EXPECT_NEAR(unknown.prediction().step_seconds(), stripes.prediction().step_seconds(), 1e-9);
  EXPECT_NEAR(one.prediction().step_seconds(), stripes.prediction().step_seconds(), 1e-6);
}

double SumOfRows(const v1::Prediction& p) {
  return p.attention_seconds() + p.index_seconds() + p.linear_seconds() + p.wait_seconds() +
         p.exposed_communication_seconds() + p.optimizer_seconds();
}

// What the plan says that another ring would take.
double RivalSeconds(const v1::StepPlan& plan) {
  constexpr char kWouldTake[] = " would take ";
  for (const std::string& reason : plan.reasons()) {
    const size_t at = reason.find(kWouldTake);
    if (at != std::string::npos) return std::stod(reason.substr(at + std::strlen(kWouldTake)));
  }
  ADD_FAILURE() << "no other ring is spoken of";
  return 0;
}

TEST_F(PlanByDocumentsTest, SamplesAreNotTakenForOneDocument) {
  spec_.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
  EXPECT_THAT(Plan(ParallelismSpec::DOCUMENTS, {}).reasons(),
              AllOf(Contains(HasSubstr("ringctl plan --lengths")),
                    Not(Contains(HasSubstr("ringctl plan --documents")))));
}

TEST_F(PlanByDocumentsTest, OneTrainerComputesEachDocumentByItself) {
  cluster_ = Gpus(1, 1);
  spec_ = LongJob(1, 65536);
  spec_.mutable_attention()->Clear();
  spec_.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
  jobspec::ApplyDefaults(&spec_);
  const v1::StepPlan one = Plan(ParallelismSpec::STRIPED, {}),
                     eight = Plan(ParallelismSpec::STRIPED, {8192});
  EXPECT_EQ(one.prediction().density(), 1);
  // 64 x 64 tiles up to the diagonal, of eight documents, of those of the whole.
  EXPECT_NEAR(eight.prediction().density(), 8 * 128 * 129 / (1024 * 1025.0), 1e-9);
  EXPECT_LT(eight.prediction().attention_seconds(), 0.2 * one.prediction().attention_seconds());
  EXPECT_EQ(eight.prediction().linear_seconds(), one.prediction().linear_seconds());
  EXPECT_EQ(eight.prediction().communication_seconds(), 0);
}

TEST_F(PlanByDocumentsTest, WhatIsChosenIsChosenForEachDocumentByItself) {
  const std::vector<int64_t> documents = {40000, 8000, 3000, 12000, 1000};
  spec_.mutable_data()->set_sequence_length(65536);
  // With auto it goes by memory, of which ranks that are filled up have less.
  spec_.mutable_resources()->set_recompute(v1::ResourcesSpec::FULL);
  const v1::StepPlan dense = Plan(ParallelismSpec::DOCUMENTS, documents);
  const v1::StepPlan dense_short = Plan(ParallelismSpec::DOCUMENTS, {2048});
  for (const auto pattern : {v1::AttentionSpec::VERTICAL_SLASH, v1::AttentionSpec::XATTENTION,
                             v1::AttentionSpec::KEY_GROUPS}) {
    SCOPED_TRACE(v1::AttentionSpec::Pattern_Name(pattern));
    spec_.mutable_attention()->Clear();
    spec_.mutable_attention()->set_pattern(pattern);
    jobspec::ApplyDefaults(&spec_);
    const v1::StepPlan striped = Plan(ParallelismSpec::STRIPED, {});
    const v1::StepPlan plan = Plan(ParallelismSpec::DOCUMENTS, documents);
    const v1::Prediction& priced = plan.prediction();
    EXPECT_NEAR(SumOfRows(priced), priced.step_seconds(), 1e-9 * priced.step_seconds());
    EXPECT_THAT(plan.reasons(), Contains(HasSubstr("of a sequence's 6 documents")));
    EXPECT_LT(priced.density(), 0.7 * dense.prediction().density());
    EXPECT_LT(priced.communication_seconds(), 0.8 * striped.prediction().communication_seconds());
    EXPECT_GT(priced.communication_seconds(), 0);
    EXPECT_LT(priced.worker_imbalance(), 1.1);
    // A sequence that is one document is what it is in stripes.
    const v1::StepPlan one = Plan(ParallelismSpec::DOCUMENTS, {65536});
    EXPECT_NEAR(one.prediction().step_seconds(), striped.prediction().step_seconds(), 1e-6);
    EXPECT_NEAR(one.prediction().density(), striped.prediction().density(), 1e-9);
    // What other rings would take is said of the same documents.
    EXPECT_LT(RivalSeconds(plan), 0.8 * RivalSeconds(one));
    // Short documents are dense, whole, and nothing travels.
    spec_.mutable_attention()->set_dense_below(4096);
    const v1::StepPlan whole = Plan(ParallelismSpec::DOCUMENTS, {2048});
    EXPECT_NEAR(whole.prediction().density(), dense_short.prediction().density(), 1e-9);
    EXPECT_EQ(whole.prediction().communication_seconds(), 0);
    EXPECT_EQ(whole.prediction().index_seconds(), 0);
    EXPECT_NEAR(SumOfRows(whole.prediction()), whole.prediction().step_seconds(), 1e-9);
  }
}

// A rank that holds more tokens than others makes all compute as many, and each document is a call.
TEST_F(PlanByDocumentsTest, FillerAndCallsOfDocumentsThatAreApartArePriced) {
  spec_.mutable_attention()->Clear();
  spec_.mutable_attention()->set_pattern(v1::AttentionSpec::XATTENTION);
  jobspec::ApplyDefaults(&spec_);
  spec_.mutable_data()->set_sequence_length(65536);
  const v1::StepPlan even = Plan(ParallelismSpec::DOCUMENTS, {32768});
  const v1::StepPlan uneven = Plan(ParallelismSpec::DOCUMENTS, {25000, 15536, 25000});
  EXPECT_EQ(even.prediction().communication_seconds(), 0);
  EXPECT_GT(uneven.prediction().linear_seconds(), even.prediction().linear_seconds());
  const v1::StepPlan many = Plan(ParallelismSpec::DOCUMENTS, {1024});
  EXPECT_GT(many.prediction().index_seconds(), even.prediction().index_seconds());
}

// What is predicted when a plan is made is what is predicted of it, and both of documents that lie
// where trainers lay them.
TEST_F(PlanByDocumentsTest, TheyLieWhereTrainersLayThem) {
  spec_ = LongJob(8, 262144);
  spec_.mutable_attention()->Clear();
  spec_.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
  jobspec::ApplyDefaults(&spec_);
  cluster_ = Gpus(2, 4);
  const std::vector<int64_t> documents = {60000, 30000, 17000, 9000, 5000, 3000, 3000, 1000, 700};
  const v1::StepPlan plan = Plan(ParallelismSpec::DOCUMENTS, documents);
  const auto again = Predict(spec_, model_, cluster_, CostModel(spec_, model_, cluster_), plan,
                             {.document_tokens = documents});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_DOUBLE_EQ(plan.prediction().step_seconds(), again->step_seconds());
  std::vector<int64_t> tokens;
  for (int64_t left = 262144; left > 0; left -= tokens.back()) {
    tokens.push_back(std::min(left, documents[tokens.size() % documents.size()]));
  }
  const balance::DocumentDealing dealing = balance::DealDocuments(tokens, 8, 64, *WeightsOf(plan));
  EXPECT_THAT(plan.reasons(), Contains(HasSubstr(absl::StrFormat(
                                  "of a sequence's %d documents %d are spread", tokens.size(),
                                  std::ranges::count(dealing.holders, std::optional<int>())))));
}

TEST_F(PlanByDocumentsTest, OnlyWhereItIsAskedFor) {
  spec_.mutable_parallelism()->clear_layout();
  const v1::StepPlan plan = Plan(ParallelismSpec::LAYOUT_UNSPECIFIED, {});
  EXPECT_FALSE(plan.reasons().empty());
  for (const std::string& reason : plan.reasons()) {
    EXPECT_THAT(reason, Not(HasSubstr("documents")));
  }
}

}  // namespace
}  // namespace ringleader::planner
