#include "jobspec/jobspec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "jobspec/fields/fields.h"
#include "jobspec/fields/reference.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kJob[] = R"(
name: headers-16k
model: {config: ./config.json, init: random}
data: {train: ./tokens/train, eval: ./tokens/eval, sequence_length: 16384}
attention: {pattern: vertical_slash, select: top_p, vertical_mass: 0.9, slash_mass: 0.9, dense_layers: [0]}
parallelism: {context: 4, data: 1, layout: auto, ring: auto}
training: {steps: 40, global_batch: 1, learning_rate: 3e-4, warmup_steps: 4, seed: 1}
checkpoint: {directory: ./checkpoints, every_steps: 10, keep_last: 2}
resources: {trainers: 4}
)";

absl::StatusOr<v1::JobSpec> Parse(std::string_view yaml, std::vector<std::string> overrides = {}) {
  return ParseJobFile(yaml, {.overrides = std::move(overrides), .base_directory = "/job"});
}

v1::JobSpec Job(std::vector<std::string> overrides = {}) {
  auto spec = Parse(kJob, std::move(overrides));
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : v1::JobSpec();
}

// What a user sees when the example is changed by `overrides`.
std::string Complaint(std::vector<std::string> overrides) {
  return std::string(Validate(Job(std::move(overrides))).message());
}

std::string ParseError(std::string_view yaml, std::vector<std::string> overrides = {}) {
  return std::string(Parse(yaml, std::move(overrides)).status().message());
}

bool Same(const v1::JobSpec& a, const v1::JobSpec& b) {
  return google::protobuf::util::MessageDifferencer::Equals(a, b);
}

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
  EXPECT_THAT(ParseError("name: {x: 1}"), HasSubstr("name: holds key: value pairs; give text"));
  EXPECT_THAT(ParseError(kJob, {"training.stepz=3"}),
              HasSubstr("--set training.stepz: unknown field; did you mean training.steps?"));
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
  EXPECT_THAT(ParseError("name: " + std::string(100, '[')), HasSubstr("nested"));
  EXPECT_THAT(ParseError("name: a\n---\nname: b\n"), HasSubstr("2 documents"));
  // Indentation nests without brackets.
  std::string tower;
  for (int i = 0; i < 600; ++i) tower += std::string(i, ' ') + "a:\n";
  EXPECT_FALSE(Parse(tower).ok());
  // Each line doubles the one before: 2^30 nodes, were they followed.
  std::string bomb = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 30; ++i) {
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + std::to_string(i - 1) +
            ", *a" + std::to_string(i - 1) + "]\n";
  }
  EXPECT_FALSE(Parse(bomb).ok());
  EXPECT_FALSE(Parse("attention: &a {dense_layers: [*a]}").ok());
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
       {"dense", "sliding_window", "block_topk", "xattention", "moba", "key_groups"}) {
    const v1::JobSpec spec = Job({std::string("attention.pattern=") + pattern});
    EXPECT_FALSE(spec.attention().has_vertical_mass());
    EXPECT_TRUE(Validate(spec).ok()) << Validate(spec);
  }
  EXPECT_EQ(Job({"attention.pattern=block_topk"}).attention().dense_layers_size(), 1);
  EXPECT_EQ(Job({"attention.pattern=dense"}).attention().dense_layers_size(), 0);
  EXPECT_EQ(Complaint({"attention.select=top_k"}), "");
  EXPECT_TRUE(Job({"training.steps=5"}).attention().has_vertical_mass());
}

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
  EXPECT_EQ(groups.attention().density(), 0.1);
  EXPECT_EQ(groups.attention().tile(), 64);
  EXPECT_EQ(AttentionOptionsOf(groups.attention())->pattern, patterns::Pattern::kKeyGroups);
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

TEST(DefaultsTest, EveryDefaultOfTheTableReadsBack) {
  for (const Field& field : Fields()) {
    ASSERT_NE(FindDescriptor(field.path), nullptr) << field.path;
    if (field.need != Need::kDefault) continue;
    v1::JobSpec spec;
    const absl::Status status = SetScalar(FindSlot(&spec, field.path), field, field.default_value);
    EXPECT_TRUE(status.ok()) << field.path << ": " << status;
  }
}

TEST(ParseTest, SwitchesAreTrueOrFalse) {
  EXPECT_TRUE(Job({"training.deterministic=true"}).training().deterministic());
  EXPECT_FALSE(Job({"training.deterministic=false"}).training().deterministic());
  EXPECT_THAT(ParseError(kJob, {"training.deterministic=1"}),
              AllOf(HasSubstr("training.deterministic"), HasSubstr("true or false")));
  EXPECT_THAT(ToYaml(Job({"training.deterministic=true"})), HasSubstr("deterministic: true"));
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

// A field of the message without a row in the table could not be set from a job file.
void ExpectRows(const google::protobuf::Descriptor& message, const std::string& section) {
  for (int i = 0; i < message.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *message.field(i);
    const std::string path = section + field.name();
    if (field.message_type() != nullptr && !field.is_map()) {
      ExpectRows(*field.message_type(), path + ".");
    } else {
      EXPECT_NE(FindField(path), nullptr) << path;
    }
  }
}
TEST(FieldsTest, TheTableKnowsEveryFieldOfTheMessage) {
  ExpectRows(*v1::JobSpec::descriptor(), "");
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

TEST(ValidateTest, OnlyChoicesByScoresAreBalanced) {
  EXPECT_EQ(Complaint({"attention.balance.anchor=max", "attention.pattern=xattention"}), "");
  EXPECT_THAT(
      Complaint({"attention.balance.anchor=mean", "attention.pattern=moba"}),
      HasSubstr("give none, or one of the patterns vertical_slash, block_topk, xattention"));
  EXPECT_THAT(Complaint({"attention.balance.anchor=mean", "attention.pattern=dense"}),
              HasSubstr("only fits attention.pattern other than dense"));
}

TEST(ValidateTest, RangesNameFieldValueAndLimits) {
  EXPECT_EQ(Complaint({"attention.vertical_mass=1.5"}),
            "attention.vertical_mass: 1.5 is out of range; give a number more than 0, at most 1");
  EXPECT_EQ(Complaint({"training.beta1=1"}),
            "training.beta1: 1 is out of range; give a number from 0 to less than 1");
  EXPECT_THAT(Complaint({"training.steps=0"}), HasSubstr("training.steps: required"));
  EXPECT_THAT(Complaint({"name=Big_Job"}), HasSubstr("name: 'Big_Job' is not allowed"));
  EXPECT_THAT(Complaint({"attention.tile=96"}), HasSubstr("give 64 or 128"));
  EXPECT_THAT(Complaint({"attention.dense_layers=[1,1]"}), HasSubstr("layer 1 is listed twice"));
  EXPECT_THAT(Complaint({"labels.a=b c"}), HasSubstr("labels.a: keys and values"));
  EXPECT_THAT(Complaint({"training.global_batch=3", "parallelism.data=2", "parallelism.context=2"}),
              HasSubstr("training.global_batch: 3 does not divide by parallelism.data (2)"));
  EXPECT_THAT(Complaint({"training.warmup_steps=41"}), HasSubstr("more than training.steps (40)"));
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
  EXPECT_EQ(
      Complaint({"attention.pattern=block_topk", "attention.density=0.05"}),
      "attention.density: only fits attention.pattern: vertical_slash, or attention.pattern: "
      "moba, or attention.pattern: xattention, or attention.pattern: key_groups; remove it, or "
      "change that");
  EXPECT_THAT(Complaint({"attention.pattern=xattention", "attention.stride=24"}),
              HasSubstr("attention.stride is 24; allowed are 8, 16, 32 and 64"));
  EXPECT_THAT(
      Complaint({"attention.pattern=moba", "attention.density=0.05", "attention.topk_blocks=3"}),
      HasSubstr("attention.topk_blocks: only fits attention.pattern: block_topk, or "
                "attention.pattern: moba with attention.density: 0"));
  EXPECT_EQ(Complaint({"attention.pattern=key_groups", "attention.density=1"}), "");
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
  EXPECT_THAT(Complaint({"attention.density=5"}),
              HasSubstr("attention.density: 5 is out of range"));
  EXPECT_THAT(Complaint({"parallelism.stripe=64"}), HasSubstr("parallelism.layout: striped"));
  EXPECT_EQ(Complaint({"parallelism.stripe=128", "parallelism.layout=striped"}), "");
}

TEST(ParseTest, WhatEvenedOutLayersIsNamed) {
  EXPECT_THAT(
      std::string(ParseJobFile("attention: {balance_tolerance: 0.1}", {}).status().message()),
      AllOf(HasSubstr("job file:1: attention.balance_tolerance: is not there any more"),
            HasSubstr("remove it")));
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

TEST(ValidateTest, LayoutByDocumentsWantsThemApartAndDense) {
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
  EXPECT_THAT(Complaint({"parallelism.layout=documents"}),
              HasSubstr("parallelism.layout: documents goes with attention.pattern: dense alone, "
                        "not with vertical_slash"));
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

TEST(PrintTest, GoesThereAndBack) {
  v1::JobSpec spec = Job({"labels.b=2", "labels.a=x/y", "attention.dense_layers=[0, 5]",
                          "training.learning_rate=1.2345678901234567e-05"});
  for (const bool with_defaults : {false, true}) {
    if (with_defaults) ApplyDefaults(&spec);
    const std::string yaml = ToYaml(spec);
    const auto back = ParseJobFile(yaml, {});
    ASSERT_TRUE(back.ok()) << back.status() << "\n" << yaml;
    EXPECT_TRUE(Same(spec, *back)) << yaml;
  }
}

TEST(PrintTest, ACompleteFileSaysWhatIsOpenAndIsStillTheJob) {
  v1::JobSpec spec = Job({"attention.dense_layers="});
  ApplyDefaults(&spec);
  const std::string yaml = ToCompleteYaml(
      spec, {{"parallelism.layout", "striped\n  ring: evil"}, {"training.seed", "so"}});
  EXPECT_THAT(yaml, AllOf(HasSubstr("layout: auto  # striped\\x0a  ring: evil\n"),
                          HasSubstr("\n  ring: auto\n"), HasSubstr("dense_layers: []"),
                          HasSubstr("recompute: auto\n"), HasSubstr("seed: 1  # so\n"),
                          HasSubstr("export_type: float32\n")));
  EXPECT_THAT(yaml, ::testing::Not(HasSubstr("offload"))) << "is for GPUs";
  const auto back = ParseJobFile(yaml, {});
  ASSERT_TRUE(back.ok()) << back.status() << "\n" << yaml;
  EXPECT_EQ(ToYaml(*back), ToYaml(spec));
}

class FilesTest : public ::testing::Test {
 protected:
  FilesTest()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ("jobspec_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_ / "tokens/train");
    std::filesystem::create_directories(folder_ / "tokens/eval");
    std::ofstream(folder_ / "job.yaml") << kJob;
  }
  ~FilesTest() override { std::filesystem::remove_all(folder_); }
  void Touch(const std::string& name) { std::ofstream(folder_ / name) << "{}"; }
  absl::Status Check() { return CheckFiles(*LoadJobFile((folder_ / "job.yaml").string(), {})); }

  std::filesystem::path folder_;
};

TEST_F(FilesTest, NamesWhatIsMissing) {
  EXPECT_THAT(Check().message(), HasSubstr("model.config: no file " + folder_.string()));
  Touch("config.json");
  EXPECT_THAT(Check().message(), AllOf(HasSubstr("data.train"), HasSubstr("ringctl data pack")));
  Touch("tokens/train/manifest.json");
  EXPECT_THAT(Check().message(), HasSubstr("data.eval"));
  Touch("tokens/eval/manifest.json");
  EXPECT_TRUE(Check().ok()) << Check();
  Touch("checkpoints");
  EXPECT_THAT(Check().message(), HasSubstr("is a file, not a folder"));
}

TEST_F(FilesTest, AJobFileThatIsNone) {
  EXPECT_EQ(LoadJobFile((folder_ / "none.yaml").string(), {}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(LoadJobFile(folder_.string(), {}).ok());
  EXPECT_FALSE(LoadJobFile("/dev/zero", {}).ok());
  std::ofstream(folder_ / "empty.yaml") << "";
  EXPECT_FALSE(LoadJobFile((folder_ / "empty.yaml").string(), {}).ok());
}

void ExpectUpToDate(const char* path, const std::string& expected) {
  if (std::getenv("RINGLEADER_UPDATE_DOCS") != nullptr) std::ofstream(path) << expected;
  std::stringstream page;
  page << std::ifstream(path).rdbuf();
  EXPECT_EQ(page.str(), expected)
      << "run RINGLEADER_UPDATE_DOCS=1 build/bin/jobspec_test from the repository's root";
}

TEST(ReferenceTest, ThePagesInTheRepositoryAreUpToDate) {
  ExpectUpToDate("docs/job_file.md", ReferencePage());
  ExpectUpToDate("docs/patterns.md", PatternsPage());
}

// Whatever the section: numbers that only a newer program knows are refused by field and number.
TEST(OptionsTest, EveryEnumeratorOfASpecificationIsChecked) {
  EXPECT_EQ(CheckEnumerators(Job()), absl::OkStatus());
  int checked = 0;
  for (const Field& field : Fields()) {
    v1::JobSpec spec = Job();
    const Slot slot = FindSlot(&spec, field.path);
    if (slot.descriptor->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_ENUM) continue;
    slot.message->GetReflection()->SetEnumValue(slot.message, slot.descriptor, 77);
    EXPECT_THAT(std::string(CheckEnumerators(spec).message()),
                HasSubstr(std::string(field.path) + ": enumerator 77 is unknown"));
    EXPECT_FALSE(Validate(spec).ok()) << field.path;
    ++checked;
  }
  EXPECT_GE(checked, 9);
}

TEST(ReferenceTest, TheExampleOnThePageIsValid) {
  const std::string page = ReferencePage();
  const size_t begin = page.find("```yaml\n") + 8;
  const auto spec = Parse(page.substr(begin, page.find("```", begin) - begin));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(Validate(*spec).ok()) << Validate(*spec);
}

}  // namespace
}  // namespace ringleader::jobspec
