// Where traces go, and how often a step is part of one: the flags.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/tls.h"

namespace CLI {
class App;
}

namespace ringleader::trace {

struct TraceOptions {
  // "http://HOST:PORT" or "https://HOST:PORT" of a collector that speaks OTLP over gRPC.
  std::string endpoint = "off";
  // For https. Of the coordinator only where the collector asks for certificates.
  TlsOptions tls = {};
  absl::Duration step_interval = absl::Minutes(1);

  bool enabled() const { return !endpoint.empty() && endpoint != "off"; }
};

// --trace-endpoint, which OTEL_EXPORTER_OTLP_ENDPOINT gives, too; --trace-tls-…;
// --trace-step-seconds. `options` must outlive the parse.
void AddTraceFlags(CLI::App& app, TraceOptions* options);

struct Collector {
  std::string address;  // host:port
  TlsOptions tls;
};

// INVALID_ARGUMENT names the flag, and what it should be.
absl::StatusOr<Collector> CollectorOf(const TraceOptions& options);

}  // namespace ringleader::trace
