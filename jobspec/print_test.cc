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

}  // namespace
}  // namespace ringleader::jobspec
