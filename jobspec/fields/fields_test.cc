#include "jobspec/fields/fields.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "jobspec/fields/reference.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"

namespace ringleader::jobspec {
namespace {

using testing::Parse;

TEST(DefaultsTest, EveryDefaultOfTheTableReadsBack) {
  for (const Field& field : Fields()) {
    ASSERT_NE(FindDescriptor(field.path), nullptr) << field.path;
    if (field.need != Need::kDefault) continue;
    v1::JobSpec spec;
    const absl::Status status = SetScalar(FindSlot(&spec, field.path), field, field.default_value);
    EXPECT_TRUE(status.ok()) << field.path << ": " << status;
  }
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

TEST(ReferenceTest, TheExampleOnThePageIsValid) {
  const std::string page = ReferencePage();
  const size_t begin = page.find("```yaml\n") + 8;
  const auto spec = Parse(page.substr(begin, page.find("```", begin) - begin));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(Validate(*spec).ok()) << Validate(*spec);
}

}  // namespace
}  // namespace ringleader::jobspec
