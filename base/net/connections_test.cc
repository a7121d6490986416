#include "base/net/connections.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/testing/temp_dir.h"

namespace ringleader {
namespace {

const Address kLoopback = {.host = "127.0.0.1", .port = 0, .path = ""};

class ConnectionsTest : public ::testing::Test {
 protected:
  ~ConnectionsTest() override {
    connections_.reset();
    for (const int fd : handed_) close(fd);
    for (const int fd : clients_) close(fd);
  }

  void Serve(const Connections::Bounds& bounds, const Address& address = kLoopback) {
    auto connections = Connections::Open(address, bounds);
    ASSERT_TRUE(connections.ok()) << connections.status();
    connections_ = *std::move(connections);
    // Where a server would be: keeps what it is handed until the test takes it.
    connections_->Serve([this](int fd) {
      absl::MutexLock lock(&mutex_);
      handed_.push_back(fd);
    });
  }
  static sockaddr_in At(const char* host, int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, host, &address.sin_addr);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }
  // A client's socket; `from`: its address.
  int Client(const char* from) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in own = At(from, 0);
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
    clients_.push_back(fd);
    return fd;
  }
  int Connect(int client) {
    const sockaddr_in server = At("127.0.0.1", connections_->port());
    EXPECT_EQ(connect(client, reinterpret_cast<const sockaddr*>(&server), sizeof(server)), 0);
    return client;
  }
  // A client on the Unix socket.
  int ConnectTo(const std::string& path) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    clients_.push_back(fd);
    sockaddr_un server = {};
    server.sun_family = AF_UNIX;
    path.copy(server.sun_path, path.size());
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&server), sizeof(server)), 0);
    return fd;
  }
  // Whether the next connection from there is handed over; if not, it is closed.
  bool IsTaken(const char* from) {
    return IsTaken([&] { return Connect(Client(from)); });
  }
  bool IsTaken(const std::function<int()>& connect_one) {
    const size_t before = handed();
    const int client = connect_one();
    pollfd wait = {.fd = client, .events = POLLIN, .revents = 0};
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (absl::Now() < deadline) {
      if (handed() > before) return true;
      if (poll(&wait, 1, 2) > 0) return false;
    }
    ADD_FAILURE() << "neither taken nor closed";
    return false;
  }
  // `connect_one` opens one file, and there is none left for the other end: it is taken in once
  // there is, which is after it was tried more than once.
  void WaitForAFile(const std::function<void()>& connect_one) {
    const size_t before = handed();
    const int next = dup(STDIN_FILENO);
    close(next);
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    rlimit tight = limit;
    tight.rlim_cur = static_cast<rlim_t>(next + 1);
    setrlimit(RLIMIT_NOFILE, &tight);
    connect_one();
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (connections_->waits() < 2 && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(2));
    }
    EXPECT_GE(connections_->waits(), 2);
    EXPECT_EQ(handed(), before);
    setrlimit(RLIMIT_NOFILE, &limit);
    while (handed() == before && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(2));
    EXPECT_EQ(handed(), before + 1);
  }
  size_t handed() {
    absl::MutexLock lock(&mutex_);
    return handed_.size();
  }
  void EndOne() {
    absl::MutexLock lock(&mutex_);
    close(handed_.back());
    handed_.pop_back();
  }

  absl::Mutex mutex_;
  std::vector<int> handed_;  // guarded by mutex_ while they are served
  std::vector<int> clients_;
  std::unique_ptr<Connections> connections_;
};

TEST_F(ConnectionsTest, OneClientLeavesRoomForOthers) {
  Serve({.files = 1000, .per_client = 3});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(IsTaken("127.0.0.1"));
  EXPECT_FALSE(IsTaken("127.0.0.1"));
  EXPECT_FALSE(IsTaken("127.0.0.1"));
  EXPECT_TRUE(IsTaken("127.0.0.2"));
  for (int i = 0; i < 2; ++i) EndOne();
  EXPECT_TRUE(IsTaken("127.0.0.1")) << "one of its own has ended";
  EXPECT_FALSE(IsTaken("127.0.0.1"));
}

TEST_F(ConnectionsTest, FilesAreLeftForTheRestOfTheProcess) {
  const int next = dup(STDIN_FILENO);
  close(next);
  // Three are for listening, and this test has both ends of each connection.
  Serve({.files = next + 20, .per_client = 100});
  int taken = 0;
  while (taken < 20 && IsTaken("127.0.0.1")) ++taken;
  EXPECT_GE(taken, 1);
  EXPECT_LE(taken, 8);
  close(clients_.front());
  clients_.erase(clients_.begin());
  EndOne();
  EXPECT_TRUE(IsTaken("127.0.0.1"));
}

// gRPC's listener would stop at the first of them.
TEST_F(ConnectionsTest, ThePortStaysOpenThroughAWantOfFiles) {
  Serve({.files = 1000, .per_client = 100});
  WaitForAFile([&] { Connect(Client("127.0.0.1")); });
  EXPECT_TRUE(IsTaken("127.0.0.1"));
}

TEST_F(ConnectionsTest, AUnixSocketIsBoundedForAUserAndOutlastsAWantOfFiles) {
  const TempDir dir;
  const Address address = {.host = "", .port = 0, .path = dir.File("socket")};
  Serve({.files = 1000, .per_client = 3}, address);
  const auto is_taken = [&] { return IsTaken([&] { return ConnectTo(address.path); }); };
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(is_taken());
  EXPECT_FALSE(is_taken());
  for (int i = 0; i < 2; ++i) EndOne();
  WaitForAFile([&] { ConnectTo(address.path); });
  EXPECT_TRUE(is_taken());
}

TEST_F(ConnectionsTest, AUnixSocketIsReplacedAndRemoved) {
  const TempDir dir;
  const Address address = {.host = "", .port = 0, .path = dir.File("socket")};
  const auto is_socket = [&] {
    struct stat found {};
    return lstat(address.path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode);
  };
  // As a process leaves it that is killed.
  const int left = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un own = {};
  own.sun_family = AF_UNIX;
  address.path.copy(own.sun_path, address.path.size());
  ASSERT_EQ(bind(left, reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
  close(left);
  EXPECT_TRUE(is_socket());
  Serve({.files = 1000, .per_client = 3}, address);
  EXPECT_TRUE(IsTaken([&] { return ConnectTo(address.path); }));
  connections_.reset();
  EXPECT_FALSE(is_socket());
  // Nothing else is removed for it.
  std::ofstream(address.path) << "text";
  EXPECT_TRUE(absl::IsInvalidArgument(Connections::Open(address).status()));
  const Address long_path = {.host = "", .port = 0, .path = dir.File(std::string(200, 's'))};
  EXPECT_TRUE(absl::IsInvalidArgument(Connections::Open(long_path).status()));
}

TEST_F(ConnectionsTest, APortThatIsTakenIsNamed) {
  Serve({.files = 1000, .per_client = 1});
  const Address taken = {.host = "127.0.0.1", .port = connections_->port(), .path = ""};
  EXPECT_TRUE(absl::IsAlreadyExists(Connections::Open(taken).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Connections::Open({.host = "192.0.2.1", .port = 0, .path = ""}).status()));
}

TEST_F(ConnectionsTest, EveryAddressMeansThoseOfIpv4Too) {
  for (const char* const host : {"0.0.0.0", "::"}) {
    Serve({.files = 1000, .per_client = 100}, {.host = host, .port = 0, .path = ""});
    EXPECT_TRUE(IsTaken("127.0.0.1")) << host;
    const int port = connections_->port();
    connections_.reset();
    const sockaddr_in server = At("127.0.0.1", port);
    EXPECT_NE(
        connect(Client("127.0.0.1"), reinterpret_cast<const sockaddr*>(&server), sizeof(server)), 0)
        << "nobody listens any more";
  }
}

}  // namespace
}  // namespace ringleader
