#include "coordinator/lifecycle/reports/warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Reason = Warnings::Reason;

class WarningsTest : public ::testing::Test {
 protected:
  void Add(const std::string& text, int times = 1, const std::string& node = "nodes/a",
           Reason reason = Reason::kStray) {
    for (int i = 0; i < times; ++i) {
      warnings_.Add(node, reason, [&] {
        ++asked_;
        return text;
      });
    }
  }

  const absl::Time noon_ = absl::UnixEpoch() + absl::Hours(12);
  int asked_ = 0;
  Warnings warnings_;
};

TEST_F(WarningsTest, OfManyTheFirstIsToldAndHowManyFollowed) {
  Add("first");
  Add("other", 49'999);
  EXPECT_EQ(asked_, 1);
  EXPECT_THAT(warnings_.Take(noon_), ElementsAre("first (and 49999 more like it)"));
  EXPECT_THAT(warnings_.Take(noon_ + absl::Seconds(5)), IsEmpty());
}

TEST_F(WarningsTest, ThereIsALineASecond) {
  Add("one");
  EXPECT_THAT(warnings_.Take(noon_), ElementsAre("one"));
  Add("two");
  EXPECT_THAT(warnings_.Take(noon_ + absl::Milliseconds(999)), IsEmpty());
  Add("three");
  EXPECT_THAT(warnings_.Take(noon_ + absl::Seconds(1)), ElementsAre("two (and 1 more like it)"));
}

TEST_F(WarningsTest, EachNodeAndReasonHasItsOwn) {
  Add("a");
  Add("b", 1, "nodes/b");
  Add("c", 1, "nodes/a", Reason::kNotItsOwn);
  EXPECT_THAT(warnings_.Take(noon_), ::testing::UnorderedElementsAre("a", "b", "c"));
}

TEST_F(WarningsTest, ALineIsShort) {
  Add(std::string(1 << 20, 'x'));
  const std::vector<std::string> lines = warnings_.Take(noon_);
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0].size(), 4096u);
}

}  // namespace
}  // namespace ringleader::lifecycle
