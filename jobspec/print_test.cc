#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Job;
using testing::Same;

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

// What other readers of YAML than ours would take for a number, a truth value, a date or nothing.
TEST(PrintTest, TextThatLooksLikeSomethingElseIsQuoted) {
  for (const char* text : {"0123", "true", "010", "2026-01-01", ".inf", "0x1F", "1_000", "null",
                           "~", "yes", "on", "1e3", "12:30"}) {
    v1::JobSpec spec = Job();
    spec.set_name(text);
    spec.mutable_data()->set_train(text);
    (*spec.mutable_labels())["k"] = text;
    (*spec.mutable_labels())[text] = "v";
    for (const std::string& yaml : {ToYaml(spec), ToCompleteYaml(spec, {})}) {
      const std::string quoted = std::string("\"") + text + "\"";
      EXPECT_THAT(yaml,
                  AllOf(HasSubstr("name: " + quoted + "\n"), HasSubstr("train: " + quoted + "\n"),
                        HasSubstr("\"k\": " + quoted + "\n"), HasSubstr(quoted + ": \"v\"\n")));
      const auto back = ParseJobFile(yaml, {});
      ASSERT_TRUE(back.ok()) << back.status() << "\n" << yaml;
      EXPECT_EQ(ToYaml(*back), ToYaml(spec));
    }
  }
}

TEST(PrintTest, NumbersAndOrdinaryTextAreNotQuoted) {
  EXPECT_THAT(ToYaml(Job({"training.deterministic=true", "attention.dense_layers=[0, 5]"})),
              AllOf(HasSubstr("name: headers-16k\n"), HasSubstr("train: /job/tokens/train\n"),
                    HasSubstr("sequence_length: 16384\n"), HasSubstr("deterministic: true\n"),
                    HasSubstr("dense_layers: [0, 5]\n"), HasSubstr("learning_rate: 0.0003\n"),
                    HasSubstr("pattern: vertical_slash\n")));
}

}  // namespace
}  // namespace ringleader::jobspec
