#include "coordinator/api/calls/rpc_metrics.h"

namespace ringleader::api {
namespace {

const char* CodeName(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const size_t index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
}

// The range is that from a read that hits the cache to a commit that waits for a slow disk.
const prometheus::Histogram::BucketBoundaries kSeconds = {
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10};

}  // namespace

RpcMetrics::RpcMetrics(prometheus::Registry* registry)
    : requests_(prometheus::BuildCounter()
                    .Name("ringleader_coordinator_rpc_requests_total")
                    .Help("Calls that ended, by gRPC status code.")
                    .Register(*registry)),
      durations_(prometheus::BuildHistogram()
                     .Name("ringleader_coordinator_rpc_duration_seconds")
                     .Help("From a unary call's arrival to its reply.")
                     .Register(*registry)),
      streams_(prometheus::BuildGauge()
                   .Name("ringleader_coordinator_rpc_streams")
                   .Help("Streams that are open.")
                   .Register(*registry)) {}

void RpcMetrics::UnaryDone(const std::string& service, const std::string& method,
                           grpc::StatusCode code, absl::Duration duration) {
  requests_.Add({{"service", service}, {"method", method}, {"code", CodeName(code)}}).Increment();
  durations_.Add({{"service", service}, {"method", method}}, kSeconds)
      .Observe(absl::ToDoubleSeconds(duration));
}

void RpcMetrics::StreamOpened(const std::string& service, const std::string& method) {
  streams_.Add({{"service", service}, {"method", method}}).Increment();
}

void RpcMetrics::StreamDone(const std::string& service, const std::string& method,
                            grpc::StatusCode code) {
  requests_.Add({{"service", service}, {"method", method}, {"code", CodeName(code)}}).Increment();
  streams_.Add({{"service", service}, {"method", method}}).Decrement();
}

}  // namespace ringleader::api
