// /metrics: a registry per process, and the HTTP port that Prometheus reads.
//
// Names follow Prometheus' conventions: ringleader_<component>_<what>_<unit>, `_total` for
// counters. A series that speaks of something that ends (a job) must be removed with it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/net/address.h"

namespace prometheus {
class Collectable;
class Exposer;
class Registry;
}  // namespace prometheus

namespace ringleader {

// Set it up first, then it is thread-safe. The registry holds ringleader_build_info and the
// process's own figures (CPU, memory, start).
class Metrics {
 public:
  // `component`: "coordinator", "worker".
  explicit Metrics(const std::string& component);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Add families here. prometheus-cpp throws on a malformed name, which is a mistake in the
  // program.
  prometheus::Registry& registry() { return *registry_; }

  // Figures that are computed when they are asked for; `collectable` may go any time.
  void AddCollectable(const std::shared_ptr<prometheus::Collectable>& collectable);

  // Serves http://address/metrics until this object ends. ALREADY_EXISTS says that the port is in
  // use. Plain HTTP: FAILED_PRECONDITION off loopback unless `everybody_may_read`.
  absl::Status Listen(const Address& address, bool everybody_may_read);
  // No scrape is under way once this returns. Idempotent.
  void StopListening();
  // The port being served; what was asked for unless that was 0.
  int port() const;

 private:
  class ProcessCollector;

  std::shared_ptr<prometheus::Registry> registry_;
  std::shared_ptr<ProcessCollector> process_;
  std::vector<std::weak_ptr<prometheus::Collectable>> collectables_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace ringleader
