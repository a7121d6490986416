// What a job asks of the model that it names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Job;

// As Qwen2.5-3B has them, in two layers.
model::ModelConfig TwoLayers() {
  model::ModelConfig model;
  model.vocab_size = 320;
  model.hidden_size = 2048;
  model.intermediate_size = 11008;
  model.layers = 2;
  model.heads = 16;
  model.kv_heads = 2;
  model.head_dim = 128;
  return model;
}

std::string Complaint(std::vector<std::string> overrides,
                      const model::ModelConfig& model = TwoLayers()) {
  return std::string(Validate(Job(std::move(overrides)), model).message());
}

TEST(CheckModelTest, WhatTheModelDoesNotHaveIsRefused) {
  EXPECT_EQ(Complaint({}), "");
  EXPECT_EQ(Complaint({"attention.dense_layers=[1, 2]"}),
            "attention.dense_layers: layer 2 does not exist; the model has 2 layers, 0 to 1");
  EXPECT_THAT(Complaint({"training.precision=fp8"}),
              AllOf(HasSubstr("training.precision: fp8 leaves a model's first and last layer"),
                    HasSubstr("num_hidden_layers is 2")));
  EXPECT_EQ(Complaint({"training.precision=fp8_all_layers"}), "");
  EXPECT_EQ(Complaint({"attention.dense_layers=[9]", "training.precision=fp8"}, {}), "")
      << "of a model that is not known nothing is";
  model::ModelConfig narrow = TwoLayers();
  narrow.head_dim = 32;
  EXPECT_EQ(Complaint({}, narrow), "");
  EXPECT_EQ(Complaint({"resources.engine=cuda"}, narrow),
            "model: its heads have 32 dimensions; with resources.engine: cuda 64 and 128 are "
            "supported");
  model::ModelConfig one = TwoLayers();
  one.layers = 1;
  const std::string cuda = "resources.engine=cuda";
  EXPECT_EQ(Complaint({cuda, "resources.offload=host"}), "");
  EXPECT_THAT(Complaint({cuda, "resources.offload=host"}, one),
              HasSubstr("this model has one layer; set it to none"));
  EXPECT_EQ(Complaint({cuda}, one), "");
  EXPECT_THAT(Complaint({"attention.dense_layers=[2]", "training.precision=fp8"}),
              AllOf(HasSubstr("2 mistakes:\n  attention.dense_layers: layer 2"),
                    HasSubstr("\n  training.precision: fp8 leaves")));
}

TEST(CheckModelTest, SaysTheSameWithoutTheRestOfTheChecks) {
  const v1::JobSpec spec = Job({"training.precision=fp8"});
  EXPECT_EQ(CheckModel(spec, TwoLayers()).message(), Validate(spec, TwoLayers()).message());
  EXPECT_TRUE(CheckModel(spec, {}).ok());
  // A field that is left out has its default.
  EXPECT_TRUE(CheckModel(Job({"attention.pattern="}), TwoLayers()).ok());
}

// Lengths go by heads: without the model's a user was told to change the length first, and then
// that no length does.
TEST(CheckModelTest, HeadsAreTheModelsBeforeLengthsAreTheirs) {
  const std::vector<std::string> three = {"parallelism.heads=3", "parallelism.context=6",
                                          "resources.trainers=6"};
  EXPECT_THAT(Complaint(three, {}), HasSubstr("data.sequence_length: 16384 does not divide by"));
  EXPECT_EQ(Complaint(three),
            "parallelism.heads: 3 trainers cannot share out 16 heads over 2 KV heads evenly; give "
            "one of 1, 2, 4, 8, 16");
  EXPECT_THAT(Complaint({"parallelism.heads=3"}),
              AllOf(HasSubstr("2 mistakes:\n  parallelism.heads: 3 trainers cannot share out"),
                    HasSubstr("\n  parallelism.heads: 3 does not divide parallelism.context (4)")));
  EXPECT_THAT(Complaint({"parallelism.heads=2", "data.sequence_length=16448"}),
              HasSubstr("data.sequence_length: 16448 does not divide"))
      << "heads that the model has";
  EXPECT_EQ(Complaint({"parallelism.heads=0"}), "") << "the planner picks";
}

}  // namespace
}  // namespace ringleader::jobspec
