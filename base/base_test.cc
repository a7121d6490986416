#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/back_off.h"
#include "base/boot_clock.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "base/json.h"
#include "base/net/address.h"
#include "base/net/grpc_status.h"
#include "base/net/tls.h"
#include "base/process/config.h"
#include "base/process/progress.h"
#include "base/process/signals.h"
#include "base/process/time_limit.h"
#include "base/protocol_version.h"
#include "base/standard_streams.h"
#include "base/testing/taken_port.h"
#include "base/testing/temp_dir.h"
#include "base/testing/test_certificates.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace ringleader {
namespace {

using ::testing::HasSubstr;

Address Parsed(const std::string& text) {
  const auto address = ParseAddress(text);
  EXPECT_TRUE(address.ok()) << address.status();
  return address.value_or(Address{});
}

TEST(AddressTest, ReadsEveryForm) {
  EXPECT_EQ(Parsed("127.0.0.1:80").port, 80);
  EXPECT_EQ(Parsed("[::1]:80").host, "::1");
  EXPECT_EQ(Parsed("unix:/run/x").path, "/run/x");
  for (const char* text : {"127.0.0.1:80", "[::1]:80", "unix:/run/x", "host.example:0"}) {
    EXPECT_EQ(FormatAddress(Parsed(text)), text);
  }
  for (const char* text :
       {"", "host", "host:", ":80", "::1:80", "host:65536", "host:-1", "host:8x", "unix:"}) {
    EXPECT_THAT(std::string(ParseAddress(text).status().message()), HasSubstr("write host:port"))
        << text;
  }
}

TEST(AddressTest, AUrlIsCalledThat) {
  EXPECT_THAT(std::string(ParseAddress("http://127.0.0.1:80").status().message()),
              HasSubstr("it is a URL; write host:port"));
}

TEST(AddressTest, KnowsLoopback) {
  for (const char* text : {"127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "unix:/x"}) {
    EXPECT_TRUE(IsLoopback(Parsed(text))) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"}) {
    EXPECT_FALSE(IsLoopback(Parsed(text))) << text;
  }
}

TEST(AddressTest, SaysThatAPortIsInUse) {
  const TakenPort taken;
  const absl::Status status =
      CheckCanListen({.host = "127.0.0.1", .port = taken.port(), .path = ""});
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is in use by another program"));
  EXPECT_TRUE(CheckCanListen(Parsed("127.0.0.1:0")).ok());
  EXPECT_FALSE(CheckCanListen(Parsed("192.0.2.1:1")).ok());
}

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() {
    app_.add_option("--name", name_)->capture_default_str();
    app_.add_option("--list", list_);
    app_.add_flag("--loud", loud_);
  }
  std::optional<int> Parse(std::vector<std::string> arguments) {
    std::vector<char*> argv = {const_cast<char*>("program")};
    for (std::string& argument : arguments) argv.push_back(argument.data());
    return ParseFlags(app_, static_cast<int>(argv.size()), argv.data());
  }
  std::string File(const std::string& text) {
    std::ofstream(dir_.File("config.yaml")) << text;
    return dir_.File("config.yaml");
  }

  TempDir dir_;
  CLI::App app_{"", "program"};
  std::string name_ = "default";
  std::vector<int> list_;
  bool loud_ = false;
};

TEST_F(ConfigTest, CommandLineWinsOverFileWinsOverDefault) {
  EXPECT_EQ(Parse({"--config", File("name: file\nlist: [1, 2]\nloud: true\n"), "--name", "line"}),
            std::nullopt);
  EXPECT_EQ(name_, "line");
  EXPECT_EQ(list_, (std::vector<int>{1, 2}));
  EXPECT_TRUE(loud_);
  EXPECT_EQ(ResolvedConfig(app_), "name: line\nlist: [1, 2]\nloud: true\n");
}

TEST_F(ConfigTest, ResolvedConfigHoldsDefaultsAndReadsBack) {
  EXPECT_EQ(Parse({}), std::nullopt);
  EXPECT_EQ(ResolvedConfig(app_), "name: default\nlist: []\nloud: false\n");
  const std::string printed = File(ResolvedConfig(app_));
  EXPECT_EQ(Parse({"--config", printed}), std::nullopt);
  EXPECT_EQ(name_, "default");
  EXPECT_TRUE(list_.empty());
}

TEST_F(ConfigTest, MistakesInTheFileAreNamed) {
  for (const char* text :
       {"nmae: x\n", "name: {a: b}\n", "- name\n", "name: [\n", "name: a\nname: b\n"}) {
    ::testing::internal::CaptureStderr();
    const std::optional<int> exit_code = Parse({"--config", File(text)});
    EXPECT_EQ(exit_code, 64) << text;
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("configuration file")) << text;
  }
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"--config", File("nmae: x\n")}), 64);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("unknown key nmae; known are: help, name, list, loud"));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"--config", File("list: 1\nlist: 2\n")}), 64);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("list: given twice; keep one, and of several values make a list"));
}

TEST_F(ConfigTest, OfManyKeysThoseAreNamedThatMayBeMeant) {
  bool flag = false;
  for (int i = 10; i < 30; ++i) app_.add_flag(absl::StrCat("--flag-", i), flag);
  for (const auto& [text, hint] : {std::pair{"nmae: x\n", "unknown key nmae; did you mean name?\n"},
                                   {"flga-11: x\n", "key flga-11; did you mean flag-11?\n"},
                                   {"\"x\\x7fyzzy\": x\n", "key x\\x7fyzzy; --help lists those"}}) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(Parse({"--config", File(text)}), 64);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr(hint));
  }
}

// A device has no end, and a pipe may have no writer.
TEST_F(ConfigTest, WhatIsNoFileIsRefused) {
  ASSERT_EQ(mkfifo(dir_.File("pipe").c_str(), 0600), 0);
  for (const std::string& path : {std::string("/dev/zero"), dir_.File("pipe"), dir_.File("")}) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(Parse({"--config", path}), 64);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr("--config: " + path + " is no regular file; give a YAML file"));
  }
  std::filesystem::resize_file(File(""), kMaxConfigFileBytes + 1);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"--config", dir_.File("config.yaml")}), 64);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("has more than 1048576 bytes"));
}

// As ringctl does: a mistake of whoever typed it is 64, whatever kind it is of.
TEST_F(ConfigTest, MistakesOnTheCommandLineHaveOneExitCode) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--nmae", "x"},
                                             {"--name"},
                                             {"--list", "a"},
                                             {"extra"},
                                             {"--config", "/nowhere/config.yaml"}}) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(Parse(arguments), 64) << arguments[0];
    EXPECT_FALSE(::testing::internal::GetCapturedStderr().empty());
  }
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Parse({"--version"}), 0);
  EXPECT_FALSE(::testing::internal::GetCapturedStdout().empty());
}

TEST(ClockTest, SteadyAdvancesByWhatPassesWhateverTheWallClockSays) {
  static absl::Time boot_time = absl::UnixEpoch() + absl::Hours(3);
  const absl::Time wall = absl::UnixEpoch() + absl::Hours(24 * 365 * 50);
  const SteadyClock clock(wall, [] { return boot_time; });
  EXPECT_EQ(clock.Now(), wall);
  boot_time += absl::Seconds(10);
  EXPECT_EQ(clock.Now(), wall + absl::Seconds(10));
}

TEST(ClockTest, SteadyTellsTheTimeOfDay) {
  EXPECT_LT(absl::AbsDuration(Clock::Steady()->Now() - absl::Now()), absl::Minutes(1));
  const absl::Time boot_before = BootNow();
  const absl::Time before = Clock::Steady()->Now();
  absl::SleepFor(absl::Milliseconds(20));
  const absl::Duration passed = Clock::Steady()->Now() - before;
  EXPECT_GE(passed, absl::Milliseconds(20));
  EXPECT_LE(passed, BootNow() - boot_before);
}

TEST(GrpcStatusTest, CarriesErrorInfo) {
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError("jobs/x does not exist"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "jobs/x does not exist");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 5);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "RESOURCE_NOT_FOUND");
  EXPECT_EQ(info.domain(), "ringleader");
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  // No code is lost: whatever the code says inside, a client hears of it.
  for (int code = 1; code <= 16; ++code) {
    const int seen =
        ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(code), "")).error_code();
    EXPECT_EQ(seen, code == static_cast<int>(absl::StatusCode::kUnknown)
                        ? grpc::StatusCode::INTERNAL
                        : code);
  }
}

TEST(TlsTest, PlainTextStaysOnLoopback) {
  EXPECT_TRUE(ServerCredentials({}, Parsed("127.0.0.1:1")).ok());
  const auto refused = ServerCredentials({}, Parsed("0.0.0.0:1"));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("--insecure"));
  EXPECT_FALSE(ChannelCredentials({}, Parsed("10.0.0.1:1")).ok());
  TlsOptions insecure;
  insecure.insecure = true;
  EXPECT_TRUE(ServerCredentials(insecure, Parsed("0.0.0.0:1")).ok());
}

TEST(TlsTest, MistakesAreNamed) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const auto complaint = [](const TlsOptions& options) {
    return std::string(ServerCredentials(options, Parsed("0.0.0.0:1")).status().message());
  };
  TlsOptions options = certificates.Options("server");
  EXPECT_EQ(complaint(options), "");
  options.key_path = "";
  EXPECT_THAT(complaint(options), HasSubstr("--tls-key is missing"));
  options = certificates.Options("server");
  options.key_path = certificates.File("client.key");
  EXPECT_THAT(complaint(options), HasSubstr("is not the key of the certificate"));
  options.key_path = certificates.File("server.crt");
  EXPECT_THAT(complaint(options), HasSubstr("no unencrypted PEM private key"));
  options = certificates.Options("server");
  options.ca_path = certificates.File("absent");
  EXPECT_THAT(complaint(options), HasSubstr("--tls-ca: cannot read"));
  options.ca_path = "/dev/zero";
  EXPECT_THAT(complaint(options), HasSubstr("--tls-ca: /dev/zero is a device; a file is expected"));
  options.ca_path = certificates.File("server.key");
  EXPECT_THAT(complaint(options), HasSubstr("holds no PEM certificate"));
  options.cert_path = "";
  EXPECT_THAT(complaint(options), HasSubstr("--tls-cert is missing"));
  ASSERT_TRUE(certificates.Sign("ca", "old", {.days = -1}));
  EXPECT_THAT(complaint(certificates.Options("old")), HasSubstr("has expired"));
}

TEST(TlsTest, ATokenNeedsTlsAndNoCertificate) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const Address address = Parsed("127.0.0.1:1");
  const auto plain = ChannelCredentials({}, address, "secret");
  EXPECT_EQ(plain.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plain.status().message()), HasSubstr("not sent to 127.0.0.1:1 in plain"));
  TlsOptions insecure;
  insecure.insecure = true;
  EXPECT_FALSE(ChannelCredentials(insecure, Parsed("10.0.0.1:1"), "secret").ok());
  TlsOptions authority;
  authority.ca_path = certificates.File("ca.crt");
  EXPECT_TRUE(ChannelCredentials(authority, address, "secret").ok());
  EXPECT_FALSE(ChannelCredentials(authority, address).ok());
}

// Answers every call of any method with UNIMPLEMENTED.
class TlsServer {
 public:
  explicit TlsServer(const TlsOptions& options) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0",
                             ServerCredentials(options, Parsed("127.0.0.1:0")).value(), &port_);
    builder.RegisterAsyncGenericService(&service_);
    queue_ = builder.AddCompletionQueue();
    server_ = builder.BuildAndStart();
  }
  ~TlsServer() {
    server_->Shutdown(std::chrono::system_clock::now());
    queue_->Shutdown();
    void* tag = nullptr;
    for (bool ok = false; queue_->Next(&tag, &ok);) continue;
  }
  // Whether a new connection with these comes about within `limit`.
  bool Connects(const TlsOptions& options, std::chrono::milliseconds limit) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 1000);
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port_),
                                     ChannelCredentials(options, Parsed("127.0.0.1:1")).value(),
                                     arguments)
        ->WaitForConnected(std::chrono::system_clock::now() + limit);
  }

 private:
  int port_ = 0;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
};

TEST(TlsTest, CertificatesAreTakenUpWithoutARestart) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const TlsServer server(certificates.Options("server"));
  const std::chrono::milliseconds at_once(1000);
  ASSERT_TRUE(server.Connects(certificates.Options("client"), std::chrono::seconds(10)));
  ASSERT_FALSE(server.Connects(certificates.Options("stranger", "other"), at_once));
  // The other authority's from now on: key, certificate and the authority that clients come from.
  ASSERT_TRUE(certificates.Sign("other", "server", {}));
  std::filesystem::copy_file(certificates.File("other.crt"), certificates.File("ca.crt"),
                             std::filesystem::copy_options::overwrite_existing);
  bool taken_up = false;
  for (int i = 0; i < 3 * kTlsReloadSeconds && !taken_up; ++i) {
    absl::SleepFor(absl::Seconds(1));
    taken_up = server.Connects(certificates.Options("stranger", "other"), at_once);
  }
  EXPECT_TRUE(taken_up);
  EXPECT_FALSE(server.Connects(certificates.Options("client", "other"), at_once));
}

// The end of a terminal is an orderly stop, but not for who asked not to hear of it.
TEST(SignalsTest, AHangUpIsAnOrderlyStopUnlessItIsIgnored) {
  const auto first_after = [](void (*disposition)(int), const std::vector<int>& sent) {
    signal(SIGHUP, disposition);
    BlockShutdownSignals();
    for (const int number : sent) kill(getpid(), number);
    _exit(WaitForShutdownSignal());
  };
  EXPECT_EXIT(first_after(SIG_DFL, {SIGHUP}), ::testing::ExitedWithCode(SIGHUP), "");
  EXPECT_EXIT(first_after(SIG_IGN, {SIGHUP, SIGTERM}), ::testing::ExitedWithCode(SIGTERM), "");
}

// Else what is logged would go into the first files that are opened.
TEST(StandardStreamsTest, NoFileGetsTheirNumbers) {
  const auto start_without_streams = [] {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) close(stream);
    TakeStandardStreams();
    const bool apart = dup(STDIN_FILENO) > STDERR_FILENO;
    _exit(apart && write(STDOUT_FILENO, "x", 1) < 0 && write(STDERR_FILENO, "x", 1) < 0 ? 0 : 1);
  };
  EXPECT_EXIT(start_without_streams(), ::testing::ExitedWithCode(0), "");
}

TEST(ProtocolVersionTest, AnotherVersionIsRefusedAndTheOlderSideNamed) {
  EXPECT_EQ(CheckProtocolVersion("the worker", kProtocolVersion, "this coordinator"),
            absl::OkStatus());
  // Releases before there was a version send none, which reads as 0.
  const absl::Status older = CheckProtocolVersion("the worker", 0, "this coordinator");
  EXPECT_EQ(older.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      older.message(),
      absl::StrCat("the worker speaks protocol version 0 and this coordinator ", kProtocolVersion,
                   "; the worker is older: install the release of this coordinator there, "
                   "and restart it"));
  const absl::Status newer =
      CheckProtocolVersion("the worker", kProtocolVersion + 1, "this coordinator");
  EXPECT_THAT(std::string(newer.message()),
              HasSubstr("this coordinator is older: install the release of the worker there"));
}

TEST(BackOffTest, DoublesUpToTheLongest) {
  const auto after = [](uint32_t failures) {
    return BackOff(absl::Seconds(2), absl::Minutes(5), failures);
  };
  EXPECT_EQ(after(0), absl::Seconds(2));
  EXPECT_EQ(after(1), absl::Seconds(2));
  EXPECT_EQ(after(2), absl::Seconds(4));
  EXPECT_EQ(after(5), absl::Seconds(32));
  EXPECT_EQ(after(9), absl::Minutes(5));
  EXPECT_EQ(after(4'000'000'000), absl::Minutes(5));
}

// Reading it may take longer than a process may stand still.
TEST(ChecksumTest, OfMuchDataIsProgressAndTheSameInWhateverPieces) {
  const std::string data(size_t{40} << 20, 'x');
  const uint64_t before = Progress::count();
  const uint64_t whole = Checksum(data.data(), data.size());
  EXPECT_EQ(Progress::count(), before + 3);
  ChecksumStream stream;
  stream.Update(data.data(), 1000);
  stream.Update(data.data(), data.size() - 1000);
  EXPECT_EQ(stream.Digest(), whole);
  EXPECT_EQ(whole, XXH3_64bits(data.data(), data.size()));
}

TEST(TryLockFileTest, OneOpeningHasIt) {
  const TempDir folder;
  const std::string path = folder.File("lock");
  const int first = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const int second = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(std::min(first, second), 0);
  EXPECT_TRUE(*TryLockFile(first, path));
  EXPECT_TRUE(*TryLockFile(first, path));
  EXPECT_FALSE(*TryLockFile(second, path));
  close(first);
  EXPECT_TRUE(*TryLockFile(second, path));
  close(second);
  // What fails otherwise is no lock of somebody else.
  EXPECT_THAT(TryLockFile(-1, path).status().message(),
              HasSubstr("lock " + path + ": Bad file descriptor"));
}

TEST(ParseJsonTest, WhatNestsDeeperThanAnybodyDoesIsNone) {
  const auto nested = [](int depth, char open, char close) {
    return std::string(depth, open) + std::string(depth, close);
  };
  EXPECT_EQ(ParseJson(nested(kMaxJsonDepth, '[', ']')).size(), 1u);
  for (const int depth : {kMaxJsonDepth + 1, 1'000'000}) {
    EXPECT_TRUE(ParseJson(nested(depth, '[', ']')).is_discarded()) << depth;
    EXPECT_TRUE(ParseJson("{\"a\": " + nested(depth, '[', ']') + "}").is_discarded()) << depth;
    EXPECT_TRUE(ParseJson("[1, " + std::string(depth, '[')).is_discarded()) << depth;
  }
  EXPECT_EQ(ParseJson(R"({"a": [1, {"b": 2}]})")["a"][1]["b"], 2);
  EXPECT_TRUE(ParseJson("{]").is_discarded());
  int keys = 0;
  ParseJson(R"({"a": 1, "b": 2})", [&](int, nlohmann::json::parse_event_t event, nlohmann::json&) {
    keys += event == nlohmann::json::parse_event_t::key ? 1 : 0;
    return true;
  });
  EXPECT_EQ(keys, 2);
}

TEST(WithTimeLimitTest, ACallThatHangsIsGivenUpByName) {
  EXPECT_EQ(
      WithTimeLimit("bob", absl::Seconds(60), "", [] { return absl::DataLossError("its own"); }),
      absl::DataLossError("its own"));
  const auto go = std::make_shared<absl::Notification>();
  const auto ended = std::make_shared<absl::BlockingCounter>(kMaxLimitedCalls);
  const auto hang = [go, ended] {
    go->WaitForNotification();
    ended->DecrementCount();
    return absl::OkStatus();
  };
  const auto well = [](const std::string& client) {
    return WithTimeLimit(client, absl::Seconds(60), "reading /a", [] { return absl::OkStatus(); });
  };
  for (int i = 0; i < kMaxLimitedCalls; ++i) {
    const std::string client = absl::StrCat("alice", i / kMaxLimitedCallsOfOne);
    const absl::Status late =
        WithTimeLimit(client, absl::Milliseconds(1), "reading /mnt/gone", hang);
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(late.message()), HasSubstr("reading /mnt/gone: no answer within 1ms"));
    // Whose mount hangs is refused in the end, and nobody else.
    if (i + 1 != kMaxLimitedCallsOfOne) continue;
    EXPECT_EQ(well(client).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(well("bob"), absl::OkStatus());
  }
  const absl::Status many = well("bob");
  EXPECT_EQ(many.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(many.message()), HasSubstr("reading /a: too many such calls"));
  go->Notify();
  ended->Wait();
  // Their places are free again once their threads end.
  absl::Status again = many;
  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  while (!again.ok() && absl::Now() < give_up) again = well("alice0");
  EXPECT_TRUE(again.ok()) << again;
}

}  // namespace
}  // namespace ringleader
