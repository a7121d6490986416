// How long the certificates of a process hold, on /metrics.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <vector>

#include "base/net/tls.h"

namespace ringleader {

// ringleader_certificate_not_before_ and _not_after_timestamp_seconds, as the files are when they
// are asked for: of --tls-cert the certificate of its chain that ends first, of --tls-ca the
// authority that ends last. Nothing of a file that is not named or cannot be read.
class CertificateMetrics : public prometheus::Collectable {
 public:
  explicit CertificateMetrics(const TlsOptions& tls) : tls_(tls) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const TlsOptions tls_;
};

}  // namespace ringleader
