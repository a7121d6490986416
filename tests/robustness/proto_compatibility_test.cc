// The wire contract may grow but must not change: compares the descriptors of this build with those
// of the last release (proto/released/). A new release replaces that file:
// build/proto/ringleader.v1.descriptor.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ringleader::testing {
namespace {

using ::google::protobuf::DescriptorProto;
using ::google::protobuf::EnumDescriptorProto;
using ::google::protobuf::FieldDescriptorProto;
using ::google::protobuf::FileDescriptorSet;
using ::google::protobuf::MethodDescriptorProto;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Everything that has a name on the wire or in code, by full name.
struct Contract {
  std::map<std::string, DescriptorProto> messages;
  std::map<std::string, EnumDescriptorProto> enums;
  std::map<std::string, MethodDescriptorProto> methods;
};

void AddMessage(const std::string& scope, const DescriptorProto& message, Contract* contract) {
  const std::string name = absl::StrCat(scope, ".", message.name());
  contract->messages[name] = message;
  for (const auto& nested : message.nested_type()) AddMessage(name, nested, contract);
  for (const auto& type : message.enum_type())
    contract->enums[absl::StrCat(name, ".", type.name())] = type;
}

Contract ContractOf(const FileDescriptorSet& files) {
  Contract contract;
  for (const auto& file : files.file()) {
    for (const auto& message : file.message_type()) AddMessage(file.package(), message, &contract);
    for (const auto& type : file.enum_type()) {
      contract.enums[absl::StrCat(file.package(), ".", type.name())] = type;
    }
    for (const auto& service : file.service()) {
      for (const auto& method : service.method()) {
        contract.methods[absl::StrCat(file.package(), ".", service.name(), ".", method.name())] =
            method;
      }
    }
  }
  return contract;
}

bool Reserved(const DescriptorProto& message, int number) {
  for (const auto& range : message.reserved_range()) {
    if (number >= range.start() && number < range.end()) return true;
  }
  return false;
}

bool Reserved(const EnumDescriptorProto& type, int number) {
  for (const auto& range : type.reserved_range()) {
    if (number >= range.start() && number <= range.end()) return true;
  }
  return false;
}

void CompareField(const std::string& name, const FieldDescriptorProto& before,
                  const FieldDescriptorProto& now, std::vector<std::string>* breaks) {
  // Names matter too: job files and JSON use them.
  if (before.name() != now.name())
    breaks->push_back(absl::StrCat(name, ": renamed to ", now.name()));
  if (before.type() != now.type() || before.type_name() != now.type_name()) {
    breaks->push_back(absl::StrCat(name, ": another type"));
  }
  if (before.label() != now.label())
    breaks->push_back(absl::StrCat(name, ": repeated or not has changed"));
  if (before.has_oneof_index() != now.has_oneof_index() ||
      before.proto3_optional() != now.proto3_optional()) {
    breaks->push_back(absl::StrCat(name, ": presence has changed"));
  }
}

// What a program of the released contract would trip over, a line each.
std::vector<std::string> Breaks(const FileDescriptorSet& released,
                                const FileDescriptorSet& current) {
  const Contract before = ContractOf(released), now = ContractOf(current);
  std::vector<std::string> breaks;
  for (const auto& [name, message] : before.messages) {
    const auto found = now.messages.find(name);
    if (found == now.messages.end()) {
      breaks.push_back(absl::StrCat(name, ": removed"));
      continue;
    }
    for (const FieldDescriptorProto& field : message.field()) {
      const std::string field_name = absl::StrCat(name, ".", field.name());
      const auto& fields = found->second.field();
      const auto same = std::find_if(fields.begin(), fields.end(), [&](const auto& candidate) {
        return candidate.number() == field.number();
      });
      if (same != fields.end()) {
        CompareField(field_name, field, *same, &breaks);
      } else if (!Reserved(found->second, field.number())) {
        breaks.push_back(
            absl::StrCat(field_name, ": removed without reserving number ", field.number()));
      }
    }
  }
  for (const auto& [name, type] : before.enums) {
    const auto found = now.enums.find(name);
    if (found == now.enums.end()) {
      breaks.push_back(absl::StrCat(name, ": removed"));
      continue;
    }
    for (const auto& value : type.value()) {
      const auto& values = found->second.value();
      const auto same = std::find_if(values.begin(), values.end(), [&](const auto& candidate) {
        return candidate.number() == value.number();
      });
      if (same == values.end() ? !Reserved(found->second, value.number())
                               : same->name() != value.name()) {
        breaks.push_back(absl::StrCat(name, ".", value.name(), ": removed or renamed"));
      }
    }
  }
  for (const auto& [name, method] : before.methods) {
    const auto found = now.methods.find(name);
    if (found == now.methods.end()) {
      breaks.push_back(absl::StrCat(name, ": removed"));
    } else if (found->second.input_type() != method.input_type() ||
               found->second.output_type() != method.output_type() ||
               found->second.client_streaming() != method.client_streaming() ||
               found->second.server_streaming() != method.server_streaming()) {
      breaks.push_back(absl::StrCat(name, ": another signature"));
    }
  }
  return breaks;
}

FileDescriptorSet Load(const std::string& path) {
  FileDescriptorSet files;
  std::ifstream input(path, std::ios::binary);
  EXPECT_TRUE(files.ParseFromIstream(&input)) << path;
  return files;
}

// A small contract to break.
FileDescriptorSet Sample() {
  FileDescriptorSet files;
  auto* const file = files.add_file();
  file->set_package("p");
  auto* const message = file->add_message_type();
  message->set_name("M");
  auto* const field = message->add_field();
  field->set_name("f");
  field->set_number(1);
  field->set_type(FieldDescriptorProto::TYPE_INT32);
  field->set_label(FieldDescriptorProto::LABEL_OPTIONAL);
  auto* const type = message->add_enum_type();
  type->set_name("E");
  type->add_value()->set_name("ZERO");
  type->mutable_value(0)->set_number(0);
  auto* const method = file->add_service()->add_method();
  file->mutable_service(0)->set_name("S");
  method->set_name("Do");
  method->set_input_type(".p.M");
  method->set_output_type(".p.M");
  return files;
}

TEST(ProtoCompatibilityTest, TheReleasedContractHolds) {
  const FileDescriptorSet released = Load(RINGLEADER_RELEASED_DESCRIPTOR);
  ASSERT_GT(ContractOf(released).messages.size(), 50u);
  EXPECT_THAT(Breaks(released, Load(RINGLEADER_DESCRIPTOR)), IsEmpty());
}

TEST(ProtoCompatibilityTest, AdditionsAreFine) {
  FileDescriptorSet now = Sample();
  auto* const field = now.mutable_file(0)->mutable_message_type(0)->add_field();
  field->set_name("g");
  field->set_number(2);
  now.mutable_file(0)->add_message_type()->set_name("N");
  EXPECT_THAT(Breaks(Sample(), now), IsEmpty());
}

TEST(ProtoCompatibilityTest, BreaksAreFound) {
  FileDescriptorSet now = Sample();
  now.mutable_file(0)->mutable_message_type(0)->mutable_field(0)->set_number(2);
  EXPECT_THAT(Breaks(Sample(), now), ElementsAre("p.M.f: removed without reserving number 1"));
  auto* const range = now.mutable_file(0)->mutable_message_type(0)->add_reserved_range();
  range->set_start(1);
  range->set_end(2);
  EXPECT_THAT(Breaks(Sample(), now), IsEmpty());

  now = Sample();
  now.mutable_file(0)->mutable_message_type(0)->mutable_field(0)->set_type(
      FieldDescriptorProto::TYPE_STRING);
  EXPECT_THAT(Breaks(Sample(), now), ElementsAre("p.M.f: another type"));
  now = Sample();
  now.mutable_file(0)->mutable_message_type(0)->mutable_field(0)->set_name("h");
  EXPECT_THAT(Breaks(Sample(), now), ElementsAre("p.M.f: renamed to h"));
  now = Sample();
  now.mutable_file(0)->mutable_message_type(0)->mutable_enum_type(0)->mutable_value(0)->set_name(
      "NIL");
  EXPECT_THAT(Breaks(Sample(), now), ElementsAre("p.M.E.ZERO: removed or renamed"));
  now = Sample();
  now.mutable_file(0)->mutable_service(0)->mutable_method(0)->set_server_streaming(true);
  EXPECT_THAT(Breaks(Sample(), now), ElementsAre("p.S.Do: another signature"));
  now = Sample();
  now.mutable_file(0)->clear_message_type();
  EXPECT_THAT(Breaks(Sample(), now), ElementsAre("p.M: removed", "p.M.E: removed"));
}

}  // namespace
}  // namespace ringleader::testing
