#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using testing::Complaint;
using ::testing::HasSubstr;
using testing::Job;
using testing::kJob;
using testing::Parse;
using testing::ParseError;

TEST(ParseTest, ReadsTheExample) {
  const v1::JobSpec spec = Job();
  EXPECT_EQ(spec.name(), "headers-16k");
  EXPECT_EQ(spec.model().config(), "/job/config.json");
  EXPECT_EQ(spec.model().init(), "random");
  EXPECT_EQ(spec.data().train(), "/job/tokens/train");
  EXPECT_EQ(spec.data().sequence_length(), 16384);
  EXPECT_EQ(spec.attention().pattern(), v1::AttentionSpec::VERTICAL_SLASH);
  EXPECT_EQ(spec.attention().select(), v1::AttentionSpec::TOP_P);
  EXPECT_EQ(spec.attention().dense_layers_size(), 1);
  EXPECT_EQ(spec.parallelism().layout(), v1::ParallelismSpec::LAYOUT_UNSPECIFIED);
  EXPECT_DOUBLE_EQ(spec.training().learning_rate(), 3e-4);
  EXPECT_FALSE(spec.training().has_beta1());
  EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
}

TEST(ParseTest, UnknownFieldsNameThePathAndTheNearest) {
  EXPECT_EQ(ParseError("name: a\nattention:\n  vertcal_mass: 0.9\n"),
            "job file:3: attention.vertcal_mass: unknown field; did you mean "
            "attention.vertical_mass?");
  EXPECT_THAT(ParseError("steps: 40"), HasSubstr("did you mean training.steps?"));
  EXPECT_THAT(ParseError("trainning: {}"), HasSubstr("did you mean training?"));
  EXPECT_THAT(ParseError("resources: {colour: red}"),
              HasSubstr("resources.colour: unknown field; the fields are in docs/job_file.md"));
  EXPECT_THAT(ParseError("name: {x: 1}"), HasSubstr("name: holds key: value pairs; give text"));
  EXPECT_THAT(ParseError(kJob, {"training.stepz=3"}),
              HasSubstr("--set training.stepz: unknown field; did you mean training.steps?"));
  EXPECT_THAT(ParseError(kJob, {"attention.balance=3"}),
              HasSubstr("--set attention.balance: is a section; set its fields one by one, such as "
                        "attention.balance."));
  EXPECT_THAT(ParseError(kJob, {"training.steps.x=3"}),
              HasSubstr("--set training.steps.x: unknown field; did you mean training.steps?"));
}

TEST(ParseTest, WrongTypesSayWhatIsAllowed) {
  EXPECT_THAT(ParseError("training: {steps: many}"),
              HasSubstr("training.steps: 'many' is not allowed; give a whole number from 1 to"));
  EXPECT_THAT(ParseError("training: {steps: -1}"), HasSubstr("'-1' is not allowed"));
  EXPECT_THAT(ParseError("training: {learning_rate: .nan}"),
              HasSubstr("give a number more than 0"));
  EXPECT_THAT(ParseError("attention: {pattern: sparse}"),
              HasSubstr("give one of dense, sliding_window, vertical_slash, block_topk"));
  EXPECT_THAT(ParseError("parallelism: {ring: both}"),
              HasSubstr("give one of auto, flat, hierarchical, all_gather"));
  EXPECT_THAT(ParseError("attention: {dense_layers: 0}"), HasSubstr("give a list"));
  EXPECT_THAT(ParseError("attention: 3"), HasSubstr("attention: key: value pairs are expected"));
  EXPECT_THAT(ParseError("training: {steps: 1, steps: 2}"),
              HasSubstr("training.steps: given twice"));
}

TEST(ParseTest, NotYamlIsALineNumberAndNotACrash) {
  EXPECT_THAT(ParseError("name: [a\n"), HasSubstr("no valid YAML"));
  EXPECT_THAT(ParseError(""), HasSubstr("empty"));
  EXPECT_THAT(ParseError("\xff\xfe"), HasSubstr("not UTF-8"));
  EXPECT_THAT(ParseError(std::string(size_t{300} * 1024, 'a')), HasSubstr("at most 262144"));
  EXPECT_THAT(ParseError("name: a\n---\nname: b\n"), HasSubstr("2 documents"));
  // Each line doubles the one before: 2^30 nodes, were they followed.
  std::string bomb = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 30; ++i) {
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + std::to_string(i - 1) +
            ", *a" + std::to_string(i - 1) + "]\n";
  }
  EXPECT_FALSE(Parse(bomb).ok());
  EXPECT_FALSE(Parse("attention: &a {dense_layers: [*a]}").ok());
}

// Of a parser that calls itself for each level.
TEST(ParseTest, TowersAreRefusedByTheirHeight) {
  const auto times = [](const std::string& unit, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += unit;
    return text;
  };
  EXPECT_EQ(ParseError("name: a\ndata: " + times("[", 100'000)),
            "job file:2: nested too deep, beyond 499 levels; a job file has no more than sections "
            "within sections");
  for (const char* unit :
       {"[", "{", "- ", "? ", ": ", "[{", "{a: ", "? - ", "&a [", "!a [", "[? "}) {
    const int count = 200'000 / static_cast<int>(std::string(unit).size());
    EXPECT_THAT(ParseError(times(unit, count)), HasSubstr("nested too deep")) << unit;
  }
  EXPECT_THAT(ParseError(times("]", 1'000) + times("[", 100'000)), HasSubstr("no valid YAML"));
  EXPECT_THAT(ParseError(kJob, {"attention.dense_layers=" + times("[", 100'000)}),
              HasSubstr("nested too deep"));
  // Indentation nests without brackets.
  std::string tower;
  for (int i = 0; i < 600; ++i) tower += std::string(i, ' ') + "a:\n";
  EXPECT_THAT(ParseError(tower), HasSubstr("nested too deep"));
}

TEST(ParseTest, BracketsOfCommentsAndTextDoNotNest) {
  std::string file = kJob;
  for (int i = 0; i < 70; ++i) file += "# [[[ see [1 {\n";
  const auto spec = Parse(file, {"labels.a=b"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "headers-16k");
  const std::string brackets(200, '[');
  const auto quoted = Parse("labels: {a: '" + brackets + "', b: \"" + brackets + "\"}");
  ASSERT_TRUE(quoted.ok()) << quoted.status();
  EXPECT_EQ(quoted->labels().at("a"), brackets);
}

TEST(ParseTest, NoPathIsTakenForAFolderInTheHomeFolder) {
  const ParseOptions here = {.base_directory = "/job", .file_name = "job.yaml"};
  for (const char* path : {"~/ck4", "~/", "'~'"}) {
    const auto spec = ParseJobFile(std::string("checkpoint: {directory: ") + path + "}", here);
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_THAT(std::string(spec.status().message()), AllOf(HasSubstr("checkpoint.directory: '~"),
                                                            HasSubstr("write the home folder out")))
        << path;
  }
  ParseOptions overridden = here;
  overridden.overrides = {"data.train=~/tokens"};
  EXPECT_THAT(std::string(ParseJobFile("name: a", overridden).status().message()),
              HasSubstr("data.train: '~/tokens' begins with '~'"));
  const auto other = ParseJobFile("checkpoint: {directory: a/~/b}\ndata: {train: ~old}", here);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->checkpoint().directory(), "/job/a/~/b");
  EXPECT_EQ(other->data().train(), "/job/~old");
}

TEST(ParseTest, OverridesApplyInOrder) {
  const v1::JobSpec spec =
      Job({"training.steps=7", "training.steps=8", "attention.dense_layers=[1, 2]",
           "labels.team=ocean", "data.eval=", "data.train=/abs"});
  EXPECT_EQ(spec.training().steps(), 8);
  EXPECT_EQ(spec.attention().dense_layers_size(), 2);
  EXPECT_EQ(spec.labels().at("team"), "ocean");
  EXPECT_EQ(spec.data().eval(), "");
  EXPECT_EQ(spec.data().train(), "/abs");
  EXPECT_THAT(ParseError(kJob, {"training"}), HasSubstr("write path=value"));
  EXPECT_THAT(ParseError(kJob, {"attention.dense_layers=[x]"}), HasSubstr("'x' is not allowed"));
}

TEST(ParseTest, AnotherPatternDropsWhatFitTheOld) {
  for (const char* pattern :
       {"dense", "sliding_window", "block_topk", "xattention", "moba", "key_groups", "adaspa"}) {
    const v1::JobSpec spec = Job({std::string("attention.pattern=") + pattern});
    EXPECT_FALSE(spec.attention().has_vertical_mass());
    EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
  }
  EXPECT_EQ(Job({"attention.pattern=block_topk"}).attention().dense_layers_size(), 1);
  EXPECT_EQ(Job({"attention.pattern=dense"}).attention().dense_layers_size(), 0);
  EXPECT_EQ(Complaint({"attention.select=top_k"}), "");
  EXPECT_TRUE(Job({"training.steps=5"}).attention().has_vertical_mass());
}

TEST(ParseTest, SwitchesAreTrueOrFalse) {
  EXPECT_TRUE(Job({"training.deterministic=true"}).training().deterministic());
  EXPECT_FALSE(Job({"training.deterministic=false"}).training().deterministic());
  EXPECT_THAT(ParseError(kJob, {"training.deterministic=1"}),
              AllOf(HasSubstr("training.deterministic"), HasSubstr("true or false")));
  EXPECT_THAT(ToYaml(Job({"training.deterministic=true"})), HasSubstr("deterministic: true"));
}

TEST(ParseTest, SectionsMayHoldSections) {
  v1::JobSpec spec = Job({"attention.balance.anchor=mean"});
  EXPECT_EQ(spec.attention().balance().anchor(), v1::AttentionSpec::Balance::MEAN);
  const auto parsed =
      ParseJobFile("attention: {balance: {anchor: min, tolerance: 0.05}, tile: 128}", {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->attention().balance().anchor(), v1::AttentionSpec::Balance::MIN);
  EXPECT_EQ(parsed->attention().balance().tolerance(), 0.05);
  EXPECT_EQ(parsed->attention().tile(), 128u);
  ApplyDefaults(&spec);
  EXPECT_EQ(spec.attention().balance().tolerance(), 0.1);
  const auto again = ParseJobFile(ToYaml(spec), {});
  ASSERT_TRUE(again.ok()) << again.status() << ToYaml(spec);
  EXPECT_EQ(again->SerializeAsString(), spec.SerializeAsString());
  EXPECT_THAT(
      std::string(ParseJobFile("attention: {balance: {ancor: min}}", {}).status().message()),
      HasSubstr("did you mean attention.balance.anchor?"));
  EXPECT_THAT(Complaint({"attention.balance.tolerance=0.6"}), HasSubstr("from 0 to 0.5"));
}

TEST(ParseTest, WhatEvenedOutLayersIsNamed) {
  EXPECT_THAT(
      std::string(ParseJobFile("attention: {balance_tolerance: 0.1}", {}).status().message()),
      AllOf(HasSubstr("job file:1: attention.balance_tolerance: is not there any more"),
            HasSubstr("remove it")));
}

// An override drops what it makes unfit, and no mistake that the file had before.
TEST(ParseTest, OverridesHideNoMistakesOfTheFile) {
  const std::string file = R"(
name: a
model: {config: c.json, init: random}
data: {train: t, sequence_length: 1024, overlong: drop}
attention: {pattern: block_topk, topk_blocks: 3, window: 512}
training: {steps: 1, global_batch: 1, schedule: cosine, min_learning_rate: 0.00001}
checkpoint: {directory: d}
)";
  const auto spec =
      ParseJobFile(file, {.overrides = {"training.schedule=constant", "attention.pattern=dense"}});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->attention().has_topk_blocks()) << "went with the pattern";
  EXPECT_FALSE(spec->training().has_min_learning_rate()) << "went with the schedule";
  EXPECT_TRUE(spec->attention().has_window());
  EXPECT_TRUE(spec->data().has_overlong());
}

TEST(ParseTest, WhatTookThePlaceOfSequenceLengthsIsNamed) {
  const auto parsed = ParseJobFile("data: {sequence_lengths: [4096, 1024]}", {});
  EXPECT_THAT(std::string(parsed.status().message()),
              AllOf(HasSubstr("job file:1: data.sequence_lengths"),
                    HasSubstr("set data.batching: samples")));
  EXPECT_THAT(
      std::string(
          ParseJobFile("name: a", {.overrides = {"data.sequence_lengths=[1]"}}).status().message()),
      HasSubstr("set data.batching: samples"));
}

}  // namespace
}  // namespace ringleader::jobspec
