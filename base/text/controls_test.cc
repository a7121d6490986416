#include "base/text/controls.h"

#include <gtest/gtest.h>

namespace ringleader {
namespace {

TEST(ControlsTest, ControlsAreEscapedAndAllElseStays) {
  EXPECT_EQ(EscapeControls("a\x1b[31m\r\n\x7f\xc2\x85 b\xc3\xa9\xe2\x80\xa6", "\n"),
            "a\\x1b[31m\\x0d\n\\x7f\\x85 b\xc3\xa9\xe2\x80\xa6");
  EXPECT_EQ(EscapeControls("\xc2"), "\xc2");
  EXPECT_EQ(EscapeControls(""), "");
}

}  // namespace
}  // namespace ringleader
