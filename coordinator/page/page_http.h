// HTTP for the page: httplib reads requests and writes answers, and what a client may take of this
// process is bounded here: connections, time, bytes.
//
// httplib's own listener keeps every connection that waits for a thread, and lets a client take as
// long as it likes as long as it sends a byte now and then.
#pragma once

#include <httplib.h>
#include <openssl/ssl.h>

#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringleader::page {

struct HttpLimits {
  int threads = 64;              // each serves one connection until that ends
  size_t connections = 128;      // served or waiting; further ones are closed
  size_t of_one_client = 48;     // fewer than threads
  size_t request_bytes = 65536;  // all that comes until it is answered
  // TLS's handshake; and a request, from its first byte to its last.
  absl::Duration to_ask = absl::Seconds(5);
  absl::Duration to_take_the_answer = absl::Seconds(15);  // from its first byte
  absl::Duration between_requests = absl::Seconds(3);     // and before the first
};

// Handlers are set as httplib's; its functions that listen are not used.
class PageHttp : public httplib::Server {
 public:
  // `tls`: of every connection; null for plain text.
  PageHttp(const HttpLimits& limits, std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> tls);
  // Ends all connections at once. Handlers that run are waited for.
  ~PageHttp() override;

  // Serves a connection, which does not block, and closes it.
  void Take(int connection) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Work();
  void Serve(int connection);

  const HttpLimits limits_;
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> tls_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<int> open_ ABSL_GUARDED_BY(mutex_);  // closed under the mutex, too
  std::deque<int> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace ringleader::page
