#include "base/text/controls.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_split.h"

namespace ringleader {
namespace {

TEST(ControlsTest, ControlsAreEscapedAndAllElseStays) {
  EXPECT_EQ(EscapeControls("a\x1b[31m\r\n\x7f\xc2\x85 b\xc3\xa9\xe2\x80\xa6", "\n"),
            "a\\x1b[31m\\x0d\n\\x7f\\x85 b\xc3\xa9\xe2\x80\xa6");
  EXPECT_EQ(EscapeControls("\xc2"), "\xc2");
  EXPECT_EQ(EscapeControls(""), "");
}

TEST(ControlsTest, WhatTurnsTheOrderOnTheScreenAroundIsAControl) {
  EXPECT_EQ(EscapeControls("/x/ck\u202e30\u2066"), "/x/ck\\u202e30\\u2066");
  for (const char* control : {"\u200e", "\u200f", "\u202a", "\u202b", "\u202c", "\u202d", "\u202e",
                              "\u2066", "\u2067", "\u2068", "\u2069"}) {
    EXPECT_TRUE(HasControls(std::string("a") + control)) << EscapeControls(control);
  }
  for (const char* other :
       {"\u200d", "\u2010", "\u2029", "\u202f", "\u2065", "\u206a", "\u05d0", "\xe2\x80", "\xe2"}) {
    EXPECT_FALSE(HasControls(other)) << other;
    EXPECT_EQ(EscapeControls(other), other);
  }
}

TEST(LooksLikeOtherThanTextTest, WhatSomeReaderOfYamlTakesForSomethingElseDoes) {
  for (const auto text : absl::StrSplit(
           "~ null Null NULL true False yes No ON off y N = << 0 0123 010 08 -1 +1 1_000 "
           "1,000 0x1F 0X1f 0o17 0b101 -0xff 1e3 1E-3 1. .5 -.5 1.5e+3 0.9 .inf -.Inf "
           "+.INF .nan .NaN 12:30 1:30:59.5 190:20 -12:30 1_0.5_ 2026-01-01 2026-1-1 "
           "2026-01-01T10:00:00Z",
           ' ')) {
    EXPECT_TRUE(LooksLikeOtherThanText(std::string(text))) << text;
  }
  EXPECT_TRUE(LooksLikeOtherThanText(""));
  EXPECT_TRUE(LooksLikeOtherThanText("2026-01-01 10:00:00"));
}

TEST(LooksLikeOtherThanTextTest, OrdinaryTextDoesNot) {
  for (const auto text : absl::StrSplit(
           "tiny headers-16k a auto none 1e3x 1.2.3 0x 0xfg 0b2 _1 e3 . - .. + 1e 3d 16k "
           "/x/0 127.0.0.1:7070 a:1 12-30 2026-01 nul yess inf NaN ~/ck4 jobs/0123 "
           "2026-01-01-run 2026-01-01test 20260-01-01",
           ' ')) {
    EXPECT_FALSE(LooksLikeOtherThanText(std::string(text))) << text;
  }
  EXPECT_FALSE(LooksLikeOtherThanText("1 000"));
}

}  // namespace
}  // namespace ringleader
