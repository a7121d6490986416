#include "base/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/boot_clock.h"
#include "base/files.h"
#include "base/metrics/certificate_metrics.h"
#include "base/net/address.h"
#include "base/testing/metrics_page.h"
#include "base/testing/taken_port.h"
#include "base/testing/test_certificates.h"

namespace ringleader {
namespace {

using ::testing::HasSubstr;

TEST(MetricsTest, SaysThatThePortIsInUseAndRefusesToBeSeen) {
  const TakenPort taken;
  Metrics metrics("test");
  EXPECT_EQ(metrics.Listen({.host = "127.0.0.1", .port = taken.port(), .path = ""}, false).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(metrics.Listen(ParseAddress("0.0.0.0:0").value(), false).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(metrics.Listen(ParseAddress("127.0.0.1:0").value(), false).ok());
  ASSERT_GT(metrics.port(), 0);
  const std::string page = MetricsPage(absl::StrCat("127.0.0.1:", metrics.port()));
  EXPECT_THAT(page, HasSubstr("ringleader_build_info{component=\"test\""));
  EXPECT_THAT(page, HasSubstr("process_resident_memory_bytes"));
}

// Of those who connect and say nothing each has a thread for a while. With two threads and half a
// minute for each the page was gone for as long as some tens of them came back.
TEST(MetricsTest, WhoSaysNothingKeepsThePageFromNobodyForLong) {
  Metrics metrics("test");
  ASSERT_TRUE(metrics.Listen(ParseAddress("127.0.0.1:0").value(), false).ok());
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(metrics.port()));
  std::vector<int> silent;
  const absl::Cleanup close_all = [&] {
    for (const int fd : silent) close(fd);
  };
  for (int i = 0; i < 20; ++i) {
    silent.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(silent.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  const absl::Time before = BootNow();
  EXPECT_THAT(MetricsPage(absl::StrCat("127.0.0.1:", metrics.port())),
              HasSubstr("ringleader_build_info"));
  EXPECT_LT(BootNow() - before, absl::Minutes(1));
}

// Of a chain what ends first counts, of authorities what ends last: until then somebody gets in.
TEST(CertificateMetricsTest, SaysHowLongTheFilesHold) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  ASSERT_TRUE(certificates.Sign("ca", "short", {.days = 1}));
  ASSERT_TRUE(certificates.Sign("ca", "long", {.days = 30}));
  const auto both = [&](const char* name) {
    std::ofstream(certificates.File(name))
        << *ReadFile(certificates.File("long.crt")) << *ReadFile(certificates.File("short.crt"));
    return certificates.File(name);
  };
  const auto days = [](const std::string& certificate, const std::string& authority) {
    TlsOptions tls;
    tls.cert_path = certificate;
    tls.ca_path = authority;
    std::map<std::string, double> left;  // by file
    const auto families = CertificateMetrics(tls).Collect();
    EXPECT_EQ(families.size(), 2u);
    for (size_t i = 0; i < families[1].metric.size(); ++i) {
      const double begins = families[0].metric[i].gauge.value;
      EXPECT_NEAR(begins, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()), 300);
      left[families[1].metric[i].label[0].value] =
          std::round((families[1].metric[i].gauge.value - begins) / 86400);
    }
    return left;
  };
  using Days = std::map<std::string, double>;
  EXPECT_EQ(days("", ""), Days());
  EXPECT_EQ(days(both("chain"), both("authorities")),
            (Days{{"certificate", 1}, {"authority", 30}}));
  EXPECT_EQ(days(certificates.File("long.crt"), "/dev/zero"), (Days{{"certificate", 30}}));
  EXPECT_EQ(days(certificates.File("long.key"), certificates.File("short.crt")),
            (Days{{"authority", 1}}));
}

}  // namespace
}  // namespace ringleader
