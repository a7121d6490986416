// What /metrics says of the RPCs: calls by outcome, how long they took, and how many streams are
// open.
#pragma once

#include <grpcpp/support/status.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <string>

#include "absl/time/time.h"

namespace ringleader::api {

// Thread-safe. Series appear with a method's first call; their number is bounded by methods ×
// codes.
class RpcMetrics {
 public:
  explicit RpcMetrics(prometheus::Registry* registry);

  void UnaryDone(const std::string& service, const std::string& method, grpc::StatusCode code,
                 absl::Duration duration);
  void StreamOpened(const std::string& service, const std::string& method);
  void StreamDone(const std::string& service, const std::string& method, grpc::StatusCode code);

 private:
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Histogram>& durations_;
  prometheus::Family<prometheus::Gauge>& streams_;
};

}  // namespace ringleader::api
