#include "tests/faults/ring.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

namespace ringleader::faults {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

bool Send(int fd, bool flag) {
  const char byte = flag ? 1 : 0;
  return send(fd, &byte, 1, MSG_NOSIGNAL) == 1;
}

bool Receive(int fd, bool* flag) {
  char byte = 0;
  if (recv(fd, &byte, 1, MSG_WAITALL) != 1) return false;
  *flag = *flag || byte == 1;
  return true;
}

}  // namespace

Ring::~Ring() {
  for (const int peer : peers_) close(peer);
  if (listener_ >= 0) close(listener_);
}

int Ring::Listen() {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_, 64) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return 0;
  }
  return ntohs(address.sin_port);
}

bool Ring::Connect(uint32_t rank, const std::vector<std::string>& addresses) {
  rank_ = rank;
  if (rank == 0) {
    while (peers_.size() + 1 < addresses.size()) {
      const int peer = accept(listener_, nullptr, nullptr);
      if (peer < 0) return false;
      peers_.push_back(peer);
    }
    return true;
  }
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const std::string& root = addresses.front();
  const sockaddr_in address = Loopback(std::atoi(root.substr(root.rfind(':') + 1).c_str()));
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    close(fd);
    return false;
  }
  peers_.push_back(fd);
  return true;
}

bool Ring::Barrier(bool flag, bool* any) {
  *any = flag;
  if (rank_ != 0) return Send(peers_.front(), flag) && Receive(peers_.front(), any);
  for (const int peer : peers_) {
    if (!Receive(peer, any)) return false;
  }
  for (const int peer : peers_) {
    if (!Send(peer, *any)) return false;
  }
  return true;
}

}  // namespace ringleader::faults
