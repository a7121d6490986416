#include "base/metrics/certificate_metrics.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "base/files.h"
#include "base/net/certificate_names.h"

namespace ringleader {
namespace {

std::optional<Validity> Of(const std::string& path, bool first_to_end) {
  if (path.empty()) return std::nullopt;
  const auto pem = ReadRegularFile(path, kMaxPemBytes);
  if (!pem.ok()) return std::nullopt;
  const std::vector<Validity> all = ValiditiesOfPem(*pem);
  if (all.empty()) return std::nullopt;
  return first_to_end ? std::ranges::min(all, {}, &Validity::not_after)
                      : std::ranges::max(all, {}, &Validity::not_after);
}

}  // namespace

std::vector<prometheus::MetricFamily> CertificateMetrics::Collect() const {
  prometheus::MetricFamily begins{.name = "ringleader_certificate_not_before_timestamp_seconds",
                                  .help = "Since when a certificate holds.",
                                  .type = prometheus::MetricType::Gauge,
                                  .metric = {}};
  prometheus::MetricFamily ends{.name = "ringleader_certificate_not_after_timestamp_seconds",
                                .help = "When a certificate expires.",
                                .type = prometheus::MetricType::Gauge,
                                .metric = {}};
  const auto add = [](prometheus::MetricFamily* family, const char* file, absl::Time time) {
    prometheus::ClientMetric metric;
    metric.label = {{"file", file}};
    metric.gauge.value = absl::ToDoubleSeconds(time - absl::UnixEpoch());
    family->metric.push_back(std::move(metric));
  };
  for (const auto& [file, validity] :
       {std::pair("certificate", Of(tls_.cert_path, /*first_to_end=*/true)),
        std::pair("authority", Of(tls_.ca_path, /*first_to_end=*/false))}) {
    if (!validity.has_value()) continue;
    add(&begins, file, validity->not_before);
    add(&ends, file, validity->not_after);
  }
  return {std::move(begins), std::move(ends)};
}

}  // namespace ringleader
