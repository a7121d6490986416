// The page on loopback: its JSON, its files, and what it refuses.
#include "coordinator/page/page_server.h"

#include <gmock/gmock.h>
#include <httplib.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/api/testing/server_fixture.h"
#include "coordinator/page/assets.h"

namespace ringleader::page {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

class PageServerTest : public api::testing::ServerTest {
 protected:
  PageServerTest() {
    auto page = PageServer::Start({.listen = Loopback()}, server_->InProcessChannel());
    EXPECT_TRUE(page.ok()) << page.status();
    page_ = *std::move(page);
    client_ = std::make_unique<httplib::Client>("127.0.0.1", page_->port());
  }

  httplib::Result Get(const std::string& path, const httplib::Headers& headers = {}) {
    httplib::Result result = client_->Get(path, headers);
    EXPECT_TRUE(result) << path << ": " << httplib::to_string(result.error());
    return result;
  }
  json GetJson(const std::string& path, int status = 200) {
    const httplib::Result result = Get(path);
    EXPECT_EQ(result->status, status) << result->body;
    EXPECT_EQ(result->get_header_value("Content-Type"), "application/json");
    return json::parse(result->body);
  }
  std::string Error(const std::string& path, int status) {
    return GetJson(path, status)["error"].get<std::string>();
  }
  void Submit(const std::string& name) {
    v1::Job job;
    ASSERT_TRUE(Create(name, &job).ok());
  }
  void Write(const std::function<absl::Status(store::WriteTransaction&)>& body) {
    const absl::Status written = store_->Write(body, store::Need::kOrdinary);
    ASSERT_TRUE(written.ok()) << written;
  }

  std::unique_ptr<PageServer> page_;
  std::unique_ptr<httplib::Client> client_;
};

TEST_F(PageServerTest, JobsComeInPagesAndByFilter) {
  for (int i = 0; i < 5; ++i) Submit(absl::StrCat("j", i));
  const json first = GetJson("/api/jobs?page_size=3");
  EXPECT_EQ(first["total_size"], 5);
  ASSERT_EQ(first["jobs"].size(), 3u);
  EXPECT_EQ(first["jobs"][0]["name"], "jobs/j4");
  EXPECT_EQ(first["jobs"][0]["state"], "PENDING");
  EXPECT_THAT(first["jobs"][0]["state_reason"].get<std::string>(), HasSubstr("4 trainers"));
  const std::string token = first["next_page_token"];
  EXPECT_EQ(GetJson("/api/jobs?page_size=3&page_token=" + token)["jobs"].size(), 2u);
  EXPECT_EQ(GetJson("/api/jobs?filter=name%3Dj2")["jobs"].size(), 1u);
  EXPECT_EQ(GetJson("/api/jobs?page_size=3&filter=name=j2")["jobs"].size(), 1u);
  EXPECT_EQ(GetJson("/api/jobs?filter=name=j2%20AND%20state%3DPENDING")["jobs"].size(), 1u);
  EXPECT_THAT(Error("/api/jobs?filter=colour%3Dred", 400), HasSubstr("expected state"));
  EXPECT_THAT(Error("/api/job", 404), HasSubstr("there is no /api/job"));
  EXPECT_THAT(Error("/api/jobs?page_size=many", 400), HasSubstr("page_size: a number"));
  EXPECT_THAT(Error("/api/jobs?filter=%ff%fe", 400), HasSubstr("filter: only printable ASCII"));
}

TEST_F(PageServerTest, AJobHasItsAttemptsAndTextsAreText) {
  Submit("a");
  const std::string hostile = "<img src=x onerror=alert(1)>\"'&";
  Write([&](store::WriteTransaction& t) {
    v1::Attempt attempt;
    attempt.set_number(1);
    attempt.mutable_failure()->set_message(hostile);
    attempt.mutable_plan()->add_reasons("because");
    return t.PutAttempt("a", attempt);
  });
  const json job = GetJson("/api/jobs/a");
  EXPECT_EQ(job["attempts"][0]["failure"]["message"], hostile);
  EXPECT_EQ(job["attempts"][0]["plan"]["reasons"][0], "because");
  EXPECT_EQ(Error("/api/jobs/none", 404), "jobs/none does not exist");
  EXPECT_EQ(Get("/api/jobs/a%2f..%2fb")->status, 404);
}

TEST_F(PageServerTest, AHistoryIsThinnedOut) {
  Submit("a");
  Write([&](store::WriteTransaction& t) {
    absl::StatusOr<v1::Job> job = t.GetJob("a");
    if (!job.ok()) return job.status();
    job->mutable_spec()->mutable_attention()->set_probe_every(16);
    if (absl::Status put = t.UpdateJob(&*job); !put.ok()) return put;
    for (uint64_t step = 1; step <= 500; ++step) {
      v1::StepReport report;
      report.set_step(step);
      report.set_loss(3.0);
      for (uint32_t rank = 0; rank < 4; ++rank) report.add_rank_tiles(100 + rank);
      for (uint32_t number = 0; number < 3; ++number) {
        v1::LayerReport* const layer = report.add_layers();
        layer->set_layer(number);
        layer->set_density(0.25);
        layer->set_recall(-1);
        if (step >= 16) layer->set_probed_recall(0.5);
        if (step % 16 == 0 && step != 496) layer->add_probed_recall_by_head(number + 0.25F);
        layer->add_tiles_per_ring_step(5);
        layer->add_tiles_per_ring_step(7);
      }
      if (absl::Status put = t.PutStep("a", report); !put.ok()) return put;
    }
    v1::EvalReport eval;
    eval.set_step(100);
    return t.PutEval("a", eval);
  });
  const json history = GetJson("/api/jobs/a/history?points=11&detail_points=5");
  ASSERT_EQ(history["steps"].size(), 11u);
  EXPECT_EQ(history["steps"][10]["step"], "500");
  EXPECT_EQ(history["steps"][0]["loss"], 3.0);
  EXPECT_FALSE(history["steps"][0].contains("layers"));
  EXPECT_FALSE(history["steps"][0].contains("rank_tiles"));
  ASSERT_EQ(history["details"].size(), 5u);
  const json& detail = history["details"][4];
  EXPECT_EQ(detail["density"], json({0.25, 0.25, 0.25}));
  EXPECT_EQ(detail["recall"], json({-1.0, -1.0, -1.0}));
  EXPECT_EQ(detail["probed_recall"], json({0.5, 0.5, 0.5}));
  EXPECT_EQ(history["details"][0]["probed_recall"], json({-1.0, -1.0, -1.0})) << "none yet";
  EXPECT_EQ(detail["rank_tiles"], json({"100", "101", "102", "103"}));
  EXPECT_EQ(detail["ring_step_tiles"], json({"15", "21"}));
  EXPECT_EQ(history["evals"].size(), 1u);
  EXPECT_EQ(history["probe"]["step"], "480") << "step 496 was due, and is not in the record";
  ASSERT_EQ(history["probe"]["layers"].size(), 3u);
  EXPECT_EQ(history["probe"]["layers"][2], (json{{"layer", 2}, {"by_head", {2.25}}}));
  EXPECT_THAT(Error("/api/jobs/a/history?points=3000", 400), HasSubstr("give 2 to 2000"));
  EXPECT_EQ(Error("/api/jobs/none/history", 404), "jobs/none does not exist");
}

TEST_F(PageServerTest, LogsEndOrGoOnBehindAnOffset) {
  Submit("a");
  Write([&](store::WriteTransaction& t) {
    v1::Attempt attempt;
    attempt.set_number(1);
    attempt.set_state(v1::Attempt::FAILED);
    if (absl::Status put = t.PutAttempt("a", attempt); !put.ok()) return put;
    std::vector<v1::LogLine> lines(1500);
    for (size_t i = 0; i < lines.size(); ++i) {
      lines[i].set_text(absl::StrCat("line ", i));
      lines[i].set_rank(static_cast<int32_t>(i % 2));
    }
    return t.AppendLogs("a", 1, lines);
  });
  const json end = GetJson("/api/jobs/a/logs?lines=2");
  ASSERT_EQ(end["lines"].size(), 2u);
  EXPECT_EQ(end["lines"][1]["text"], "line 1499");
  EXPECT_EQ(GetJson("/api/jobs/a/logs?lines=3&after=10")["lines"][0]["offset"], "11");
  EXPECT_EQ(GetJson("/api/jobs/a/logs?lines=3&rank=1")["lines"][0]["text"], "line 1495");
  EXPECT_EQ(GetJson("/api/jobs/a/logs?after=1500"), json::object());
  EXPECT_THAT(Error("/api/jobs/a/logs?lines=5000", 400), HasSubstr("from 1 to 1000"));
  EXPECT_THAT(Error("/api/jobs/a/logs?attempt=9", 404), HasSubstr("no attempt 9"));
}

TEST_F(PageServerTest, NodesAreListed) {
  EXPECT_EQ(GetJson("/api/nodes"), json::object());
}

TEST_F(PageServerTest, EveryAnswerForbidsWhatThePageDoesNotNeed) {
  for (const char* path : {"/", "/page.js", "/api/jobs", "/api/jobs/none", "/none"}) {
    const httplib::Result result = Get(path);
    EXPECT_THAT(result->get_header_value("Content-Security-Policy"),
                HasSubstr("default-src 'none'; script-src 'self'; style-src 'self'; "))
        << path;
    EXPECT_THAT(result->get_header_value("Content-Security-Policy"), Not(HasSubstr("unsafe")));
    EXPECT_EQ(result->get_header_value("X-Content-Type-Options"), "nosniff") << path;
    EXPECT_EQ(result->get_header_value("X-Frame-Options"), "DENY") << path;
    EXPECT_EQ(result->get_header_value("Cross-Origin-Resource-Policy"), "same-origin") << path;
    EXPECT_EQ(result->get_header_value_count("Access-Control-Allow-Origin"), 0u) << path;
    EXPECT_EQ(result->get_header_value_count("Set-Cookie"), 0u) << path;
  }
}

TEST_F(PageServerTest, ItsFilesNameNoOtherPlaceAndHoldNoMarkupOfTheirOwn) {
  EXPECT_THAT(Get("/")->body, HasSubstr("<!doctype html>"));
  for (const Asset& asset : Assets()) {
    std::string text(asset.text);
    EXPECT_EQ(Get(asset.path)->body, text);
    const std::string svg = "\"http://www.w3.org/2000/svg\"";  // a name, not an address
    if (const size_t at = text.find(svg); at != std::string::npos) text.erase(at, svg.size());
    for (const char* bad : {"http:", "https:", "//cdn", "innerHTML", "insertAdjacentHTML",
                            "document.write", "eval(", " style=", "onclick=", "document.cookie"}) {
      EXPECT_THAT(text, Not(HasSubstr(bad))) << asset.path;
    }
  }
}

// A page of another site whose name was made to lead to this machine.
TEST_F(PageServerTest, OnLoopbackOnlyNamesOfThisMachineAreAnswered) {
  for (const char* host : {"localhost:80", "localhost", "127.0.0.1:9", "127.0.0.1", "[::1]:7072"}) {
    EXPECT_EQ(Get("/api/jobs", {{"Host", host}})->status, 200) << host;
  }
  for (const char* host :
       {"evil.example", "evil.example:7072", "127.0.0.1.evil.example", "10.0.0.7",
        "localhost.evil.example:80", "", "[::2]:1", ":", "[", "]:"}) {
    EXPECT_EQ(Get("/api/jobs", {{"Host", host}})->status, 403) << host;
    EXPECT_EQ(Get("/", {{"Host", host}})->status, 403) << host;
  }
}

TEST_F(PageServerTest, ItIsReadOnly) {
  EXPECT_EQ(client_->Post("/api/jobs")->status, 403);
  EXPECT_EQ(client_->Delete("/api/jobs/a")->status, 403);
  EXPECT_EQ(client_->Put("/api/jobs/a", "{}", "application/json")->status, 403);
}

TEST_F(PageServerTest, ARequestCostsNoMoreThanItsAnswer) {
  EXPECT_EQ(Get("/api/jobs/" + std::string(8000, 'a'))->status, 404);
  EXPECT_EQ(Get("/api/jobs/" + std::string(250, 'a') + "/history")->status, 404);
  std::string parts = "bytes=0-";
  while (parts.size() < 7000) parts += ",0-";
  const httplib::Result many = Get("/page.js", {{"Range", parts}});
  EXPECT_EQ(many->status, 200);
  EXPECT_EQ(many->body, Get("/page.js")->body);
  EXPECT_LT(Get("/none", {{"Range", parts}})->body.size(), 1000u);
}

TEST_F(PageServerTest, IsNotOpenToOtherMachinesOrWithoutRoles) {
  const auto refusal = [&](const PageOptions& options) {
    return PageServer::Start(options, server_->InProcessChannel()).status();
  };
  const Address everywhere{.host = "0.0.0.0", .port = 0, .path = ""};
  TlsOptions insecure;
  insecure.insecure = true;
  for (const bool has_roles : {false, true}) {
    const absl::Status open =
        refusal({.listen = everywhere, .tls = insecure, .has_roles = has_roles});
    EXPECT_EQ(open.code(), absl::StatusCode::kFailedPrecondition) << open;
    EXPECT_THAT(std::string(open.message()), HasSubstr("without TLS whoever reaches it"));
  }
  TlsOptions tls;
  tls.cert_path = "server.crt";
  const absl::Status nobody = refusal({.listen = Loopback(), .tls = tls, .has_roles = false});
  EXPECT_THAT(std::string(nobody.message()), HasSubstr("give --access FILE"));
  EXPECT_EQ(refusal({.listen = {.host = "", .port = 0, .path = "/run/page"}}).code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status taken =
      refusal({.listen = {.host = "127.0.0.1", .port = page_->port(), .path = ""}});
  EXPECT_EQ(taken.code(), absl::StatusCode::kAlreadyExists) << taken;
}

}  // namespace
}  // namespace ringleader::page
