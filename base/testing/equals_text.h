// EXPECT_THAT(message, EqualsText("job: 'j' attempt: 1")): every field of it, in protobuf's text
// format.
#pragma once

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>

#include <type_traits>

namespace ringleader {

MATCHER_P(EqualsText, text, "") {
  std::decay_t<arg_type> expected;
  if (!google::protobuf::TextFormat::ParseFromString(text, &expected)) {
    *result_listener << "which is compared with a text that is none of its type";
    return false;
  }
  *result_listener << "which is " << arg.ShortDebugString();
  return arg.DebugString() == expected.DebugString();
}

}  // namespace ringleader
