// A TCP proxy that can play a broken network: connections stay open and nothing gets through.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringleader::faults {

// Thread-safe.
class TcpProxy {
 public:
  // Forwards what comes in on `port` (0: any that is free) to 127.0.0.1:target_port. What
  // is sent takes `delay` each way, and a connection twice that to come about.
  explicit TcpProxy(int target_port, int port = 0, absl::Duration delay = absl::ZeroDuration());
  ~TcpProxy();

  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // Connections so far.
  int connections() const { return connections_; }

  // Nothing gets through, in either direction, and nobody is told.
  void Cut();
  // The network is back: what was held up arrives.
  void Heal();

 private:
  void Accept();
  void Forward(int from, int to);
  bool WaitForDelay(absl::Duration delay);  // false when the proxy ends
  bool WaitWhileCut();                      // false when the proxy ends

  const int target_port_;
  const absl::Duration delay_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int> connections_ = 0;
  absl::Mutex mutex_;
  bool cut_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<int> sockets_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
  std::thread acceptor_;
};

}  // namespace ringleader::faults
