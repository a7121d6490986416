#include "coordinator/page/page_http.h"

#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/boot_clock.h"

namespace ringleader::page {
namespace {

// One connection. Reads and writes of a request together end by a deadline.
class Connection : public httplib::Stream {
 public:
  Connection(int fd, SSL* ssl, const HttpLimits& limits) : fd_(fd), ssl_(ssl), limits_(limits) {}

  bool ShakeHands() {
    deadline_ = BootNow() + limits_.to_ask;
    int done = 0;
    while (ERR_clear_error(), (done = SSL_accept(ssl_)) != 1) {
      if (!AwaitTls(done)) return false;
    }
    return true;
  }
  // Waits for the first byte of a request, which then has its whole time.
  bool AwaitRequest() {
    if (begin_ == end_) {
      deadline_ = BootNow() + limits_.between_requests;
      request_bytes_ = 0;
      if (!Fill()) return false;
    }
    request_bytes_ = end_ - begin_;
    deadline_ = BootNow() + limits_.to_ask;
    answering_ = false;
    return true;
  }

  ssize_t read(char* ptr, size_t size) override {
    if (begin_ == end_ && !Fill()) {
      broken_ = true;
      return -1;
    }
    const size_t count = std::min(size, end_ - begin_);
    std::memcpy(ptr, buffer_.data() + begin_, count);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* ptr, size_t size) override {
    if (!std::exchange(answering_, true)) deadline_ = BootNow() + limits_.to_take_the_answer;
    if (size == 0) return 0;
    while (!broken_) {
      ERR_clear_error();
      const ssize_t count = ssl_ != nullptr ? SSL_write(ssl_, ptr, static_cast<int>(size))
                                            : send(fd_, ptr, size, MSG_NOSIGNAL);
      if (count > 0) return count;
      broken_ = !AwaitMore(static_cast<int>(count), POLLOUT);
    }
    return -1;
  }
  // Something did not come or go in time: nothing more is read, and no answer written.
  bool broken() const { return broken_; }
  bool is_readable() const override { return begin_ < end_ || Await(POLLIN); }
  bool is_writable() const override { return Await(POLLOUT); }
  // Nobody asks who it is: who shows what is known by certificate or token.
  void get_remote_ip_and_port(std::string& ip, int& port) const override {
    ip.clear();
    port = 0;
  }
  void get_local_ip_and_port(std::string& ip, int& port) const override {
    get_remote_ip_and_port(ip, port);
  }
  socket_t socket() const override { return fd_; }

 private:
  bool Fill() {
    while (request_bytes_ < limits_.request_bytes) {
      ERR_clear_error();
      const ssize_t count = ssl_ != nullptr
                                ? SSL_read(ssl_, buffer_.data(), static_cast<int>(buffer_.size()))
                                : recv(fd_, buffer_.data(), buffer_.size(), 0);
      if (count > 0) {
        begin_ = 0;
        end_ = static_cast<size_t>(count);
        request_bytes_ += end_;
        return BootNow() < deadline_;
      }
      if (!AwaitMore(static_cast<int>(count), POLLIN)) return false;
    }
    return false;
  }
  // After a read or write that moved nothing: whether it may be tried again.
  bool AwaitMore(int result, short events) {
    if (ssl_ != nullptr) return AwaitTls(result);
    return result < 0 && (errno == EAGAIN || errno == EINTR) && Await(events);
  }
  bool AwaitTls(int result) {
    const int error = SSL_get_error(ssl_, result);
    if (error == SSL_ERROR_WANT_READ) return Await(POLLIN);
    return error == SSL_ERROR_WANT_WRITE && Await(POLLOUT);
  }
  bool Await(short events) const {
    pollfd wait = {.fd = fd_, .events = events, .revents = 0};
    while (true) {
      const absl::Duration left = deadline_ - BootNow();
      if (left <= absl::ZeroDuration()) return false;
      const int ready = poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
  }

  const int fd_;
  SSL* const ssl_;
  const HttpLimits& limits_;
  absl::Time deadline_;
  bool answering_ = false, broken_ = false;
  size_t request_bytes_ = 0;
  std::array<char, 4096> buffer_;
  size_t begin_ = 0, end_ = 0;  // what was read and not asked for yet
};

}  // namespace

PageHttp::PageHttp(const HttpLimits& limits, std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> tls)
    : limits_(limits), tls_(std::move(tls)) {
  // What TLS says by itself, new keys, does not keep a read from looking at the time.
  if (tls_ != nullptr) SSL_CTX_clear_mode(tls_.get(), SSL_MODE_AUTO_RETRY);
  for (int i = 0; i < limits_.threads; ++i) threads_.emplace_back([this] { Work(); });
}

PageHttp::~PageHttp() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (const int connection : open_) shutdown(connection, SHUT_RDWR);
  }
  for (std::thread& thread : threads_) thread.join();
  for (const int connection : waiting_) close(connection);
}

void PageHttp::Take(int connection) {
  absl::MutexLock lock(&mutex_);
  if (stopping_ || open_.size() >= limits_.connections) {
    close(connection);
    return;
  }
  open_.insert(connection);
  waiting_.push_back(connection);
}

void PageHttp::Work() {
  while (true) {
    int connection = -1;
    {
      absl::MutexLock lock(&mutex_);
      const auto something = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !waiting_.empty();
      };
      mutex_.Await(absl::Condition(&something));
      if (stopping_) return;
      connection = waiting_.front();
      waiting_.pop_front();
    }
    Serve(connection);
    absl::MutexLock lock(&mutex_);
    open_.erase(connection);
    close(connection);
  }
}

void PageHttp::Serve(int fd) {
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl(
      tls_ != nullptr ? SSL_new(tls_.get()) : nullptr, &SSL_free);
  if (tls_ != nullptr && (ssl == nullptr || SSL_set_fd(ssl.get(), fd) != 1)) return;
  Connection connection(fd, ssl.get(), limits_);
  if (ssl != nullptr && !connection.ShakeHands()) return;
  bool open = true;
  for (size_t left = keep_alive_max_count_; open && left > 0 && connection.AwaitRequest(); --left) {
    bool closed = false;
    open = process_request(connection, /*close_connection=*/left == 1, closed,
                           [&](httplib::Request& request) { request.ssl = ssl.get(); }) &&
           !closed && !connection.broken();
  }
  if (ssl != nullptr) SSL_shutdown(ssl.get());
}

}  // namespace ringleader::page
