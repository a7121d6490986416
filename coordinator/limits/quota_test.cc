#include "coordinator/limits/quota.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/fake_clock.h"
#include "coordinator/limits/client_name.h"

namespace ringleader::limits {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class QuotaTest : public ::testing::Test {
 protected:
  static std::string Message(const absl::Status& status) { return std::string(status.message()); }
  // How often limit `x` was reached by one client, or by all.
  double Reached(const std::string& scope) const {
    for (const prometheus::MetricFamily& family : registry_.Collect()) {
      for (const prometheus::ClientMetric& metric : family.metric) {
        for (const auto& label : metric.label) {
          if (label.name == "scope" && label.value == scope) return metric.counter.value;
        }
      }
    }
    return 0;
  }

  const LimitName name_ = {.label = "x", .what = "cups", .flag = "--cups", .remedy = "wash some"};
  prometheus::Registry registry_;
  LimitMetrics metrics_{&registry_};
  FakeClock clock_;
};

TEST_F(QuotaTest, OneClientLeavesRoomForOthers) {
  Quota quota(name_, 2, 3, &metrics_);
  std::vector<Quota::Hold> holds;
  for (const char* client : {"a", "a", "b"}) {
    absl::StatusOr<Quota::Hold> hold = quota.Take(client);
    ASSERT_TRUE(hold.ok()) << hold.status();
    holds.push_back(*std::move(hold));
  }
  const absl::Status own = quota.Take("a").status();
  EXPECT_EQ(own.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(own), AllOf(HasSubstr("cups: a has 2 already"),
                                  HasSubstr("--cups-per-client"), HasSubstr("wash some")));
  EXPECT_THAT(Message(quota.Take("c").status()),
              HasSubstr("all clients together have 3 already, the most that the coordinator takes "
                        "(--cups)"));
  EXPECT_EQ(Reached("client"), 1);
  EXPECT_EQ(Reached("all"), 1);
  EXPECT_EQ(quota.taken(), 3);
  holds.erase(holds.begin());
  EXPECT_EQ(quota.taken(), 2);
  EXPECT_TRUE(quota.Take("a").ok());  // given back at once
  EXPECT_TRUE(quota.Take("c").ok());
}

TEST_F(QuotaTest, BytesComeBackOverTime) {
  ByteRate rate(name_, {.bytes = 100, .bytes_per_second = 10},
                {.bytes = 150, .bytes_per_second = 10}, &clock_, &metrics_);
  EXPECT_TRUE(rate.Spend("a", 60).ok());
  const absl::Status own = rate.Spend("a", 60);
  EXPECT_EQ(own.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(own), AllOf(HasSubstr("cups: these 60 bytes"), HasSubstr("--cups-per-client"),
                                  HasSubstr("wash some 2 s")));
  EXPECT_TRUE(rate.Spend("b", 90).ok());
  EXPECT_THAT(Message(rate.Spend("c", 10)), HasSubstr("all clients together"));
  clock_.Advance(absl::Seconds(2));
  EXPECT_TRUE(rate.Spend("a", 20).ok());
  EXPECT_FALSE(rate.Spend("a", 1).ok());
  clock_.Advance(absl::Seconds(1000));
  EXPECT_TRUE(rate.Spend("a", 100).ok());
  EXPECT_FALSE(rate.Spend("b", 101).ok());  // never
}

// Those are forgotten, beyond ten thousand, who have everything back; who has not is not told by
// the others that it has.
TEST_F(QuotaTest, AmongTenThousandClientsOneThatSpentEverythingIsNotForgotten) {
  constexpr int kRemembered = 10'000;
  ByteRate rate(name_, {.bytes = 100, .bytes_per_second = 10},
                {.bytes = int64_t{1} << 30, .bytes_per_second = 10}, &clock_, &metrics_);
  for (int i = 0; i < kRemembered - 1; ++i) {
    ASSERT_TRUE(rate.Spend(absl::StrCat("client-", i), 10).ok());
  }
  ASSERT_TRUE(rate.Spend("busy", 100).ok());
  EXPECT_EQ(rate.accounts(), kRemembered);
  // Nobody has anything back yet: none goes.
  ASSERT_TRUE(rate.Spend("one more", 20).ok());
  EXPECT_EQ(rate.accounts(), kRemembered + 1);
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(rate.Spend("the next", 10).ok());
  EXPECT_EQ(rate.accounts(), 3u);  // the busy one, one more, the next
  EXPECT_FALSE(rate.Spend("busy", 11).ok());
  EXPECT_TRUE(rate.Spend("busy", 10).ok());
  // Below that number nobody is looked at.
  clock_.Advance(absl::Hours(1));
  ASSERT_TRUE(rate.Spend("the last", 10).ok());
  EXPECT_EQ(rate.accounts(), 4u);
}

// Of what is held, nobody is remembered who holds nothing, so that none has to be forgotten.
TEST_F(QuotaTest, TenThousandClientsTakeNothingFromOneThatHolds) {
  Quota quota(name_, 1, 10'002, &metrics_);
  const absl::StatusOr<Quota::Hold> busy = quota.Take("busy");
  ASSERT_TRUE(busy.ok());
  std::vector<Quota::Hold> holds;
  for (int i = 0; i < 10'001; ++i) {
    absl::StatusOr<Quota::Hold> hold = quota.Take(absl::StrCat("client-", i));
    ASSERT_TRUE(hold.ok()) << hold.status();
    holds.push_back(*std::move(hold));
  }
  EXPECT_THAT(Message(quota.Take("busy").status()), HasSubstr("busy has 1 already"));
  EXPECT_THAT(Message(quota.Take("new").status()), HasSubstr("all clients together"));
  holds.clear();
  EXPECT_THAT(Message(quota.Take("busy").status()), HasSubstr("busy has 1 already"));
  EXPECT_TRUE(quota.Take("new").ok());
}

TEST(ClientTest, IsWhoCallsOrWhere) {
  const access::Caller alice = {.role = v1::USER, .name = "alice"};
  EXPECT_EQ(ClientOf(alice, "ipv4:10.0.0.7:40112"), "user alice");
  EXPECT_EQ(ClientOf(access::LocalCaller(), "ipv4:10.0.0.7:40112"), "ipv4:10.0.0.7");
  EXPECT_EQ(ClientOf(access::LocalCaller(), "ipv6:%5B::1%5D:40112"), "ipv6:::/64");
  EXPECT_EQ(ClientOf(access::LocalCaller(), "ipv6:%5B2001:db8:1:2:3:4:5:6%5D:1"),
            "ipv6:2001:db8:1:2::/64");
  EXPECT_EQ(ClientOf(access::LocalCaller(), "ipv6:[2001:db8:1:2::9]:1"), "ipv6:2001:db8:1:2::/64");
  EXPECT_EQ(ClientOf(access::LocalCaller(), "ipv6:%5B::ffff:10.0.0.7%5D:1"), "ipv4:10.0.0.7");
  EXPECT_EQ(ClientOf(access::LocalCaller(), "unix:/run/x"), "unix:");
  EXPECT_EQ(ClientOf(access::Caller{}, "ipv4:10.0.0.7:1"), "ipv4:10.0.0.7");
}

}  // namespace
}  // namespace ringleader::limits
