#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "jobspec/fields/reference.h"
#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"

namespace ringleader::jobspec {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
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

// A job that is stored, or a file that was printed, says every default; an override of what decides
// which of them fit goes with the others all the same.
TEST(PrintTest, WhatWasPrintedTakesOverridesThatOtherFieldsGoBy) {
  for (const char* pattern : {"vertical_slash", "key_groups", "dense", "moba"}) {
    v1::JobSpec spec = Job({absl::StrCat("attention.pattern=", pattern), "resources.engine=cuda",
                            "attention.select=", "attention.vertical_mass=",
                            "attention.slash_mass=", "attention.dense_layers="});
    ApplyDefaults(&spec);
    for (const std::string override :
         {"parallelism.ring=hierarchical", "parallelism.ring=flat", "parallelism.ring=all_gather",
          "parallelism.heads=2", "attention.pattern=adaspa", "attention.pattern=fixed_blocks",
          "resources.engine=cpu", "training.precision=fp8", "training.schedule=constant",
          "data.batching=samples", "checkpoint.every_steps=0"}) {
      for (const std::string& yaml : {ToYaml(spec), ToCompleteYaml(spec, {})}) {
        auto changed = ParseJobFile(yaml, {.overrides = {override}});
        ASSERT_TRUE(changed.ok()) << changed.status();
        ApplyDefaults(&*changed);
        EXPECT_TRUE(Validate(*changed).ok())
            << pattern << ", " << override << ": " << Validate(*changed);
        if (override == "attention.pattern=adaspa") {
          EXPECT_EQ(changed->attention().density(), 0.2) << pattern;
        }
      }
    }
  }
}

TEST(PrintTest, TheSummarySaysOneDefaultWherePatternsAgree) {
  const std::string summary = ReferenceSummary();
  EXPECT_THAT(summary, AllOf(ContainsRegex("attention.density +by pattern\n"),
                             ContainsRegex("attention.block_size +by pattern\n"),
                             ContainsRegex("attention.local_blocks +by pattern\n"),
                             ContainsRegex("attention.sink_tokens +64\n"),
                             ContainsRegex("data.train +required\n")));
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
