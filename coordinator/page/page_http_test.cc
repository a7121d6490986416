// What clients that are slow, silent or many may take of the page.
#include "coordinator/page/page_http.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/boot_clock.h"
#include "base/net/connections.h"

namespace ringleader::page {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

size_t OpenFiles() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += entry.is_symlink() ? 1 : 0;
  }
  return count;
}

class PageHttpTest : public ::testing::Test {
 protected:
  ~PageHttpTest() override {
    connections_.reset();
    http_.reset();
    for (const int client : clients_) close(client);
  }

  void Serve(const HttpLimits& limits) {
    http_ = std::make_unique<PageHttp>(
        limits, std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>(nullptr, &SSL_CTX_free));
    http_->Get("/small", [](const httplib::Request&, httplib::Response& response) {
      response.set_content("small", "text/plain");
    });
    http_->Get("/large", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(std::string(size_t{64} << 20, 'l'), "text/plain");
    });
    auto connections = Connections::Open({.host = "127.0.0.1", .port = 0, .path = ""},
                                         {.files = 60'000, .per_client = limits.of_one_client});
    ASSERT_TRUE(connections.ok()) << connections.status();
    connections_ = *std::move(connections);
    connections_->Serve([this](int connection) { http_->Take(connection); });
  }
  int Connect(const char* from = "127.0.0.1") {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    clients_.push_back(fd);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, from, &address.sin_addr);
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    address.sin_port = htons(static_cast<uint16_t>(connections_->port()));
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  static bool Send(int client, const std::string& text) {
    return send(client, text.data(), text.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(text.size());
  }
  // All that comes until the server closes the connection, which it has to within `patience`.
  static std::string ReadAll(int client, absl::Duration patience = absl::Seconds(60)) {
    const absl::Time deadline = BootNow() + patience;
    std::string text;
    char buffer[4096];
    pollfd wait = {.fd = client, .events = POLLIN, .revents = 0};
    while (true) {
      const absl::Duration left = deadline - BootNow();
      if (left <= absl::ZeroDuration() ||
          poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) == 0) {
        ADD_FAILURE() << "still open after " << patience;
        return text;
      }
      const ssize_t count = recv(client, buffer, sizeof(buffer), 0);
      if (count <= 0) return text;
      text.append(buffer, static_cast<size_t>(count));
    }
  }
  std::string Get(const char* from = "127.0.0.1") {
    const int client = Connect(from);
    Send(client, "GET /small HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    return ReadAll(client);
  }
  // The first answer that is one: who is let go of, or too slow on a busy machine, gets none.
  std::string GetInTheEnd(const char* from = "127.0.0.1") {
    const absl::Time deadline = BootNow() + absl::Seconds(60);
    std::string answer;
    while (answer.empty() && BootNow() < deadline) answer = Get(from);
    return answer;
  }

  std::vector<int> clients_;
  std::unique_ptr<PageHttp> http_;
  std::unique_ptr<Connections> connections_;
};

TEST_F(PageHttpTest, AConnectionServesOneRequestAfterTheOther) {
  Serve({});
  const int client = Connect();
  ASSERT_TRUE(Send(client,
                   "GET /small HTTP/1.1\r\nHost: localhost\r\n\r\n"
                   "GET /small HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
  const std::string answers = ReadAll(client);
  EXPECT_THAT(answers, StartsWith("HTTP/1.1 200 OK"));
  EXPECT_THAT(answers.substr(10), HasSubstr("HTTP/1.1 200 OK"));
}

// With httplib's own listener each of 3,000 would have had a file, and a thread for three seconds.
TEST_F(PageHttpTest, ThousandsOfIdleConnectionsTakeFewFilesAndLeaveRoomForOthers) {
  Serve({.threads = 8, .connections = 16, .of_one_client = 6, .between_requests = absl::Hours(1)});
  const size_t before = OpenFiles();
  for (int i = 0; i < 3000; ++i) Connect();
  EXPECT_THAT(Get("127.0.0.2"), StartsWith("HTTP/1.1 200 OK"));
  EXPECT_LE(OpenFiles(), before + 3001 + 16);
  size_t closed = 0;
  for (const int client : clients_) {
    pollfd wait = {.fd = client, .events = POLLIN, .revents = 0};
    closed += poll(&wait, 1, 0) > 0 ? 1 : 0;
  }
  EXPECT_GE(closed, 3000u - 6u);
  // Whoever let go of what it had is served again.
  for (const int client : clients_) close(client);
  clients_.clear();
  EXPECT_THAT(GetInTheEnd(), StartsWith("HTTP/1.1 200 OK"));
}

// From many addresses, too, no more is open than the page has room for.
TEST_F(PageHttpTest, AFloodFromEverywhereIsBoundedAndPasses) {
  Serve({.threads = 2,
         .connections = 4,
         .of_one_client = 1,
         .between_requests = absl::Milliseconds(100)});
  std::vector<int> flood;
  for (int i = 2; i < 200; ++i) flood.push_back(Connect(absl::StrCat("127.0.0.", i).c_str()));
  for (const int client : flood) EXPECT_EQ(ReadAll(client), "");
  EXPECT_THAT(GetInTheEnd("127.0.1.1"), StartsWith("HTTP/1.1 200 OK"));
}

TEST_F(PageHttpTest, ARequestThatDripsInEndsInTime) {
  Serve({.threads = 1, .to_ask = absl::Milliseconds(300)});
  const int client = Connect();
  absl::Notification closed;
  std::thread drip([&] {
    Send(client, "GET /small HTTP/1.1\r\n");
    while (Send(client, "X: y\r\n") &&
           !closed.WaitForNotificationWithTimeout(absl::Milliseconds(5))) {
    }
  });
  EXPECT_EQ(ReadAll(client), "");
  closed.Notify();
  drip.join();
  EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200 OK")) << "the one thread is free again";
}

TEST_F(PageHttpTest, HeadersWithoutEndEnd) {
  Serve({.to_ask = absl::Hours(1)});
  const int client = Connect();
  Send(client, "GET /small HTTP/1.1\r\n");
  const std::string line = absl::StrCat("X: ", std::string(995, 'x'), "\r\n");
  int lines = 0;
  while (lines < 100'000 && Send(client, line)) ++lines;
  EXPECT_LT(lines, 100'000);
}

TEST_F(PageHttpTest, WhoDoesNotReadItsAnswerIsLetGo) {
  Serve({.threads = 1, .to_take_the_answer = absl::Milliseconds(300)});
  const int client = Connect();
  ASSERT_TRUE(Send(client, "GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200 OK")) << "the one thread is free again";
}

// A stop does not wait for what a client may still send or read.
TEST_F(PageHttpTest, TheEndWaitsForNoClient) {
  Serve({.threads = 2,
         .to_ask = absl::Hours(1),
         .to_take_the_answer = absl::Hours(1),
         .between_requests = absl::Hours(1)});
  const int asking = Connect(), reading = Connect(), waiting = Connect();
  Send(asking, "GET /small HTTP/1.1\r\nHo");
  Send(reading, "GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n");
  pollfd wait = {.fd = reading, .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&wait, 1, 60'000), 1);
  const absl::Time before = BootNow();
  connections_.reset();
  http_.reset();
  EXPECT_LT(BootNow() - before, absl::Minutes(1));
  EXPECT_EQ(ReadAll(asking), "");
  EXPECT_EQ(ReadAll(waiting), "");
}

}  // namespace
}  // namespace ringleader::page
