#include "tests/faults/tcp_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "tests/support/program.h"

namespace ringleader::faults {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

}  // namespace

TcpProxy::TcpProxy(int target_port, int port, absl::Duration delay)
    : target_port_(target_port), delay_(delay) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int reuse = 1;
  setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_in address = Loopback(port == 0 ? testing::FreePort() : port);
  socklen_t size = sizeof(address);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      listen(listener_, 128) == 0 &&
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    port_ = ntohs(address.sin_port);
  }
  acceptor_ = std::thread([this] { Accept(); });
}

TcpProxy::~TcpProxy() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    shutdown(listener_, SHUT_RDWR);
    for (const int fd : sockets_) shutdown(fd, SHUT_RDWR);
  }
  acceptor_.join();
  {
    absl::MutexLock lock(&mutex_);
    threads = std::move(threads_);
  }
  for (std::thread& thread : threads) thread.join();
  absl::MutexLock lock(&mutex_);
  for (const int fd : sockets_) close(fd);
  close(listener_);
}

void TcpProxy::Cut() {
  absl::MutexLock lock(&mutex_);
  cut_ = true;
}

void TcpProxy::Heal() {
  absl::MutexLock lock(&mutex_);
  cut_ = false;
}

bool TcpProxy::WaitWhileCut() {
  absl::MutexLock lock(&mutex_);
  const auto open = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !cut_ || stopping_; };
  mutex_.Await(absl::Condition(&open));
  return !stopping_;
}

bool TcpProxy::WaitForDelay(absl::Duration delay) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&stopping_), delay);
  return !stopping_;
}

void TcpProxy::Accept() {
  while (true) {
    const int client = accept(listener_, nullptr, nullptr);
    if (client < 0) return;
    ++connections_;
    if (!WaitWhileCut()) {
      close(client);
      return;
    }
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = Loopback(target_port_);
    if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      close(client);
      close(server);
      continue;
    }
    absl::MutexLock lock(&mutex_);
    if (stopping_) {
      close(client);
      close(server);
      return;
    }
    sockets_.insert(sockets_.end(), {client, server});
    threads_.emplace_back([this, client, server] {
      if (WaitForDelay(2 * delay_)) Forward(client, server);
    });
    threads_.emplace_back([this, client, server] { Forward(server, client); });
  }
}

void TcpProxy::Forward(int from, int to) {
  char buffer[1 << 14];
  while (true) {
    const ssize_t count = recv(from, buffer, sizeof(buffer), 0);
    // Also the news that a side has hung up does not get through.
    if (!WaitForDelay(delay_) || !WaitWhileCut() || count <= 0) break;
    for (ssize_t sent = 0; sent < count;) {
      const ssize_t now = send(to, buffer + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
      if (now <= 0) break;
      sent += now;
    }
  }
  shutdown(from, SHUT_RDWR);
  shutdown(to, SHUT_RDWR);
}

}  // namespace ringleader::faults
