#include "coordinator/trace/trace_options.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/net/address.h"
#include "base/numbers/finite_number.h"

namespace ringleader::trace {

void AddTraceFlags(CLI::App& app, TraceOptions* options) {
  app.add_option(
         "--trace-endpoint", options->endpoint,
         "http://HOST:PORT or https://HOST:PORT of an OpenTelemetry collector (OTLP over "
         "gRPC) that gets a trace of each attempt (docs/observability.md); \"off\" for none")
      ->envname("OTEL_EXPORTER_OTLP_ENDPOINT")
      ->capture_default_str()
      ->group("Traces");
  app.add_option("--trace-tls-ca", options->tls.ca_path,
                 "PEM file: authorities that an https collector's certificate must come from")
      ->envname("OTEL_EXPORTER_OTLP_CERTIFICATE")
      ->group("Traces");
  app.add_option("--trace-tls-cert", options->tls.cert_path,
                 "PEM file: certificate chain for a collector that asks for one")
      ->envname("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE")
      ->group("Traces");
  app.add_option("--trace-tls-key", options->tls.key_path, "PEM file: its private key")
      ->envname("OTEL_EXPORTER_OTLP_CLIENT_KEY")
      ->group("Traces");
  app.add_option_function<double>(
         "--trace-step-seconds",
         [options](const double& seconds) { options->step_interval = absl::Seconds(seconds); },
         "at most one training step of an attempt in so many seconds is part of its trace")
      ->check(FiniteNumber())
      ->check(CLI::Range(0.0, 86'400.0))
      ->type_name("SECONDS")
      ->default_str(absl::StrFormat("%g", absl::ToDoubleSeconds(options->step_interval)))
      ->group("Traces");
}

absl::StatusOr<Collector> CollectorOf(const TraceOptions& options) {
  absl::string_view text = options.endpoint;
  const bool encrypted = absl::ConsumePrefix(&text, "https://");
  const bool plain = !encrypted && absl::ConsumePrefix(&text, "http://");
  absl::ConsumeSuffix(&text, "/");
  const absl::StatusOr<Address> address = ParseAddress(std::string(text));
  if (!(encrypted || plain) || !address.ok() || address->host.empty() || address->port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--trace-endpoint: ", options.endpoint,
                     " is not http://HOST:PORT or https://HOST:PORT; a collector's port for OTLP "
                     "over gRPC is usually 4317"));
  }
  Collector collector = {.address = std::string(text), .tls = options.tls};
  if (plain) {
    const TlsOptions& tls = options.tls;
    if (!tls.cert_path.empty() || !tls.key_path.empty() || !tls.ca_path.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--trace-tls-…: ", options.endpoint,
                       " is plain text; write https://, or leave them out"));
    }
    collector.tls.insecure = true;
    return collector;
  }
  if (options.tls.ca_path.empty()) {
    return absl::InvalidArgumentError(
        "--trace-tls-ca is missing: https needs the authority of the collector's certificate, e.g. "
        "/etc/ssl/certs/ca-certificates.crt");
  }
  collector.tls.authority_alone = true;
  return collector;
}

}  // namespace ringleader::trace
