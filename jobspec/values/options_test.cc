#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "jobspec/fields/fields.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/jobspec.h"
#include "jobspec/testing/job_file.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/pattern.h"

namespace ringleader::jobspec {
namespace {

using ::testing::HasSubstr;

// Each of the protocol's patterns is a definition of the same name and back.
TEST(OptionsTest, PatternsAreTheProtocols) {
  const google::protobuf::EnumDescriptor* type = v1::AttentionSpec::Pattern_descriptor();
  std::set<patterns::Pattern> found;
  for (int i = 0; i < type->value_count(); ++i) {
    if (type->value(i)->number() == 0) continue;
    v1::AttentionSpec spec;
    spec.set_pattern(static_cast<v1::AttentionSpec::Pattern>(type->value(i)->number()));
    const auto options = AttentionOptionsOf(spec);
    ASSERT_TRUE(options.ok()) << options.status();
    found.insert(options->pattern);
    EXPECT_EQ(patterns::DefinitionOf(options->pattern).name, EnumeratorText(type, spec.pattern()));
  }
  EXPECT_EQ(found.size(), patterns::Definitions().size());
}

TEST(OptionsTest, LayoutsAndRingsAreTheProtocols) {
  const google::protobuf::EnumDescriptor* layouts = v1::ParallelismSpec::Layout_descriptor();
  for (int i = 1; i < layouts->value_count(); ++i) {
    const auto value = static_cast<v1::ParallelismSpec::Layout>(layouts->value(i)->number());
    const auto layout = LayoutOf(value);
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(IsByDocuments(value), EnumText(value) == "documents");
    EXPECT_EQ(ring::LayoutName(*layout), IsByDocuments(value) ? "striped" : EnumText(value));
  }
  const google::protobuf::EnumDescriptor* rings = v1::ParallelismSpec::Ring_descriptor();
  for (int i = 1; i < rings->value_count(); ++i) {
    EXPECT_TRUE(RingOf(static_cast<v1::ParallelismSpec::Ring>(rings->value(i)->number())).ok());
  }
}

TEST(OptionsTest, UnknownEnumeratorsAreNamed) {
  EXPECT_THAT(std::string(LayoutOf(static_cast<v1::ParallelismSpec::Layout>(9)).status().message()),
              HasSubstr("parallelism.layout: enumerator 9 is unknown; give one of auto, contig"));
  EXPECT_THAT(std::string(RingOf(static_cast<v1::ParallelismSpec::Ring>(9)).status().message()),
              HasSubstr("parallelism.ring: enumerator 9 is unknown"));
  EXPECT_THAT(std::string(RingOf(v1::ParallelismSpec::RING_UNSPECIFIED).status().message()),
              HasSubstr("parallelism.ring: not set"));
  v1::AttentionSpec spec;
  EXPECT_THAT(std::string(AttentionOptionsOf(spec).status().message()),
              HasSubstr("attention.pattern: not set"));
  spec.set_pattern(static_cast<v1::AttentionSpec::Pattern>(77));
  EXPECT_THAT(std::string(AttentionOptionsOf(spec).status().message()),
              HasSubstr("attention.pattern: enumerator 77 is unknown"));
  EXPECT_EQ(EnumeratorText(v1::AttentionSpec::Pattern_descriptor(), 77), "77");
  spec.set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  spec.set_select(static_cast<v1::AttentionSpec::Select>(5));
  EXPECT_THAT(std::string(AttentionOptionsOf(spec).status().message()),
              HasSubstr("attention.select: 5 is unknown"));
}

// Whatever the section: numbers that only a newer program knows are refused by field and number.
TEST(OptionsTest, EveryEnumeratorOfASpecificationIsChecked) {
  EXPECT_EQ(CheckEnumerators(testing::Job()), absl::OkStatus());
  int checked = 0;
  for (const Field& field : Fields()) {
    v1::JobSpec spec = testing::Job();
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

}  // namespace
}  // namespace ringleader::jobspec
