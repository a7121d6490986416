#include "base/metrics/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/process/version.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

// A connection has a thread while it is read and answered, and not for long: of those who say or
// read nothing some tens have a file, the others wait in the system, and the page is back at once.
constexpr const char* kThreads = "16";
constexpr const char* kRequestMs = "5000";
constexpr const char* kBacklog = "32";

prometheus::MetricFamily Single(std::string name, std::string help, prometheus::MetricType type,
                                double value) {
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return {.name = std::move(name), .help = std::move(help), .type = type, .metric = {metric}};
}

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

}  // namespace

// The figures that every Prometheus client library offers under the same names; prometheus-cpp
// lacks them.
class Metrics::ProcessCollector : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    int64_t total_pages = 0, resident_pages = 0;
    std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
    return {
        Single("process_cpu_seconds_total", "User and system CPU time spent.",
               prometheus::MetricType::Counter, Seconds(usage.ru_utime) + Seconds(usage.ru_stime)),
        Single("process_resident_memory_bytes", "Memory in RAM.", prometheus::MetricType::Gauge,
               static_cast<double>(resident_pages * sysconf(_SC_PAGESIZE))),
        Single("process_start_time_seconds", "Start, since the Unix epoch.",
               prometheus::MetricType::Gauge, absl::ToDoubleSeconds(start_ - absl::UnixEpoch()))};
  }

 private:
  const absl::Time start_ = absl::Now();
};

Metrics::Metrics(const std::string& component)
    : registry_(std::make_shared<prometheus::Registry>()),
      process_(std::make_shared<ProcessCollector>()) {
  prometheus::BuildGauge()
      .Name("ringleader_build_info")
      .Help("1, labelled with the running program's version.")
      .Register(*registry_)
      .Add({{"component", component}, {"version", std::string(kVersion)}})
      .Set(1);
  AddCollectable(registry_);
  AddCollectable(process_);
}

void Metrics::AddCollectable(const std::shared_ptr<prometheus::Collectable>& collectable) {
  collectables_.push_back(collectable);
}

Metrics::~Metrics() = default;

absl::Status Metrics::Listen(const Address& address, bool everybody_may_read) {
  if (!address.path.empty()) {
    return absl::InvalidArgumentError("metrics are served over TCP: give host:port");
  }
  if (!everybody_may_read && !IsLoopback(address)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s is not a loopback address, and metrics are served without TLS: give "
                        "--metrics-public if whoever can reach it may read them",
                        FormatAddress(address)));
  }
  RETURN_IF_ERROR(CheckCanListen(address));
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(
        std::vector<std::string>{"listening_ports", FormatAddress(address), "num_threads", kThreads,
                                 "request_timeout_ms", kRequestMs, "listen_backlog", kBacklog});
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrFormat("cannot serve metrics on %s (%s); choose another address",
                        FormatAddress(address), error.what()));
  }
  for (const auto& collectable : collectables_) exposer_->RegisterCollectable(collectable);
  Address served = address;
  served.port = port();
  spdlog::info("metrics are at http://{}/metrics", FormatAddress(served));
  return absl::OkStatus();
}

void Metrics::StopListening() {
  exposer_.reset();
}

int Metrics::port() const {
  return exposer_ == nullptr ? 0 : exposer_->GetListeningPorts().front();
}

}  // namespace ringleader
