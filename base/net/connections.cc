#include "base/net/connections.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

// Connections in all where the process may open more files than that: 20 KB each, 60 with TLS.
constexpr int kMostConnections = 16'384;
// Of the files that the process may open, a part is for the database, its log and backups.
constexpr int kPartKept = 8;
// Until it is tried again to take in a connection for which there was no file or memory.
constexpr int kPauseMs = 100;

bool IsWildcard(const sockaddr* address) {
  if (address->sa_family == AF_UNIX) return false;
  if (address->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr) != 0;
}

void SetPort(sockaddr* address, int port) {
  if (address->sa_family == AF_UNIX) return;
  auto& field = address->sa_family == AF_INET ? reinterpret_cast<sockaddr_in*>(address)->sin_port
                                              : reinterpret_cast<sockaddr_in6*>(address)->sin6_port;
  field = htons(static_cast<uint16_t>(port));
}

int PortOf(int listener) {
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  getsockname(listener, reinterpret_cast<sockaddr*>(&own), &size);
  if (own.ss_family == AF_UNIX) return 0;
  return ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(own).sin_port
                                        : reinterpret_cast<sockaddr_in6&>(own).sin6_port);
}

// A socket that listens, or -1 and errno.
int ListenOn(const sockaddr* address, socklen_t size) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  if (address->sa_family != AF_UNIX) {
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // connections inherit it
  }
  if (address->sa_family == AF_INET6 && IsWildcard(address)) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (bind(fd, address, size) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

// The peer's address; of IPv6 the network, in which one machine has as many as it likes. Of a
// Unix socket the user.
std::string ClientOf(int connection, const sockaddr_storage& peer) {
  if (peer.ss_family != AF_INET && peer.ss_family != AF_INET6) {
    ucred user = {};
    socklen_t size = sizeof(user);
    getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &user, &size);
    return absl::StrCat("user ", user.uid);
  }
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    return std::string(reinterpret_cast<const char*>(&v4.sin_addr), sizeof(v4.sin_addr));
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
  const char* const bytes = reinterpret_cast<const char*>(&v6);
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return std::string(bytes + 12, 4);
  return std::string(bytes, 8);
}

// 0: it is no open socket.
uint64_t SocketNumber(int fd) {
  struct stat found {};
  return fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) ? found.st_ino : 0;
}

}  // namespace

Connections::Bounds Connections::OfThisProcess() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto files =
      static_cast<int>(std::min<rlim_t>(limit.rlim_cur, rlim_t{2} * kMostConnections));
  const int most = std::min(kMostConnections, files - files / kPartKept);
  return {.files = most, .per_client = static_cast<size_t>(most / 2)};
}

absl::StatusOr<std::unique_ptr<Connections>> Connections::Open(const Address& address,
                                                               const Bounds& bounds) {
  std::unique_ptr<Connections> connections(new Connections(bounds));
  if (address.path.empty()) {
    RETURN_IF_ERROR(connections->Listen(address));
  } else {
    RETURN_IF_ERROR(connections->ListenAt(address.path));
  }
  if (pipe2(connections->stop_, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  return connections;
}

bool Connections::Add(const sockaddr* own, socklen_t size) {
  const int listener = ListenOn(own, size);
  if (listener < 0) return false;
  listeners_.push_back(listener);
  port_ = PortOf(listener);
  return true;
}

absl::Status Connections::ListenAt(const std::string& path) {
  sockaddr_un own = {};
  own.sun_family = AF_UNIX;
  if (path.size() >= sizeof(own.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot listen on unix:%s: a socket's path has at most %d bytes", path,
                        sizeof(own.sun_path) - 1));
  }
  path.copy(own.sun_path, path.size());
  // One that a process left behind which was killed.
  if (struct stat found{}; lstat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) {
    unlink(path.c_str());
  }
  if (!Add(reinterpret_cast<const sockaddr*>(&own), sizeof(own))) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot listen on unix:%s: %s", path, std::strerror(errno)));
  }
  path_ = path;
  return absl::OkStatus();
}

absl::Status Connections::Listen(const Address& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
      error != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot listen on %s: %s; use an address of this machine",
                        FormatAddress(address), gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  int error = 0;
  const auto add = [&](sockaddr* own, socklen_t size) {
    if (port_ != 0) SetPort(own, port_);
    if (Add(own, size)) return true;
    error = errno;
    return false;
  };
  // Whoever says 0.0.0.0 means every address, of IPv6, too.
  sockaddr_in6 any = {};
  any.sin6_family = AF_INET6;
  any.sin6_port = htons(static_cast<uint16_t>(address.port));
  const bool everywhere =
      IsWildcard(found->ai_addr) && add(reinterpret_cast<sockaddr*>(&any), sizeof(any));
  // A name may have addresses of a family for which there is no network here.
  for (const addrinfo* entry = found; entry != nullptr && !everywhere; entry = entry->ai_next) {
    add(entry->ai_addr, entry->ai_addrlen);
  }
  if (listeners_.empty()) {
    const std::string why =
        absl::StrFormat("cannot listen on %s: %s", FormatAddress(address), std::strerror(error));
    return error == EADDRINUSE ? absl::AlreadyExistsError(why) : absl::InvalidArgumentError(why);
  }
  return absl::OkStatus();
}

Connections::~Connections() {
  if (stop_[1] >= 0) close(stop_[1]);
  if (thread_.joinable()) thread_.join();
  if (stop_[0] >= 0) close(stop_[0]);
  if (!path_.empty()) unlink(path_.c_str());
  for (const int listener : listeners_) close(listener);
}

Connections::Sink Connections::ForServer(grpc::ServerBuilder& builder,
                                         std::shared_ptr<grpc::ServerCredentials> credentials) {
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;
  const std::shared_ptr<Acceptor> acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      std::move(credentials));
  return [acceptor](int fd) {
    Acceptor::NewConnectionParameters connection;
    connection.fd = fd;
    acceptor->HandleNewConnection(&connection);
  };
}

void Connections::Serve(Sink sink) {
  sink_ = std::move(sink);
  thread_ = std::thread([this] { Run(); });
}

void Connections::Run() {
  std::vector<pollfd> waits = {{.fd = stop_[0], .events = POLLIN, .revents = 0}};
  for (const int listener : listeners_) {
    waits.push_back({.fd = listener, .events = POLLIN, .revents = 0});
  }
  bool pause = false;
  while (true) {
    // While there is no file for a connection, only the end is waited for.
    if (poll(waits.data(), pause ? 1 : waits.size(), pause ? kPauseMs : -1) < 0) continue;
    if (waits[0].revents != 0) return;
    pause = false;
    for (size_t i = 1; i < waits.size(); ++i) pause = !AcceptFrom(waits[i].fd) || pause;
  }
}

bool Connections::AcceptFrom(int listener) {
  while (true) {
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    const int fd =
        accept4(listener, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return true;
      ++waits_;
      return false;
    }
    if (!HasRoom(fd, ClientOf(fd, peer))) {
      close(fd);
      continue;
    }
    sink_(fd);
  }
}

// The kernel gives the lowest number that is free, so that a high one says how many are open.
bool Connections::HasRoom(int fd, const std::string& client) {
  const auto forget_ended = [](std::vector<Handed>& open) {
    std::erase_if(open, [](const Handed& one) { return SocketNumber(one.first) != one.second; });
  };
  if (handed_.size() >= static_cast<size_t>(bounds_.files)) {
    for (auto& [address, open] : handed_) forget_ended(open);
    std::erase_if(handed_, [](const auto& entry) { return entry.second.empty(); });
  }
  std::vector<Handed>& open = handed_[client];
  if (open.size() >= bounds_.per_client) forget_ended(open);
  const bool is_full = fd >= bounds_.files;
  const bool has_room = !is_full && open.size() < bounds_.per_client;
  if (has_room) open.emplace_back(fd, SocketNumber(fd));
  if (!has_room && !refusing_) {
    spdlog::warn("connections are turned away: {}",
                 is_full ? std::string("no more files may be opened for them")
                         : absl::StrCat(open.size(), " of one client are open"));
  }
  refusing_ = !has_room;
  return has_room;
}

}  // namespace ringleader
