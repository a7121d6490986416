#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Job;
using ::testing::Not;
using testing::Same;

TEST(DefaultsTest, FillWhatFitsAndNothingElse) {
  v1::JobSpec spec = Job();
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.attention().estimate_queries(), 64);
  EXPECT_EQ(spec.attention().estimate_at(), v1::AttentionSpec::END);
  EXPECT_EQ(spec.attention().density(), 0);
  EXPECT_EQ(spec.attention().max_slashes(), 1024);
  v1::JobSpec share = Job({"attention.density=0.05", "attention.estimate_at=spread",
                           "attention.head_budgets=by_recall"});
  ApplyDefaults(&share);
  EXPECT_FALSE(share.attention().has_max_slashes());
  EXPECT_FALSE(share.attention().has_max_verticals());
  const auto options = AttentionOptionsOf(share.attention());
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->budget.density, 0.05);
  EXPECT_EQ(options->estimate_at, patterns::EstimateAt::kSpread);
  EXPECT_TRUE(options->adapt_heads);
  v1::JobSpec blocks = Job({"attention.pattern=xattention", "attention.density=0.05"});
  ApplyDefaults(&blocks);
  EXPECT_EQ(blocks.attention().threshold(), 0.9);
  EXPECT_EQ(AttentionOptionsOf(blocks.attention())->density, 0.05);
  v1::JobSpec moba = Job({"attention.pattern=moba"});
  ApplyDefaults(&moba);
  EXPECT_EQ(moba.attention().block_size(), 1024);
  v1::JobSpec groups = Job({"attention.pattern=key_groups"});
  ApplyDefaults(&groups);
  EXPECT_EQ(groups.attention().density(), 0.2);
  EXPECT_EQ(groups.attention().tile(), 64);
  EXPECT_EQ(AttentionOptionsOf(groups.attention())->pattern, patterns::Pattern::kKeyGroups);
  v1::JobSpec adaspa = Job({"attention.pattern=adaspa"});
  ApplyDefaults(&adaspa);
  EXPECT_EQ(adaspa.attention().density(), 0.2);
  EXPECT_TRUE(AttentionOptionsOf(adaspa.attention())->adapt_heads);
  const std::string yaml = ToYaml(blocks);
  EXPECT_EQ(yaml.find("density"), yaml.rfind("density")) << yaml;
  EXPECT_EQ(spec.training().schedule(), v1::TrainingSpec::COSINE);
  EXPECT_DOUBLE_EQ(spec.training().beta2(), 0.95);
  EXPECT_EQ(spec.scheduling().max_retries(), 3);
  EXPECT_TRUE(spec.data().document_mask());
  EXPECT_FALSE(spec.attention().has_window());
  const v1::JobSpec once = spec;
  ApplyDefaults(&spec);
  EXPECT_TRUE(Same(once, spec));
  EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
}

v1::JobSpec Unnamed(const std::vector<std::string>& overrides) {
  v1::JobSpec spec = Job(overrides);
  spec.clear_attention();
  return spec;
}

v1::AttentionSpec::Pattern PatternOf(v1::JobSpec spec) {
  ApplyDefaults(&spec);
  EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
  return spec.attention().pattern();
}

TEST(DefaultsTest, ThePatternIsKeyGroupsOnGpusThatTakeWhatIsAsked) {
  const std::string cuda = "resources.engine=cuda", repeats = "training.deterministic=true";
  EXPECT_EQ(PatternOf(Unnamed({cuda})), v1::AttentionSpec::KEY_GROUPS);
  EXPECT_EQ(PatternOf(Unnamed({})), v1::AttentionSpec::VERTICAL_SLASH);
  EXPECT_EQ(PatternOf(Unnamed({repeats})), v1::AttentionSpec::VERTICAL_SLASH);
  EXPECT_EQ(PatternOf(Unnamed({repeats, cuda})), v1::AttentionSpec::VERTICAL_SLASH);
  for (const auto& [tile, pattern] : {std::pair{64, v1::AttentionSpec::KEY_GROUPS},
                                      std::pair{128, v1::AttentionSpec::VERTICAL_SLASH}}) {
    v1::JobSpec spec = Unnamed({cuda});
    spec.mutable_attention()->set_tile(tile);
    EXPECT_EQ(PatternOf(spec), pattern) << tile;
  }
  v1::JobSpec spec = Unnamed({cuda});
  EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.attention().density(), 0.2);
  EXPECT_FALSE(spec.attention().has_max_verticals());
  EXPECT_THAT(ToYaml(spec), HasSubstr("pattern: key_groups"));
}

TEST(DefaultsTest, UnderOtherMasksNothingIsLeftOut) {
  const std::string cuda = "resources.engine=cuda", heads = "parallelism.heads=2";
  for (const auto mask : {v1::AttentionSpec::MASK_PREFIX_LM, v1::AttentionSpec::MASK_FULL}) {
    const auto pattern_of = [&](const std::vector<std::string>& overrides) {
      v1::JobSpec spec = Unnamed(overrides);
      spec.mutable_attention()->set_mask(mask);
      if (mask == v1::AttentionSpec::MASK_FULL) spec.mutable_data()->set_hidden_token(256);
      return PatternOf(spec);
    };
    EXPECT_EQ(pattern_of({cuda}), v1::AttentionSpec::DENSE) << mask;
    EXPECT_EQ(pattern_of({cuda, heads}), v1::AttentionSpec::DENSE) << mask;
    EXPECT_EQ(pattern_of({}), v1::AttentionSpec::DENSE) << mask;
  }
  v1::JobSpec causal = Unnamed({cuda});
  causal.mutable_attention()->set_mask(v1::AttentionSpec::MASK_CAUSAL);
  EXPECT_EQ(PatternOf(causal), v1::AttentionSpec::KEY_GROUPS);
}

// A query keeps as many keys wherever its sequence ends.
TEST(DefaultsTest, KeyGroupsKeepASmallerShareOfLongerSequences) {
  for (const auto& [tokens, density] :
       {std::pair{"8192", 0.28}, std::pair{"12288", 0.23}, std::pair{"16384", 0.2},
        std::pair{"32768", 0.14}, std::pair{"65536", 0.1}, std::pair{"131072", 0.071},
        std::pair{"262144", 0.05}, std::pair{"1048576", 0.025}, std::pair{"16777216", 0.0063}}) {
    v1::JobSpec spec =
        Unnamed({"resources.engine=cuda", absl::StrCat("data.sequence_length=", tokens)});
    ApplyDefaults(&spec);
    EXPECT_EQ(spec.attention().pattern(), v1::AttentionSpec::KEY_GROUPS) << tokens;
    EXPECT_EQ(spec.attention().density(), density) << tokens;
    v1::JobSpec asked = Job({"attention.pattern=key_groups", "attention.density=0.05",
                             absl::StrCat("data.sequence_length=", tokens)});
    ApplyDefaults(&asked);
    EXPECT_EQ(asked.attention().density(), 0.05) << tokens;
  }
}

// Choosing saves no time there; who gives a field of choice wants one all the same.
TEST(DefaultsTest, ShortSequencesAreDenseOnGpusUnlessAFieldOfChoiceIsGiven) {
  const std::string cuda = "resources.engine=cuda", brief = "data.sequence_length=6144";
  EXPECT_EQ(PatternOf(Unnamed({cuda, brief})), v1::AttentionSpec::DENSE);
  EXPECT_EQ(PatternOf(Unnamed({brief})), v1::AttentionSpec::VERTICAL_SLASH);
  EXPECT_EQ(PatternOf(Unnamed({cuda, brief, "training.deterministic=true"})),
            v1::AttentionSpec::DENSE);
  EXPECT_EQ(PatternOf(Unnamed({cuda, brief, "training.eval_attention=both"})),
            v1::AttentionSpec::KEY_GROUPS);
  v1::JobSpec probed = Unnamed({cuda, brief});
  probed.mutable_attention()->set_probe_every(4);
  EXPECT_EQ(PatternOf(probed), v1::AttentionSpec::KEY_GROUPS);
  v1::JobSpec tiled = Unnamed({cuda, brief});
  tiled.mutable_attention()->set_tile(128);
  EXPECT_EQ(PatternOf(tiled), v1::AttentionSpec::DENSE);
}

TEST(DefaultsTest, WhatIsAPatternsDoesNotGoWithoutItsName) {
  v1::JobSpec mass = Unnamed({"resources.engine=cuda"});
  mass.mutable_attention()->set_vertical_mass(0.8);
  EXPECT_THAT(Validate(mass).message(),
              HasSubstr("attention.vertical_mass: only fits attention.pattern: vertical_slash"));
  v1::JobSpec share = Unnamed({"resources.engine=cuda"});
  share.mutable_attention()->set_density(0.05);
  EXPECT_THAT(Validate(share).message(),
              HasSubstr("attention.density: patterns mean different shares by it; name the one "
                        "that is meant, attention.pattern: key_groups for the default"));
  share.mutable_attention()->set_pattern(v1::AttentionSpec::KEY_GROUPS);
  EXPECT_TRUE(Validate(share).ok()) << Validate(share);
}

// Where each document is a call of its own, short ones attend to everything unless the job says
// otherwise, or its pattern says what a query sees whatever the data.
TEST(DefaultsTest, ShortDocumentsAreDenseWhereTheyLieByThemselves) {
  const auto dense_below = [](std::vector<std::string> changes) {
    // What the example says of its own pattern.
    for (const char* field : {"select", "vertical_mass", "slash_mass"}) {
      changes.push_back(absl::StrCat("attention.", field, "="));
    }
    v1::JobSpec spec = Job(std::move(changes));
    ApplyDefaults(&spec);
    EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
    return spec.attention().dense_below();
  };
  const std::string documents = "parallelism.layout=documents";
  EXPECT_EQ(dense_below({documents, "attention.pattern=xattention"}), 3072);
  EXPECT_EQ(dense_below({documents}), 3072) << "vertical_slash";
  EXPECT_EQ(dense_below({documents, "attention.pattern=xattention", "attention.dense_below=0"}), 0);
  EXPECT_EQ(dense_below({documents, "attention.pattern=xattention", "attention.dense_below=500"}),
            500);
  EXPECT_EQ(dense_below({"attention.pattern=xattention"}), 0);
  EXPECT_EQ(dense_below({documents, "attention.pattern=sliding_window"}), 0);
  EXPECT_EQ(dense_below({documents, "attention.pattern=block_topk"}), 3072);
  EXPECT_EQ(dense_below({documents, "attention.pattern=block_topk", "attention.selection=causal"}),
            0);
  // Under another mask there is none, and nobody is told to give what he did not write.
  v1::JobSpec masked = Job(
      {documents, "attention.pattern=block_topk", "attention.select=", "attention.vertical_mass=",
       "attention.slash_mass=", "attention.mask=full", "data.hidden_token=256"});
  EXPECT_THAT(std::string(Validate(masked).message()),
              AllOf(HasSubstr("parallelism.layout: documents goes with attention.mask: causal "
                              "alone"),
                    Not(HasSubstr("dense_below"))));
  masked.mutable_attention()->set_dense_below(500);
  EXPECT_THAT(std::string(Validate(masked).message()),
              HasSubstr("attention.dense_below: short documents attend causally; give 0"));
  v1::JobSpec dense = Job({documents, "attention.pattern=dense"});
  ApplyDefaults(&dense);
  EXPECT_FALSE(dense.attention().has_dense_below());
}

TEST(DefaultsTest, TheDocumentMaskCanBeSwitchedOff) {
  v1::JobSpec spec = Job({"data.document_mask=false"});
  ApplyDefaults(&spec);
  EXPECT_TRUE(spec.data().has_document_mask());
  EXPECT_FALSE(spec.data().document_mask());
  EXPECT_THAT(ToYaml(spec), HasSubstr("document_mask: false"));
}

TEST(DefaultsTest, ContextAndBatchFollowFromTheRest) {
  v1::JobSpec spec = Job({"parallelism.context=", "parallelism.data=2",
                          "training.global_batch=", "resources.trainers=8"});
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.parallelism().context(), 4);
  EXPECT_EQ(spec.training().global_batch(), 2);
}

}  // namespace
}  // namespace ringleader::jobspec
