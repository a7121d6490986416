#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"
#include "jobspec/values/attention_spec.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using testing::Complaint;
using ::testing::HasSubstr;
using testing::Job;
using testing::kJob;
using testing::ParseError;

// A choice has room for so many blocks and no more.
TEST(ValidateTest, PatternsSayHowLongASequenceMayBe) {
  const std::string million = "data.sequence_length=1048576";
  EXPECT_THAT(Complaint({"attention.pattern=moba", million}),
              HasSubstr("attention.block_size: 1024 makes 1024 blocks of a sequence of 1048576 "
                        "tokens; moba takes 640"));
  EXPECT_EQ(Complaint({"attention.pattern=moba", "attention.block_size=2048", million}), "");
  EXPECT_THAT(Complaint({"attention.pattern=adaspa", million}),
              HasSubstr("1048576 tokens are 16384 blocks of attention.tile; there may be 12000"));
  EXPECT_EQ(Complaint({"attention.pattern=adaspa", "data.batching=samples", million}), "");
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", million}), "");
  const std::string more = "data.sequence_length=4194304";
  EXPECT_THAT(Complaint({"attention.pattern=xattention", "attention.tile=64", more}),
              HasSubstr("attention.tile: 64 makes 65536 blocks of a sequence of 4194304 tokens; "
                        "xattention takes 48000: make it 128"));
  EXPECT_EQ(Complaint({"attention.pattern=xattention", "attention.tile=128", more}), "");
  const std::string most = "data.sequence_length=16777216";
  EXPECT_THAT(Complaint({"attention.density=0.7", most}),
              HasSubstr("vertical_slash: a head may keep 1174405 columns of 16777216 tokens; there "
                        "may be 1048576: give less attention.density"));
  EXPECT_EQ(Complaint({"attention.density=0.5", most}), "");
  EXPECT_EQ(Complaint({"attention.max_verticals=2000000", million}), "") << "as many as tokens";
  EXPECT_THAT(Complaint({"attention.max_verticals=2000000", more}),
              HasSubstr("2000000 columns of 4194304 tokens"));
}

TEST(ParseTest, OffloadIsForGpus) {
  const auto with = [](const std::string& offload) {
    return std::vector<std::string>{"resources.engine=cuda", "resources.offload=" + offload};
  };
  EXPECT_EQ(Job(with("host")).resources().offload(), v1::ResourcesSpec::OFFLOAD_HOST);
  EXPECT_EQ(Job(with("none")).resources().offload(), v1::ResourcesSpec::OFFLOAD_NONE);
  EXPECT_EQ(Job(with("auto")).resources().offload(), v1::ResourcesSpec::OFFLOAD_UNSPECIFIED);
  EXPECT_THAT(ToYaml(Job(with("host"))), HasSubstr("offload: host"));
  EXPECT_THAT(ParseError(kJob, with("disk")),
              AllOf(HasSubstr("resources.offload"), HasSubstr("one of auto, none, host")));
  EXPECT_EQ(Complaint(with("host")), "");
  EXPECT_THAT(Complaint({"resources.offload=host"}),
              AllOf(HasSubstr("resources.offload"), HasSubstr("there is no second memory"),
                    HasSubstr("set resources.engine: cuda")));
  EXPECT_EQ(Complaint({"resources.offload=auto"}), "");
}

TEST(ValidateTest, OnlyChoicesByScoresAreBalanced) {
  for (const char* pattern : {"xattention", "moba", "key_groups"}) {
    EXPECT_EQ(
        Complaint({"attention.balance.anchor=max", absl::StrCat("attention.pattern=", pattern)}),
        "")
        << pattern;
  }
  EXPECT_THAT(Complaint({"attention.balance.anchor=mean", "attention.pattern=sliding_window",
                         "attention.window=512"}),
              HasSubstr("give none, or one of the patterns vertical_slash, block_topk, moba, "));
  EXPECT_THAT(Complaint({"attention.balance.anchor=mean", "attention.pattern=dense"}),
              HasSubstr("only fits attention.pattern other than dense"));
}

TEST(ValidateTest, RangesNameFieldValueAndLimits) {
  EXPECT_EQ(Complaint({"attention.vertical_mass=1.5"}),
            "attention.vertical_mass: 1.5 is out of range; give a number more than 0, at most 1");
  EXPECT_EQ(Complaint({"training.beta2=0.99999999"}),
            "training.beta2: 0.99999999 is out of range; give a number from 0 to 0.9999999");
  EXPECT_EQ(Complaint({"training.beta2=0.9999999"}), "");
  EXPECT_EQ(Complaint({"training.epsilon=1e-60"}),
            "training.epsilon: 1e-60 is out of range; give a number from 1.2e-38 to 1");
  EXPECT_EQ(Complaint({"training.beta1=1"}),
            "training.beta1: 1 is out of range; give a number from 0 to 0.9999999");
  EXPECT_THAT(Complaint({"training.steps=0"}), HasSubstr("training.steps: required"));
  EXPECT_THAT(Complaint({"name=Big_Job"}), HasSubstr("name: 'Big_Job' is not allowed"));
  EXPECT_THAT(Complaint({"attention.tile=96"}), HasSubstr("give 64 or 128"));
  EXPECT_THAT(Complaint({"attention.dense_layers=[1,1]"}), HasSubstr("layer 1 is listed twice"));
  EXPECT_THAT(Complaint({"attention.dense_below=2048", "data.document_mask=false"}),
              HasSubstr("there are no documents apart from others; give 0"));
  EXPECT_THAT(Complaint({"attention.dense_below=2048", "attention.pattern=dense"}),
              HasSubstr("only fits attention.pattern other than dense"));
  EXPECT_THAT(Complaint({"labels.a=b c"}), HasSubstr("labels.a: keys and values"));
  EXPECT_THAT(Complaint({"training.global_batch=3", "parallelism.data=2", "parallelism.context=2"}),
              HasSubstr("training.global_batch: 3 does not divide by parallelism.data (2)"));
  EXPECT_THAT(Complaint({"training.warmup_steps=41"}), HasSubstr("more than training.steps (40)"));
  EXPECT_THAT(Complaint({"training.precision=fp8", "training.fp8_first_step=41"}),
              HasSubstr("after the last step in FP8 (40)"));
  EXPECT_THAT(Complaint({"training.precision=fp8", "training.fp8_first_step=9",
                         "training.fp8_last_step=8"}),
              HasSubstr("after the last step in FP8 (8)"));
  EXPECT_EQ(Complaint({"training.precision=fp8", "training.fp8_first_step=8",
                       "training.fp8_last_step=8"}),
            "");
  EXPECT_THAT(Complaint({"training.fp8_last_step=8"}),
              HasSubstr("only fits training.precision other than bfloat16"));
  EXPECT_THAT(Complaint({"model.config="}), HasSubstr("model.config: required"));
  EXPECT_THAT(Complaint({"model.init=/m"}), HasSubstr("remove one of the two"));
}

TEST(ValidateTest, FieldsMustFitThePattern) {
  EXPECT_EQ(Complaint({"attention.window=128"}),
            "attention.window: only fits attention.pattern: sliding_window; remove it, or change "
            "that");
  EXPECT_THAT(Complaint({"attention.select=top_k", "attention.vertical_mass=0.5"}),
              HasSubstr("attention.vertical_mass: only fits attention.pattern: vertical_slash with "
                        "attention.select: top_p"));
  EXPECT_THAT(Complaint({"attention.density=0.05", "attention.max_slashes=32"}),
              HasSubstr("attention.max_slashes: only fits attention.pattern: vertical_slash with "
                        "attention.density: 0"));
  EXPECT_EQ(Complaint({"attention.density=0.05", "attention.estimate_at=spread",
                       "attention.head_budgets=by_recall"}),
            "");
  // One field of several patterns, each with a default of its own.
  EXPECT_EQ(Complaint({"attention.pattern=xattention", "attention.density=0.05"}), "");
  EXPECT_EQ(Complaint({"attention.pattern=block_topk", "attention.density=0.05"}),
            "attention.density: only fits attention.pattern: vertical_slash, or attention.pattern: "
            "moba, or attention.pattern: xattention, or attention.pattern: key_groups, or "
            "attention.pattern: adaspa; remove it, or change that");
  EXPECT_THAT(Complaint({"attention.pattern=xattention", "attention.stride=24"}),
              HasSubstr("attention.stride is 24; allowed are 8, 16, 32 and 64"));
  EXPECT_THAT(
      Complaint({"attention.pattern=moba", "attention.density=0.05", "attention.topk_blocks=3"}),
      HasSubstr("attention.topk_blocks: only fits attention.pattern: block_topk, or "
                "attention.pattern: moba with attention.density: 0"));
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", "attention.density=1"}), "");
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", "attention.group_queries=16"}), "");
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.group_queries=32"}),
              HasSubstr("attention.group_queries is 32; allowed are 64 and 16"));
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", "attention.group_heads=2"}), "");
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.group_heads=3"}),
              HasSubstr("attention.group_heads"));
  EXPECT_THAT(Complaint({"attention.pattern=block_topk", "attention.group_queries=16"}),
              HasSubstr("attention.group_queries: only fits attention.pattern: key_groups"));
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.density=0"}),
              HasSubstr("attention.density: 0 is out of range"));
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.tile=128"}),
              HasSubstr("attention.tile is 128; attention.pattern: key_groups takes 64"));
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.selection=causal"}),
              HasSubstr("attention.selection: causal does not go with attention.pattern: "
                        "key_groups"));
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", "training.deterministic=true",
                       "resources.engine=cpu"}),
            "");
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "training.deterministic=true",
                         "resources.engine=cuda"}),
              HasSubstr("training.deterministic: does not go with attention.pattern: key_groups"));
  EXPECT_EQ(Complaint({"attention.pattern=adaspa", "attention.density=0.6"}), "");
  EXPECT_THAT(Complaint({"attention.pattern=adaspa", "attention.density=0.7"}),
              HasSubstr("give less, or attention.head_budgets: equal"));
  EXPECT_EQ(Complaint({"attention.pattern=adaspa", "attention.density=0.7",
                       "attention.head_budgets=equal"}),
            "");
  EXPECT_THAT(Complaint({"attention.pattern=adaspa", "attention.density=0.7",
                         "attention.head_budgets=by_probe"}),
              HasSubstr("with attention.head_budgets: by_probe some heads keep half more"));
  EXPECT_THAT(Complaint({"attention.density=5"}),
              HasSubstr("attention.density: 5 is out of range"));
  EXPECT_THAT(Complaint({"parallelism.stripe=64"}), HasSubstr("parallelism.layout: striped"));
  EXPECT_EQ(Complaint({"parallelism.stripe=128", "parallelism.layout=striped"}), "");
}

TEST(ValidateTest, HeadBudgetsFollowProbesThatThereAre) {
  EXPECT_EQ(Complaint({"attention.head_budgets=by_probe"}), "");
  EXPECT_EQ(Complaint({"attention.pattern=adaspa", "attention.head_budgets=by_probe"}), "");
  EXPECT_EQ(Complaint({"attention.pattern=moba", "attention.topk_blocks=3",
                       "attention.head_budgets=by_probe"}),
            "");
  EXPECT_THAT(Complaint({"attention.pattern=moba", "attention.topk_blocks=2",
                         "attention.head_budgets=by_probe"}),
              HasSubstr("attention.topk_blocks is 2, of which no head could keep half"));
  EXPECT_THAT(Complaint({"attention.head_budgets=by_probe", "attention.probe_every=0"}),
              HasSubstr("attention.head_budgets: by_probe follows the probes, of which "
                        "attention.probe_every: 0 asks for none; give attention.probe_every"));
  EXPECT_THAT(Complaint({"attention.head_budgets=by_probe", "attention.balance.anchor=mean"}),
              HasSubstr("attention.head_budgets: by_probe does not go with "
                        "attention.balance.anchor"));
  EXPECT_THAT(Complaint({"attention.head_budgets=by_probe", "parallelism.layout=documents"}),
              HasSubstr("parallelism.layout: documents does not go with attention.head_budgets: "
                        "by_probe"));
  EXPECT_THAT(Complaint({"attention.head_budgets=by_probe", "parallelism.heads=2"}),
              HasSubstr("parallelism.heads: 2 does not go with attention.head_budgets: by_probe"));
  EXPECT_THAT(Complaint({"attention.head_budgets=by_probe", "attention.pattern=fixed_blocks"}),
              HasSubstr("attention.head_budgets: only fits attention.pattern: vertical_slash, or "
                        "attention.pattern: block_topk, or attention.pattern: moba, or "
                        "attention.pattern: xattention, or attention.pattern: key_groups, or "
                        "attention.pattern: adaspa"));
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", "attention.head_budgets=by_probe"}), "");
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.head_budgets=by_recall"}),
              HasSubstr("attention.head_budgets: by_recall does not go with attention.pattern: "
                        "key_groups, whose choice estimates no recall"));
  EXPECT_THAT(Complaint({"attention.pattern=key_groups", "attention.head_budgets=by_probe",
                         "attention.density=0.7"}),
              HasSubstr("attention.density is 0.7; with attention.head_budgets: by_probe"));
  EXPECT_EQ(Complaint({"attention.pattern=moba", "attention.head_budgets=by_probe"}), "");
  EXPECT_EQ(Complaint({"attention.pattern=moba", "attention.density=0.7"}), "");
  EXPECT_THAT(
      Complaint(
          {"attention.pattern=moba", "attention.density=0.7", "attention.head_budgets=by_probe"}),
      HasSubstr("attention.density is 0.7; with attention.head_budgets: by_probe some heads "
                "keep half more"));
  EXPECT_THAT(Complaint({"attention.pattern=moba", "attention.head_budgets=by_recall"}),
              HasSubstr("attention.head_budgets: by_recall does not go with attention.pattern: "
                        "moba, whose choice estimates no recall; give attention.head_budgets: "
                        "by_probe, or equal"));
  EXPECT_THAT(Complaint({"attention.pattern=moba", "attention.head_budgets=by_probe",
                         "parallelism.heads=2"}),
              HasSubstr("parallelism.heads: 2 does not go with attention.head_budgets: by_probe"));
}

TEST(ValidateTest, HeadBudgetsOfTilesNeedBlocksToMove) {
  EXPECT_EQ(Complaint({"attention.pattern=block_topk", "attention.head_budgets=by_probe"}), "");
  EXPECT_EQ(Complaint({"attention.pattern=block_topk", "attention.topk_blocks=1"}), "");
  EXPECT_THAT(Complaint({"attention.pattern=block_topk", "attention.topk_blocks=1",
                         "attention.head_budgets=by_probe"}),
              HasSubstr("attention.topk_blocks is 1, of which no head could keep half; with "
                        "attention.head_budgets: by_probe give 2 or more, or "
                        "attention.head_budgets: equal"));
  EXPECT_THAT(Complaint({"attention.pattern=block_topk", "attention.head_budgets=by_recall"}),
              HasSubstr("attention.head_budgets: by_recall does not go with attention.pattern: "
                        "block_topk, whose choice estimates no recall"));
  EXPECT_THAT(Complaint({"attention.pattern=block_topk", "attention.head_budgets=by_probe",
                         "attention.probe_every=0"}),
              HasSubstr("attention.head_budgets: by_probe follows the probes"));
  const auto of_xattention = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"attention.pattern=xattention", "attention.head_budgets=by_probe"});
    return Complaint(more);
  };
  EXPECT_EQ(of_xattention({"attention.density=0.1"}), "");
  EXPECT_EQ(of_xattention({"attention.density=0.1", "attention.threshold=1"}), "");
  EXPECT_THAT(of_xattention({}), HasSubstr("attention.density: 0 gives none, for "
                                           "attention.threshold alone says what is kept; give "
                                           "attention.density: 0.1, or attention.head_budgets: "
                                           "equal"));
  EXPECT_THAT(of_xattention({"attention.density=0.7"}),
              HasSubstr("attention.density is 0.7; with attention.head_budgets: by_probe some "
                        "heads keep half more"));
  EXPECT_THAT(of_xattention({"attention.density=0.1", "attention.balance.anchor=mean"}),
              HasSubstr("attention.head_budgets: by_probe does not go with "
                        "attention.balance.anchor"));
  EXPECT_THAT(Complaint({"attention.pattern=xattention", "attention.density=0.1",
                         "attention.head_budgets=by_recall"}),
              HasSubstr("attention.head_budgets: by_recall does not go with attention.pattern: "
                        "xattention, whose choice estimates no recall"));
}

// Larger whole numbers are rounded where numbers are doubles, as in JSON.
TEST(ValidateTest, ASeedIsOneThatDoublesHold) {
  EXPECT_EQ(Complaint({"training.seed=9007199254740991"}), "");
  for (const char* seed : {"9007199254740992", "9007199254740993"}) {
    EXPECT_THAT(Complaint({absl::StrCat("training.seed=", seed)}),
                HasSubstr("training.seed: 9007199254740992 is out of range"));
  }
}

TEST(ValidateTest, HeadsAreSharedOutByADivisorOfTheContext) {
  EXPECT_EQ(Job({"parallelism.heads=2"}).parallelism().heads(), 2u);
  v1::JobSpec spec = Job();
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.parallelism().heads(), 1u);
  EXPECT_EQ(Complaint({"parallelism.heads=2"}), "");
  EXPECT_EQ(Complaint({"parallelism.heads=4"}), "");
  EXPECT_EQ(Complaint({"parallelism.heads=3"}),
            "parallelism.heads: 3 does not divide parallelism.context (4), the trainers that share "
            "a sequence; give a divisor of it");
  EXPECT_EQ(Complaint({"parallelism.heads=0"}), "") << "the planner picks";
  EXPECT_THAT(Complaint({"parallelism.heads=65537"}),
              HasSubstr("parallelism.heads: 65537 is out of range"));
  EXPECT_THAT(Complaint({"parallelism.heads=2", "attention.head_budgets=by_recall"}),
              HasSubstr("parallelism.heads: 2 does not go with attention.head_budgets: by_recall"));
  EXPECT_THAT(Complaint({"parallelism.heads=2", "attention.balance.anchor=mean"}),
              HasSubstr("parallelism.heads: 2 does not go with attention.balance.anchor"));
  EXPECT_THAT(Complaint({"parallelism.heads=2", "attention.dense_below=512"}),
              HasSubstr("parallelism.heads: 2 does not go with attention.dense_below"));
  EXPECT_THAT(Complaint({"parallelism.heads=2", "attention.pattern=dense",
                         "parallelism.layout=documents", "data.document_mask=true"}),
              HasSubstr("parallelism.heads: 2 does not go with parallelism.layout: documents"));
  EXPECT_THAT(Complaint({"parallelism.heads=2", "parallelism.layout=documents"}),
              HasSubstr("parallelism.heads: 2 does not go with parallelism.layout: documents"))
      << "not with the attention.dense_below that it has by itself there";
  EXPECT_THAT(Complaint({"parallelism.heads=2", "data.sequence_length=16448"}),
              HasSubstr("context / heads × tile = 2 × 64 and by context = 4, together by 128"));
  EXPECT_EQ(Complaint({"parallelism.heads=4", "data.sequence_length=16444"}), "")
      << "without a ring any length does that the ranks divide";
}

TEST(ValidateTest, GroupsOfHeadsAreGathered) {
  v1::JobSpec spec = Job({"parallelism.ring=all_gather"});
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.parallelism().head_groups(), 1u);
  EXPECT_FALSE(PicksHeadGroups(spec.parallelism()));
  spec.mutable_parallelism()->set_head_groups(0);
  EXPECT_TRUE(PicksHeadGroups(spec.parallelism()));
  EXPECT_EQ(HeadGroups(spec.parallelism()), 1u) << "until the planner has picked";
  v1::StepPlan plan;
  plan.set_head_groups(4);
  EXPECT_EQ(HeadGroups(PlannedJob(spec, plan).parallelism()), 4u);
  spec.mutable_parallelism()->set_head_groups(2);
  EXPECT_EQ(HeadGroups(PlannedJob(spec, plan).parallelism()), 2u) << "as the job file says";
  EXPECT_EQ(Complaint({"parallelism.ring=all_gather", "parallelism.head_groups=2"}), "");
  EXPECT_EQ(Complaint({"parallelism.ring=all_gather", "parallelism.head_groups=2",
                       "parallelism.heads=2"}),
            "");
  EXPECT_EQ(Complaint({"parallelism.head_groups=0"}), "") << "with ring: auto";
  for (const std::string ring : {"flat", "hierarchical"}) {
    EXPECT_THAT(Complaint({"parallelism.ring=" + ring, "parallelism.head_groups=2"}),
                HasSubstr("parallelism.ring other than flat and hierarchical"));
  }
  EXPECT_THAT(Complaint({"parallelism.ring=all_gather", "parallelism.head_groups=2",
                         "attention.balance.anchor=mean"}),
              HasSubstr("parallelism.head_groups: 2 does not go with attention.balance.anchor"));
}

TEST(ValidateTest, AWindowDividesTheRing) {
  EXPECT_EQ(Complaint({"parallelism.ring=hierarchical", "parallelism.ring_window=2"}), "");
  EXPECT_EQ(Complaint({"parallelism.ring=hierarchical", "parallelism.ring_window=3"}),
            "parallelism.ring_window: 3 does not divide the 4 trainers of the ring; give a divisor "
            "of it");
  EXPECT_THAT(Complaint({"parallelism.ring=hierarchical", "parallelism.ring_window=4",
                         "parallelism.heads=2"}),
              HasSubstr("4 does not divide the 2 trainers of the ring"));
  EXPECT_THAT(Complaint({"parallelism.ring_window=2"}),
              HasSubstr("only fits parallelism.ring: hierarchical"));
}

TEST(ValidateTest, MasksGoWithWhatTheyCan) {
  const auto complaint = [](std::vector<std::string> more) {
    more.insert(more.end(),
                {"attention.pattern=dense", "attention.select=", "attention.vertical_mass=",
                 "attention.slash_mass=", "attention.dense_layers="});
    return Complaint(std::move(more));
  };
  EXPECT_EQ(complaint({"attention.mask=prefix_lm"}), "");
  EXPECT_EQ(complaint({"attention.mask=full", "data.hidden_token=256"}), "");
  EXPECT_EQ(complaint({"attention.mask=block_causal", "attention.mask_block=64",
                       "data.hidden_token=256", "data.hidden_share=0.5"}),
            "");
  EXPECT_EQ(complaint({"attention.mask=prefix_lm", "attention.pattern=sliding_window"}), "");
  EXPECT_THAT(Complaint({"attention.mask=prefix_lm"}),
              HasSubstr("attention.mask: prefix_lm does not go with attention.pattern: "
                        "vertical_slash"));
  EXPECT_THAT(complaint({"attention.mask=full"}),
              HasSubstr("data.hidden_token: required with attention.mask: full"));
  EXPECT_THAT(complaint({"attention.mask=prefix_lm", "data.document_mask=false"}),
              HasSubstr("attention.mask: prefix_lm gives each document a prefix of its own"));
  EXPECT_EQ(complaint({"attention.mask=full", "data.hidden_token=256", "data.document_mask=false"}),
            "");
  EXPECT_THAT(complaint({"data.hidden_share=0.5"}),
              HasSubstr("data.hidden_share: only fits attention.mask other than causal and "
                        "prefix_lm"));
  EXPECT_THAT(complaint({"attention.mask=prefix_lm", "data.hidden_token=3"}),
              HasSubstr("data.hidden_token: only fits"));
  EXPECT_THAT(complaint({"attention.mask=prefix_lm", "attention.mask_block=64"}),
              HasSubstr("attention.mask_block: only fits attention.mask: block_causal"));
  EXPECT_THAT(complaint({"attention.mask=full", "data.hidden_token=256", "data.hidden_share=0"}),
              HasSubstr("data.hidden_share: 0 is out of range"));
  EXPECT_THAT(complaint({"attention.mask=prefix_lm", "parallelism.layout=documents"}),
              HasSubstr("parallelism.layout: documents goes with attention.mask: causal alone"));
  EXPECT_THAT(complaint({"attention.mask=prefix_lm", "attention.pattern=sliding_window",
                         "attention.probe_every=3"}),
              HasSubstr("attention.probe_every: only fits attention.pattern other than dense with "
                        "attention.mask: causal"));
}

TEST(ValidateTest, SamplesAreWholeTilesAndKeptApartInAnyCase) {
  v1::JobSpec spec = Job({"data.batching=samples"});
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.data().overlong(), v1::DataSpec::REFUSE);
  EXPECT_FALSE(spec.data().has_document_mask());
  EXPECT_EQ(Complaint({"data.batching=samples", "data.overlong=split"}), "");
  EXPECT_EQ(Complaint({"data.overlong=split"}),
            "data.overlong: only fits data.batching: samples; remove it, or change that");
  EXPECT_EQ(Complaint({"data.batching=samples", "data.document_mask=false"}),
            "data.document_mask: only fits data.batching: packed; remove it, or change that");
  EXPECT_THAT(Complaint({"data.batching=samples", "resources.trainers=1", "parallelism.context=1",
                         "data.sequence_length=1000"}),
              HasSubstr("1000 does not divide by attention.tile (64)"));
}

TEST(ValidateTest, LayoutByDocumentsWantsThemApart) {
  const auto complaint = [](std::vector<std::string> more) {
    more.insert(more.end(),
                {"parallelism.layout=documents", "attention.pattern=dense", "attention.select=",
                 "attention.vertical_mass=", "attention.slash_mass=", "attention.dense_layers="});
    return Complaint(std::move(more));
  };
  EXPECT_EQ(complaint({}), "");
  EXPECT_EQ(complaint({"data.batching=samples"}), "");
  EXPECT_THAT(complaint({"data.document_mask=false"}),
              HasSubstr("give data.document_mask: true, or parallelism.layout: striped"));
  EXPECT_EQ(Complaint({"parallelism.layout=documents"}), "");  // under vertical_slash
  EXPECT_THAT(complaint({"data.sequence_length=16400"}),
              HasSubstr("(parallelism.layout: documents); give 16384 or 16640"));
  EXPECT_THAT(complaint({"parallelism.stripe=64"}), HasSubstr("parallelism.layout: striped"));
}

TEST(ValidateTest, SequencesDivideIntoWholeTiles) {
  EXPECT_EQ(Complaint({"data.sequence_length=16400"}),
            "data.sequence_length: 16400 does not divide by context × tile = 4 × 64 = 256 "
            "(parallelism.layout: auto); give 16384 or 16640");
  EXPECT_THAT(Complaint({"parallelism.layout=zigzag", "data.sequence_length=16640"}),
              HasSubstr("2 × context × tile"));
  EXPECT_THAT(Complaint({"parallelism.layout=striped", "parallelism.stripe=100"}),
              HasSubstr("no multiple of attention.tile (64)"));
  EXPECT_EQ(
      Complaint({"data.sequence_length=1001", "parallelism.context=1", "resources.trainers=1"}),
      "");
  EXPECT_EQ(
      Complaint({"resources.trainers=6"}),
      "parallelism: context × data = 4 × 1 = 4, but resources.trainers is 6; make them equal");
}

TEST(ValidateTest, MessagesFromTheWireAreNotTrusted) {
  v1::JobSpec spec = Job();
  spec.mutable_attention()->set_pattern(static_cast<v1::AttentionSpec::Pattern>(77));
  EXPECT_THAT(Validate(spec).message(), HasSubstr("attention.pattern: enumerator 77 is unknown"));
  spec = Job();
  spec.mutable_data()->set_train("tokens");
  EXPECT_THAT(Validate(spec).message(), HasSubstr("data.train: 'tokens' is relative"));
  EXPECT_FALSE(Validate(v1::JobSpec()).ok());
  spec = Job();
  spec.mutable_parallelism()->set_data(0);
  EXPECT_THAT(Validate(spec).message(), HasSubstr("parallelism.data: 0 is out of range"));
  spec = Job();
  spec.mutable_attention()->set_tile(0);
  EXPECT_FALSE(Validate(spec).ok());
}

// A terminal would show such a path in another order than that of its characters.
TEST(ValidateTest, PathsThatTurnTheOrderOnTheScreenAroundAreRefused) {
  const auto spec = ParseJobFile(
      kJob, {.overrides = {"checkpoint.directory=/x/ck\u202e30\u2066"}, .base_directory = "/job"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(std::string(Validate(*spec).message()),
              HasSubstr("checkpoint.directory: holds control characters: '/x/ck\\xe2"));
  EXPECT_EQ(Complaint({"checkpoint.directory=/x/\u05d0\u2026"}), "");
}

}  // namespace
}  // namespace ringleader::jobspec
