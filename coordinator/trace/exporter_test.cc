#include "coordinator/trace/exporter.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <prometheus/registry.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/net/tls.h"
#include "base/testing/taken_port.h"
#include "base/testing/test_certificates.h"
#include "coordinator/trace/testing/collector.h"
#include "tests/faults/tcp_proxy.h"

namespace ringleader::trace {
namespace {

using testing::Collector;
using ::testing::HasSubstr;

std::vector<otlp::Span> Spans(const std::string& name, size_t count = 1) {
  std::vector<otlp::Span> spans(count);
  for (otlp::Span& span : spans) span.set_name(name);
  return spans;
}

const Address kListen = {.host = "127.0.0.1", .port = 0, .path = ""};

// No certificate, and this authority.
TlsOptions Trust(const std::string& authority) {
  TlsOptions options;
  options.ca_path = authority;
  return options;
}

// Limits that a test can wait for.
ExportLimits Short() {
  return {.call = absl::Milliseconds(200),
          .give_up = absl::Seconds(1),
          .first_pause = absl::Milliseconds(10),
          .at_end = absl::Milliseconds(200)};
}

class ExporterTest : public ::testing::Test {
 protected:
  std::unique_ptr<Exporter> Export(const TraceOptions& options,
                                   const ExportLimits& limits = ExportLimits()) {
    auto exporter = Exporter::Create(options, limits, &registry_);
    EXPECT_TRUE(exporter.ok()) << exporter.status();
    return *std::move(exporter);
  }

  // Returns the value of one reason, or of the series without labels.
  double Value(const std::string& name, const std::string& reason = "") {
    for (const auto& family : registry_.Collect()) {
      if (family.name != "ringleader_coordinator_trace_" + name) continue;
      for (const auto& metric : family.metric) {
        if (!reason.empty() && metric.label.front().value != reason) continue;
        return family.type == prometheus::MetricType::Gauge ? metric.gauge.value
                                                            : metric.counter.value;
      }
    }
    ADD_FAILURE() << name << " " << reason << " is missing";
    return -1;
  }
  double Dropped(const std::string& reason) { return Value("spans_dropped_total", reason); }
  void AwaitDropped(const std::string& reason, double count) {
    const absl::Time give_up = absl::Now() + absl::Minutes(1);
    while (Dropped(reason) < count && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(5));
    EXPECT_EQ(Dropped(reason), count) << reason;
  }

  prometheus::Registry registry_;
};

TEST_F(ExporterTest, ACollectorGetsWhatIsAdded) {
  Collector collector;
  const auto exporter = Export({.endpoint = "http://" + collector.Address()});
  exporter->Add(Spans("a", 700));
  exporter->Add(Spans("b"));
  const std::vector<otlp::Span> spans = collector.Await(701);
  EXPECT_EQ(spans.front().name(), "a");
  EXPECT_EQ(spans.back().name(), "b");
  exporter->Stop();
  EXPECT_EQ(Value("spans_exported_total"), 701);
  EXPECT_EQ(Value("queued_spans"), 0);
  EXPECT_EQ(collector.resource().attributes(0).key(), "service.name");
  EXPECT_EQ(collector.resource().attributes(0).value().string_value(), "ringleader-coordinator");
  EXPECT_EQ(exporter->settled(), 701u);
  EXPECT_EQ(exporter->Add(Spans("late")), 0u);
  EXPECT_EQ(exporter->settled(), 701u);
}

TEST_F(ExporterTest, ACollectorThatHangsHoldsNobodyUp) {
  Collector collector;
  collector.SetAnswer(Collector::Hang);
  ExportLimits limits = Short();
  limits.queue_spans = 10;
  limits.give_up = absl::Hours(1);
  limits.call = absl::Hours(1);
  const auto exporter = Export({.endpoint = "http://" + collector.Address()}, limits);
  exporter->Add(Spans("taken up"));
  collector.AwaitCalls(1);
  exporter->Add(Spans("queued", 10));
  exporter->Add(Spans("too many", 5));
  EXPECT_EQ(Dropped("queue_full"), 5);
  EXPECT_EQ(Value("queued_spans"), 10);
  exporter->Stop();
  EXPECT_EQ(exporter->settled(), 0u) << "all 11 are left to whoever comes next";
}

// Its address may lead to another by then.
TEST_F(ExporterTest, ACollectorThatVanishedIsLookedForAnew) {
  EXPECT_EQ(ExportLimits().keepalive_interval, absl::Seconds(20));
  EXPECT_EQ(ExportLimits().keepalive_patience, absl::Seconds(10));
  Collector collector;
  faults::TcpProxy network(collector.port());
  ExportLimits limits = Short();
  limits.give_up = absl::Hours(1);
  limits.keepalive_interval = absl::Milliseconds(100);
  limits.keepalive_patience = absl::Milliseconds(100);
  const auto exporter = Export({.endpoint = "http://" + network.address()}, limits);
  exporter->Add(Spans("a"));
  const absl::Time patience = absl::Now() + absl::Seconds(60);
  while (exporter->settled() < 1 && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(5));
  network.Cut();
  exporter->Add(Spans("b"));
  while (network.connections() < 2 && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_GE(network.connections(), 2);
  network.Heal();
  // The first may be there twice: where its answer came late it was sent again.
  size_t count = 2;
  while (count < 100 && collector.Await(count).back().name() != "b") ++count;
  EXPECT_LT(count, 100u);
}

TEST_F(ExporterTest, WhatNobodyAnswersIsGivenUp) {
  Collector collector;
  collector.SetAnswer(Collector::Hang);
  ExportLimits limits = Short();
  limits.call = limits.at_end = absl::Minutes(1);
  limits.give_up = absl::Seconds(3);
  const auto exporter = Export({.endpoint = "http://" + collector.Address()}, limits);
  exporter->Add(Spans("lost", 3));
  AwaitDropped("unreachable", 3);
  collector.SetAnswer(nullptr);
  exporter->Add(Spans("found"));
  EXPECT_EQ(collector.Await(1).front().name(), "found");
  exporter->Stop();
  EXPECT_EQ(exporter->settled(), 4u) << "what is lost and counted is settled";
}

TEST_F(ExporterTest, ACollectorThatIsNotThereIsTriedAgain) {
  auto collector = std::make_unique<Collector>();
  const std::string address = collector->Address();
  collector.reset();
  const auto exporter = Export({.endpoint = "http://" + address}, Short());
  exporter->Add(Spans("lost"));
  AwaitDropped("unreachable", 1);
}

TEST_F(ExporterTest, WhatMaySucceedLaterIsSentAgain) {
  Collector collector;
  std::atomic<int> refusals = 2;
  collector.SetAnswer([&](const grpc::ServerContext&, otlp::ExportTraceServiceResponse*) {
    if (--refusals <= 0) collector.SetAnswer(nullptr);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "in a moment");
  });
  ExportLimits limits = Short();
  limits.give_up = absl::Hours(1);
  limits.call = limits.at_end = absl::Minutes(1);
  const auto exporter = Export({.endpoint = "http://" + collector.Address()}, limits);
  exporter->Add(Spans("a", 2));
  collector.Await(2);
  exporter->Stop();
  EXPECT_EQ(collector.Await(2).size(), 2u);
  EXPECT_EQ(Value("spans_exported_total"), 2);
}

TEST_F(ExporterTest, WhatIsRefusedIsNotSentAgain) {
  Collector collector;
  for (const auto code : {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::UNIMPLEMENTED,
                          grpc::StatusCode::RESOURCE_EXHAUSTED, grpc::StatusCode::INTERNAL}) {
    collector.SetAnswer([code](const grpc::ServerContext&, otlp::ExportTraceServiceResponse*) {
      return grpc::Status(code, std::string(1000, '\n'));
    });
    const double before = registry_.Collect().empty() ? 0 : Dropped("refused");
    const auto exporter = Export({.endpoint = "http://" + collector.Address()});
    exporter->Add(Spans("a", 4));
    AwaitDropped("refused", before + 4);
  }
}

TEST_F(ExporterTest, APartThatIsRefusedIsCounted) {
  Collector collector;
  int64_t rejected = 0;
  collector.SetAnswer([&](const grpc::ServerContext&, otlp::ExportTraceServiceResponse* response) {
    response->mutable_partial_success()->set_rejected_spans(rejected);
    return grpc::Status::OK;
  });
  double expected = 0;
  int calls = 0;
  // The last two are nonsense, of which no figure becomes worse than it can be.
  for (const auto& [said, counted] : {std::pair<int64_t, double>{3, 3}, {1'000'000, 5}, {-7, 0}}) {
    rejected = said;
    const double exported = registry_.Collect().empty() ? 0 : Value("spans_exported_total");
    const auto exporter = Export({.endpoint = "http://" + collector.Address()});
    exporter->Add(Spans("a", 5));
    collector.AwaitCalls(++calls);
    exporter->Stop();
    EXPECT_EQ(Dropped("refused"), expected += counted);
    EXPECT_EQ(Value("spans_exported_total"), exported + 5 - counted);
  }
}

TEST_F(ExporterTest, AnAnswerWithoutEndIsNone) {
  Collector collector;
  collector.SetAnswer([](const grpc::ServerContext&, otlp::ExportTraceServiceResponse* response) {
    response->mutable_partial_success()->set_error_message(std::string(3 << 20, 'x'));
    return grpc::Status::OK;
  });
  const auto exporter = Export({.endpoint = "http://" + collector.Address()});
  exporter->Add(Spans("a", 2));
  AwaitDropped("refused", 2);
}

// Whoever connects is sent bytes that are no HTTP/2, or nothing at all.
TEST_F(ExporterTest, APortThatSpeaksSomethingElseIsGivenUp) {
  for (const std::string& text :
       {std::string("HTTP/1.1 200 OK\r\n\r\nhello"), std::string(5000, '\0'), std::string()}) {
    const TakenPort listener;
    std::vector<int> open;
    std::thread server([&] {
      for (int peer; (peer = accept(listener.fd(), nullptr, nullptr)) >= 0; open.push_back(peer)) {
        (void)!send(peer, text.data(), text.size(), MSG_NOSIGNAL);
      }
    });
    const double before = registry_.Collect().empty() ? 0 : Dropped("unreachable");
    const auto exporter =
        Export({.endpoint = absl::StrCat("http://127.0.0.1:", listener.port())}, Short());
    exporter->Add(Spans("a"));
    AwaitDropped("unreachable", before + 1);
    exporter->Stop();
    shutdown(listener.fd(), SHUT_RDWR);
    server.join();
    for (const int peer : open) close(peer);
  }
}

TEST_F(ExporterTest, TlsIsMutualWhereTheCollectorAsksForIt) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const auto credentials = ServerCredentials(certificates.Options("server"), kListen);
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  Collector collector(*credentials);
  const std::string endpoint = "https://" + collector.Address() + "/";
  const auto exporter = Export({.endpoint = endpoint, .tls = certificates.Options("client")});
  exporter->Add(Spans("a"));
  EXPECT_EQ(collector.Await(1).front().name(), "a");
  // Without a certificate, and with one that an authority signed which it does not know.
  for (const TlsOptions& wrong :
       {Trust(certificates.File("ca.crt")), certificates.Options("stranger", "ca")}) {
    const double before = Dropped("unreachable");
    const auto refused = Export({.endpoint = endpoint, .tls = wrong}, Short());
    refused->Add(Spans("b"));
    AwaitDropped("unreachable", before + 1);
  }
}

TEST_F(ExporterTest, TheAuthorityAloneWillDoForACollectorThatAsksForNoCertificate) {
  const TestCertificates certificates;
  ASSERT_TRUE(certificates.ok());
  const auto credentials =
      ServerCredentials(certificates.Options("server"), kListen, ClientCertificate::kOptional);
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  Collector collector(*credentials);
  const std::string endpoint = "https://" + collector.Address();
  const auto exporter = Export({.endpoint = endpoint, .tls = Trust(certificates.File("ca.crt"))});
  exporter->Add(Spans("a"));
  EXPECT_EQ(collector.Await(1).front().name(), "a");
  // Another authority's collector gets nothing.
  const auto wary =
      Export({.endpoint = endpoint, .tls = Trust(certificates.File("other.crt"))}, Short());
  wary->Add(Spans("b"));
  AwaitDropped("unreachable", 1);
  EXPECT_EQ(collector.Await(1).size(), 1u);
}

TEST(TraceOptionsTest, StepsAreTracedAsOftenAsANumberSays) {
  TraceOptions options;
  CLI::App app;
  AddTraceFlags(app, &options);
  app.parse("--trace-step-seconds 0.5");
  EXPECT_EQ(options.step_interval, absl::Milliseconds(500));
  for (const char* wrong : {"nan", "-nan", "inf", "-1", "86401"}) {
    EXPECT_THROW(app.parse(std::string("--trace-step-seconds ") + wrong), CLI::ValidationError)
        << wrong;
  }
}

TEST_F(ExporterTest, WrongFlagsAreNamed) {
  const auto refusal = [&](const TraceOptions& options) {
    const auto exporter = Exporter::Create(options, ExportLimits(), &registry_);
    EXPECT_EQ(exporter.status().code(), absl::StatusCode::kInvalidArgument) << options.endpoint;
    return std::string(exporter.status().message());
  };
  for (const char* endpoint : {"collector:4317", "ftp://a:1", "http://", "http://a", "http://a:0",
                               "http://a:1/v1/traces", "http://unix:/x"}) {
    EXPECT_THAT(refusal({.endpoint = endpoint}), HasSubstr("--trace-endpoint: ")) << endpoint;
  }
  EXPECT_THAT(refusal({.endpoint = "https://a:1"}), HasSubstr("--trace-tls-ca is missing"));
  EXPECT_THAT(refusal({.endpoint = "https://a:1", .tls = Trust("/no/such")}),
              HasSubstr("--trace-tls-ca: cannot read /no/such"));
  EXPECT_THAT(refusal({.endpoint = "http://a:1", .tls = Trust("/no/such")}),
              HasSubstr("plain text"));
}

}  // namespace
}  // namespace ringleader::trace
