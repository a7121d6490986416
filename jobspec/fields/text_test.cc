#include "jobspec/fields/text.h"

#include <gtest/gtest.h>

namespace ringleader::jobspec {
namespace {

TEST(TextTest, WhatIsTooLongIsCutBetweenCharacters) {
  EXPECT_EQ(Shortened("1234567", 7), "1234567");
  EXPECT_EQ(Shortened("12345678", 7), "1234…");
  EXPECT_EQ(Shortened("12\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9", 8), "12\xc3\xa9…");
  EXPECT_EQ(Shortened("\xe2\x80\xa6\xe2\x80\xa6", 4), "…");
}

}  // namespace
}  // namespace ringleader::jobspec
