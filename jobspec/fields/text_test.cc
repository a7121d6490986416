#include "jobspec/fields/text.h"

#include <gtest/gtest.h>

namespace ringleader::jobspec {
namespace {

TEST(TextTest, ControlsAreEscapedAndAllElseStays) {
  EXPECT_EQ(EscapeControls("a\x1b[31m\r\n\x7f\xc2\x85 b\xc3\xa9\xe2\x80\xa6", "\n"),
            "a\\x1b[31m\\x0d\n\\x7f\\x85 b\xc3\xa9\xe2\x80\xa6");
  EXPECT_EQ(EscapeControls("\xc2"), "\xc2");
  EXPECT_EQ(EscapeControls(""), "");
}

TEST(TextTest, WhatIsTooLongIsCutBetweenCharacters) {
  EXPECT_EQ(Shortened("1234567", 7), "1234567");
  EXPECT_EQ(Shortened("12345678", 7), "1234…");
  EXPECT_EQ(Shortened("12\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9", 8), "12\xc3\xa9…");
  EXPECT_EQ(Shortened("\xe2\x80\xa6\xe2\x80\xa6", 4), "…");
}

}  // namespace
}  // namespace ringleader::jobspec
