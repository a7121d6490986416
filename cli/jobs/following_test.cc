// ringctl against a coordinator in this process: following a running job, and what is reported of
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/time/clock.h"
#include "cli/testing/cli_fixture.h"
#include "tests/faults/tcp_proxy.h"

namespace ringleader::cli {
namespace {

using ::testing::HasSubstr;

TEST_F(CliTest, FollowPrintsALineAStep) {
  ScriptRun("other", v1::Job::SUCCEEDED);
  const Result result = Run({"watch", "other"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("other is SUCCEEDED\n"));

  coordinator_.watch.clear();
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs.erase("jobs/tiny");
  const Result follow = Run({"submit", Path("job.yaml"), "--follow"});
  EXPECT_EQ(follow.code, 0) << follow.err;
  EXPECT_EQ(follow.out,
            "tiny is PENDING\n"
            "tiny is RUNNING\n"
            "step 1/3  loss 5.0000  tokens/s 8192  seconds 2.00  density 0.600  imbalance 1.010  "
            "eta 4s\n"
            "step 2/3  loss 4.0000  tokens/s 8192  seconds 2.00  density 0.600  imbalance 1.010  "
            "eta 2s\n"
            "step 3/3  loss 3.0000  tokens/s 8192  seconds 2.00  density 0.600  imbalance 1.010  "
            "eta 0s\n"
            "held-out loss 2.5000, 97.5 % of 40 answers right; dense 2.2500, 97.5 % of 40 answers "
            "right after step 3 (1.0 s)\n"
            "tiny is SUCCEEDED\n");
}

// A machine that vanished closes no connection: who watches asks whether it is there.
TEST_F(CliTest, AWatchGivesAConnectionUpThatNobodyAnswers) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  faults::TcpProxy proxy(coordinator_.port());
  environment_["RINGLEADER_ADDRESS"] = proxy.address();
  keepalive_ = {.interval = absl::Milliseconds(200), .patience = absl::Milliseconds(200)};
  std::atomic<bool> is_cut = false;
  coordinator_.on_watch = [&] {
    if (!is_cut.exchange(true)) proxy.Cut();
  };
  std::thread network([&] {
    while (!is_cut) absl::SleepFor(absl::Milliseconds(1));
    // What the first connection held up is told then, too, if anybody still reads it.
    const absl::Time patience = absl::Now() + absl::Seconds(60);
    while (proxy.connections() < 2 && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
    proxy.Heal();
  });
  const Result result = Run({"watch", "tiny"});
  network.join();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("is away"));
  EXPECT_GE(proxy.connections(), 2);
  EXPECT_EQ(KeepalivePolicy().interval, absl::Seconds(20));
  EXPECT_EQ(KeepalivePolicy().patience, absl::Seconds(10));
}

TEST_F(CliTest, FollowingEndsWithTheJobsResult) {
  ScriptRun("bad", v1::Job::FAILED);
  const Result failed = Run({"watch", "bad"});
  EXPECT_EQ(failed.code, kJobFailed);
  EXPECT_THAT(failed.out, HasSubstr("bad is FAILED: rank 2 on b: out of memory"));
  coordinator_.watch.clear();
  ScriptRun("gone", v1::Job::CANCELLED);
  EXPECT_EQ(Run({"watch", "gone"}).code, kJobCancelled);
}

// The job's own line says it, unless the job is already beyond that.
TEST_F(CliTest, WhyAnAttemptFailedIsSaidOnce) {
  const auto lines_of = [&](const std::string& reason) {
    coordinator_.watch.clear();
    ScriptRun("bad", v1::Job::FAILED);
    for (v1::WatchJobResponse& response : coordinator_.watch) {
      if (response.has_job()) response.mutable_job()->add_attempts()->set_number(1);
    }
    v1::Job& last = *coordinator_.watch.back().mutable_job();
    last.set_state_reason(reason);
    v1::Failure& failure = *last.mutable_attempts(0)->mutable_failure();
    failure.set_rank(2);
    failure.set_node("nodes/b");
    failure.set_message("out of memory");
    const std::string out = Run({"watch", "bad"}).out;
    return out.substr(out.find("step 3/3"));
  };
  const std::string once = lines_of("attempt 1 failed: rank 2 on nodes/b: out of memory");
  EXPECT_THAT(once,
              HasSubstr("\nbad is FAILED: attempt 1 failed: rank 2 on nodes/b: out of memory"));
  EXPECT_EQ(once.find("out of memory"), once.rfind("out of memory")) << once;
  EXPECT_THAT(lines_of("attempt 2: no node has room"),
              HasSubstr("\nattempt 1 failed: rank 2 on b: out of memory\n"
                        "bad is FAILED: attempt 2: no node has room\n"));
}

TEST_F(CliTest, ATerminalGetsABar) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  const Result result = Run({"watch", "tiny"}, /*columns=*/120);
  EXPECT_THAT(result.out, HasSubstr("\r\033[K[########----------------] 1/3  loss 5.0000  ETA 4s  "
                                    "8,192 tokens/s  imbalance 1.010"));
  EXPECT_THAT(result.out, HasSubstr("[########################] 3/3"));
}

TEST_F(CliTest, TheBarFitsTheTerminal) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  const std::map<int, std::string> bars = {
      {81, "[######--------------] 1/3  loss 5.0000  ETA 4s  8,192 tokens/s  imbalance 1.010"},
      {80, "[######-------------] 1/3  loss 5.0000  ETA 4s  8,192 tokens/s  imbalance 1.010"},
      {60, "[#####-----------] 1/3  loss 5.0000  ETA 4s  8,192 tokens/s"},
      {40, "[####--------] 1/3  loss 5.0000  ETA 4s"},
      {26, "[##----] 1/3  loss 5.0000"},
      {20, "1/3  loss 5.0000"},
      {10, "1/3  los…"},
      {1, ""}};
  for (const auto& [columns, bar] : bars) {
    EXPECT_THAT(Run({"watch", "tiny"}, columns).out, HasSubstr("\r\033[K" + bar + "\r\033[K"))
        << columns;
  }
}

TEST_F(CliTest, ASkippedStepStaysInSight) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    for (v1::StepReport& step : *response.mutable_steps()) step.set_skipped(step.step() == 2);
  }
  EXPECT_THAT(Run({"watch", "tiny"}, /*columns=*/120).out,
              HasSubstr("\nstep 2  skipped: gradient was not finite\n"));
  EXPECT_THAT(Run({"watch", "tiny"}).out, HasSubstr("eta 2s  skipped: gradient was not finite\n"));
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    for (v1::StepReport& step : *response.mutable_steps()) step.set_no_labels(step.skipped());
  }
  const std::string out = Run({"watch", "tiny"}).out;
  EXPECT_THAT(out, HasSubstr("eta 2s  skipped: no token to predict\n"));
  EXPECT_THAT(out, HasSubstr("step 2/3  loss -  tokens/s"));
}

TEST_F(CliTest, FollowingResumesBehindWhatItHasSeen) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  const std::string undisturbed = Run({"watch", "tiny"}).out;
  coordinator_.watch_requests.clear();
  coordinator_.break_streams_after = {3, 0, 2};
  const Result result = Run({"watch", "tiny"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out, undisturbed);
  ASSERT_EQ(coordinator_.watch_requests.size(), 4);
  EXPECT_EQ(coordinator_.watch_requests[1].after_revision(), 2);
  EXPECT_EQ(coordinator_.watch_requests[1].after_reports().step_sequence(), 1);
  EXPECT_EQ(coordinator_.watch_requests[3].after_reports().step_sequence(), 3);
}

// Steps that a retry trains again have lower numbers than those of the attempt that was lost.
TEST_F(CliTest, FollowingResumesBehindStepsThatAreTrainedAgain) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(0);
  const auto with_step =
      std::ranges::find_if(coordinator_.watch, [](const v1::WatchJobResponse& response) {
        return response.steps_size() > 0 && response.steps(0).step() == 3;
      });
  ASSERT_NE(with_step, coordinator_.watch.end());
  v1::WatchJobResponse again;
  for (const uint64_t step : {2, 3}) {
    *again.add_steps() = with_step->steps(0);
    again.mutable_steps(again.steps_size() - 1)->set_step(step);
    again.mutable_steps(again.steps_size() - 1)->set_loss(7.5);
  }
  const int before = static_cast<int>(with_step - coordinator_.watch.begin()) + 1;
  coordinator_.watch.insert(coordinator_.watch.begin() + before, again);
  const std::string undisturbed = Run({"watch", "tiny"}).out;
  EXPECT_THAT(undisturbed, HasSubstr("step 2/3  loss 7.5000"));
  for (const int broken : {before, before + 1}) {
    coordinator_.break_streams_after = {broken};
    const Result result = Run({"watch", "tiny"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.out, undisturbed) << broken;
  }
}

// The job was resumed when its reports had been deleted, and waits.
TEST_F(CliTest, HistoryDoesNotWaitForStepsThatAreKeptNoMore) {
  v1::Job& job = AddJob("old", v1::Job::PAUSED);
  job.mutable_progress()->set_step(100);
  v1::WatchJobResponse& only = coordinator_.watch.emplace_back();
  *only.mutable_job() = job;
  only.mutable_job()->set_revision(7);
  int watches = 0;
  coordinator_.on_watch = [&] { ++watches; };
  coordinator_.break_streams_after = {1, 1, 1};  // as one that goes on would be found to
  EXPECT_EQ(Run({"history", "old"}).code, 0);
  EXPECT_EQ(watches, 1);
}

// The job was deleted, and its name given to another, while the coordinator was away.
TEST_F(CliTest, FollowingEndsWhereAnotherJobHasTheName) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  int jobs = 0;
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    if (!response.has_job()) continue;
    response.mutable_job()->set_uid(jobs++ == 0 ? "tiny-1" : "tiny-2");
  }
  ASSERT_GE(jobs, 2);
  const Result result = Run({"watch", "tiny"});
  EXPECT_EQ(result.code, kNotFound);
  EXPECT_THAT(result.err, HasSubstr("another job has its name now (tiny-2, not tiny-1)"));
  EXPECT_THAT(result.out, ::testing::Not(HasSubstr("SUCCEEDED")));
}

TEST_F(CliTest, LogsResumeBehindTheLastLine) {
  AddJob("tiny", v1::Job::RUNNING).mutable_spec()->mutable_resources()->set_trainers(2);
  for (int i = 1; i <= 4; ++i) {
    v1::LogLine& line = coordinator_.log.emplace_back();
    line.set_offset(i);
    line.set_attempt(1);
    line.set_rank(i % 2);
    line.set_text("line " + std::to_string(i));
    line.mutable_time()->set_seconds(1'000'000 + i);
    line.mutable_time()->set_nanos(500'000'000);
  }
  coordinator_.break_streams_after = {2};
  coordinator_.log_uid = "tiny-1";
  const Result result = Run({"logs", "-f", "tiny", "--tail", "100"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "1970-01-12T13:46:41.500Z [rank 1] line 1\n1970-01-12T13:46:42.500Z [rank 0] line 2\n"
            "1970-01-12T13:46:43.500Z [rank 1] line 3\n1970-01-12T13:46:44.500Z [rank 0] line 4\n");
  ASSERT_EQ(coordinator_.log_requests.size(), 2);
  EXPECT_EQ(coordinator_.log_requests[0].last_lines(), 100);
  EXPECT_EQ(coordinator_.log_requests[1].last_lines(), 0);
  EXPECT_EQ(coordinator_.log_requests[1].after_offset(), 2);
  // Another job may have got the name meanwhile.
  EXPECT_EQ(coordinator_.log_requests[0].job_uid(), "");
  EXPECT_EQ(coordinator_.log_requests[1].job_uid(), "tiny-1");
  EXPECT_EQ(Run({"logs", "tiny", "--rank", "0", "--attempt", "1"}).out,
            "1970-01-12T13:46:42.500Z line 2\n1970-01-12T13:46:44.500Z line 4\n");
}

// Also before an attempt has been placed.
TEST_F(CliTest, LogsOfARankThatTheJobDoesNotHaveAreAnError) {
  AddJob("tiny", v1::Job::PENDING).mutable_spec()->mutable_resources()->set_trainers(2);
  const Result result = Run({"logs", "tiny", "--rank", "9", "--follow"});
  EXPECT_EQ(result.code, kNotFound);
  EXPECT_THAT(result.err, HasSubstr("jobs/tiny has no rank 9; its ranks are 0 to 1"));
  EXPECT_TRUE(coordinator_.log_requests.empty());
  EXPECT_EQ(Run({"logs", "tiny", "--rank", "1"}).code, 0);
}

TEST_F(CliTest, ProfileSaysWhereTheTracesGo) {
  coordinator_.jobs["jobs/tiny"].set_name("jobs/tiny");
  EXPECT_THAT(Run({"profile", "tiny", "--steps", "3"}).out,
              HasSubstr("tiny traces its next 3 steps into /checkpoints/3"));
  EXPECT_NE(Run({"profile", "nobody"}).code, 0);
  EXPECT_NE(Run({"profile", "tiny", "--steps", "0"}).code, 0);
}

TEST_F(CliTest, ReportCountsSamplesAndTheirPadding) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  EXPECT_FALSE(
      nlohmann::json::parse(Run({"report", "tiny", "-o", "json"}).out).contains("samples"));
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    for (v1::StepReport& step : *response.mutable_steps()) {
      step.set_samples(16);
      step.set_micro_batches(10);
      step.set_padding_tokens(4096);
      step.set_dealt_imbalance(1.02);
      step.set_overlong_documents(3);
      step.set_overlong_tokens(70000);
    }
  }
  const auto json = nlohmann::json::parse(Run({"report", "tiny", "-o", "json"}).out)["samples"];
  EXPECT_EQ(json["samples"], 48.0);
  EXPECT_EQ(json["micro_batches"], 30.0);
  EXPECT_EQ(json["padding_tokens"], 12288.0);
  EXPECT_EQ(json["padding_share"], 0.2);
  EXPECT_EQ(json["overlong_documents"], 3);
  const std::string table = Run({"report", "tiny"}).out;
  EXPECT_THAT(table, HasSubstr("48 in 30 micro-batches"));
  EXPECT_THAT(table, HasSubstr("12288 tokens, 20.0 %"));
  EXPECT_THAT(table, HasSubstr("slowest 1.020 of the mean"));
  EXPECT_THAT(table, HasSubstr("3 of 70000 tokens, split"));
}

// A watch of a job that runs does not end by itself.
TEST_F(CliTest, ReportAndHistoryOfAJobThatRunsEndAtItsNewestStep) {
  ScriptRun("tiny", v1::Job::RUNNING);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(2);
  const auto json = nlohmann::json::parse(Run({"report", "tiny", "-o", "json"}).out);
  EXPECT_EQ(json["state"], "RUNNING");
  EXPECT_EQ(json["loss_last"], 4.0);
  const std::string csv = Run({"history", "tiny", "-o", "csv"}).out;
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3) << csv;
}

// Of what an attempt trained beyond its last checkpoint the next one's steps count.
TEST_F(CliTest, HistoryOfAJobThatTrainsStepsAgainHasTheNewOnes) {
  ScriptRun("tiny", v1::Job::RUNNING);
  coordinator_.jobs["jobs/tiny"].mutable_progress()->set_step(2);
  const auto last =
      std::find_if(coordinator_.watch.begin(), coordinator_.watch.end(), [](const auto& response) {
        return response.steps_size() > 0 && response.steps(0).step() == 3;
      });
  ASSERT_NE(last, coordinator_.watch.end());
  v1::WatchJobResponse again;
  *again.add_steps() = last->steps(0);
  again.mutable_steps(0)->set_step(2);
  again.mutable_steps(0)->set_loss(3.5);
  // The coordinator sends steps in the order in which they were written, each once.
  std::erase_if(coordinator_.watch, [](const auto& response) {
    return response.steps_size() > 0 && response.steps(0).step() == 2;
  });
  coordinator_.watch.push_back(again);
  std::istringstream lines(Run({"history", "tiny", "-o", "jsonl"}).out);
  std::vector<double> losses;
  for (std::string line; std::getline(lines, line);) {
    losses.push_back(nlohmann::json::parse(line)["loss"]);
  }
  EXPECT_EQ(losses, (std::vector<double>{5, 3.5}));
}

// What changes in the plan of a running job is told once as it is announced and once as it is
// taken.
TEST_F(CliTest, WatchAndGetTellWhyAPlanChanges) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  v1::WatchJobResponse announced;
  *announced.mutable_job() = coordinator_.watch.back().job();
  announced.mutable_job()->set_state(v1::Job::RUNNING);
  v1::Attempt* attempt = announced.mutable_job()->attempts().empty()
                             ? announced.mutable_job()->add_attempts()
                             : announced.mutable_job()->mutable_attempts(0);
  v1::PlanChange* const change = attempt->add_plan_changes();
  change->set_version(2);
  change->set_effective_step(70);
  change->set_state(v1::PlanChange::ANNOUNCED);
  change->set_layout(v1::ParallelismSpec::ZIGZAG);
  change->mutable_ring()->set_kind(v1::ParallelismSpec::FLAT);
  change->mutable_ring()->set_inner(4);
  change->add_reasons("zigzag is faster");
  v1::SlowRank* const slow = attempt->add_slow_ranks();
  slow->set_rank(3);
  slow->set_node("nodes/b");
  slow->set_ratio(1.25);
  slow->set_step(61);
  v1::WatchJobResponse taken = announced;
  taken.mutable_job()->mutable_attempts(0)->mutable_plan_changes(0)->set_state(
      v1::PlanChange::IN_FORCE);
  coordinator_.watch.insert(coordinator_.watch.end() - 1, {announced, announced, taken});
  const std::string watched = Run({"watch", "tiny"}).out;
  EXPECT_THAT(watched, HasSubstr("plan 2 is to begin at step 70: zigzag; flat of 4. zigzag is "
                                 "faster\nrank 3 on b is slow: 1.25 x the time of others for the "
                                 "same work (since step 61)\nplan 2 from step 70: zigzag"));
  coordinator_.jobs["jobs/tiny"] = taken.job();
  EXPECT_THAT(
      Run({"get", "tiny"}).out,
      HasSubstr("\n- plan 2 from step 70: zigzag; flat of 4. zigzag is faster\n- rank 3 on b "));
  const std::string on_a_terminal = Run({"get", "tiny"}, 60).out;
  EXPECT_THAT(on_a_terminal,
              HasSubstr("\n- rank 3 on b is slow: 1.25 x the time of others for the\n"
                        "  same work (since step 61)\n"));
}

TEST_F(CliTest, AReportOfOneEvaluationSaysWhen) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  v1::Job& job = coordinator_.jobs["jobs/tiny"];
  *job.mutable_first_eval() = job.last_eval();
  *coordinator_.watch.back().mutable_job() = job;
  EXPECT_THAT(Run({"report", "tiny"}).out,
              HasSubstr("held-out loss                   2.5000 after step 3\n"));
}

TEST_F(CliTest, HistoryHasEveryStep) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  // The second looks as if it had been trained again after a failure.
  v1::WatchJobResponse again = coordinator_.watch[3];
  again.mutable_steps(0)->set_loss(3.5);
  again.mutable_steps(0)->set_skipped(true);
  again.mutable_steps(0)->mutable_time()->set_seconds(1'000'000);
  coordinator_.watch.insert(coordinator_.watch.begin() + 5, again);
  const Result csv = Run({"history", "tiny", "-o", "csv"});
  EXPECT_EQ(csv.code, 0) << csv.err;
  EXPECT_EQ(csv.out,
            "step,time,loss,heldout_loss,gradient_norm,learning_rate,tokens,step_seconds,"
            "tokens_per_second,density,worker_imbalance,step_imbalance,ring_imbalance,"
            "group_imbalance,peak_memory_bytes,plan_version,skipped,data_seconds,index_seconds,"
            "attention_forward_seconds,"
            "attention_backward_seconds,linear_seconds,exposed_communication_seconds,"
            "exposed_offload_seconds,optimizer_seconds,checkpoint_seconds,evaluation_seconds,"
            "exposed_exchange_seconds\r\n"
            "1,,5,,0,0,16384,2,8192,0.6,1.01,1.1,0,0,0,0,false,0,0,0,0,0.5,0,0.25,0,0,0,0\r\n"
            "2,1970-01-12T13:46:40.000Z,3.5,,0,0,16384,2,8192,0.6,1.01,1.1,0,0,0,0,true,"
            "0,0,0,0,0.5,0,0.25,0,0,0,0\r\n"
            "3,,3,2.5,0,0,16384,2,8192,0.6,1.01,1.1,0,0,0,0,false,0,0,0,0,0.5,0,0.25,0,0,0,0\r\n");
  std::istringstream lines(Run({"history", "tiny", "-o", "jsonl"}).out);
  std::vector<double> losses;
  for (std::string line; std::getline(lines, line);) {
    losses.push_back(nlohmann::json::parse(line)["loss"]);
  }
  EXPECT_EQ(losses, (std::vector<double>{5, 3.5, 3}));
  EXPECT_EQ(nlohmann::json::parse(Run({"history", "tiny", "-o", "json"}).out)["steps"].size(), 3);
  EXPECT_THAT(Run({"history", "tiny"}).out,
              HasSubstr("3     3.0000  2.5000    8,192     2.00     60.0 %   1.010      -\n"));
  EXPECT_EQ(Run({"history", "nobody", "-o", "csv"}).code, kNotFound);
  const Result other = Run({"list", "-o", "csv"});
  EXPECT_EQ(other.code, kUsage);
  EXPECT_THAT(other.err, HasSubstr("'csv' is not one of table, json, yaml, name"));
}

TEST_F(CliTest, WatchingAJobThatHasEndedInJsonGivesAStepALine) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  // Several steps may come at once.
  *coordinator_.watch[2].add_steps() = coordinator_.watch[3].steps(0);
  coordinator_.watch.erase(coordinator_.watch.begin() + 3);
  std::istringstream lines(Run({"watch", "tiny", "-o", "json"}).out);
  std::vector<int> steps;
  int evals = 0;
  std::string state;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    for (const auto& step : json["steps"])
      steps.push_back(std::stoi(step["step"].get<std::string>()));
    EXPECT_LE(json["steps"].size(), 1u);
    evals += static_cast<int>(json["evals"].size());
    if (json.contains("job")) state = json["job"]["state"];
  }
  EXPECT_EQ(steps, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(evals, 1);
  EXPECT_EQ(state, "SUCCEEDED");
}

TEST_F(CliTest, ReportSumsUpTheSteps) {
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    for (v1::StepReport& step : *response.mutable_steps()) step.set_skipped(step.step() == 2);
  }
  const auto json = nlohmann::json::parse(Run({"report", "tiny", "-o", "json"}).out);
  EXPECT_EQ(json["loss_first"], 5.0);
  EXPECT_EQ(json["loss_last"], 3.0);
  EXPECT_EQ(json["skipped_steps"], 1);
  EXPECT_EQ(json["skipped_at_end"], 0);
  EXPECT_EQ(json["heldout_first"], 5.0);
  EXPECT_EQ(json["heldout_last"], 2.5);
  const nlohmann::json recall = {{"asked", 40}, {"right", 39}, {"loss", 0.25}};
  EXPECT_EQ(json["last_evaluation"]["answers"]["recall"], recall);
  EXPECT_EQ(json["last_evaluation"]["dense"],
            (nlohmann::json{{"loss", 2.25}, {"answers", {{"recall", recall}}}}));
  EXPECT_EQ(json["tokens_per_second"], 8192.0);
  EXPECT_NEAR(json["density"].get<double>(), 0.6, 1e-9);
  EXPECT_NEAR(json["worker_imbalance"].get<double>(), 1.01, 1e-9);
  EXPECT_EQ(json["phases"]["linear"], 1.5);
  EXPECT_EQ(json["phases"]["exposed_offload"], 0.75);
  const std::string table = Run({"report", "tiny"}).out;
  EXPECT_THAT(table, HasSubstr("1 for NaN or infinite gradients, 0 of them at the end"));
  EXPECT_THAT(table, HasSubstr("held-out loss                   5.0000 -> 2.5000 (-50.0 %)"));
  EXPECT_THAT(
      table,
      HasSubstr("\n"
                "LAYER  DENSITY  RECALL  PROBED  WORST HEAD  DIAGONALS BY  COLUMNS BY\n"
                "0      100.0 %  -       -       -           -             -\n"
                "1      20.0 %   90.0 %  50.0 %  1: 25.0 %   max_slashes   vertical_mass\n"));
  EXPECT_EQ(json["slashes_at_budget_per_layer"][0], 0.75);
  EXPECT_EQ(json["probed_recall_per_head"], (nlohmann::json{{"1", {0.75, 0.25}}}));
  EXPECT_LE(LongestLine(Run({"report", "tiny"}, 80).out), 80);
  EXPECT_EQ(json["balance"]["moved"], 24.0);
  EXPECT_EQ(json["balance"]["anchor_missed"], 6.0);
  EXPECT_THAT(table, HasSubstr("24 choices moved, 25.0 % missed the anchor"));
  EXPECT_EQ(json["phases_are"], "maxima over ranks");
  EXPECT_THAT(table, HasSubstr("phases add up to more than all steps"));
  coordinator_.watch.clear();
  AddJob("young", v1::Job::RUNNING).set_state_reason("loading");
  *coordinator_.watch.emplace_back().mutable_job() = coordinator_.jobs["jobs/young"];
  EXPECT_EQ(Run({"report", "young"}).code, kConflict);
  EXPECT_THAT(Run({"report", "young"}).err,
              HasSubstr("young is without a step (RUNNING: loading)"));
  coordinator_.watch.clear();
  AddJob("stopped", v1::Job::CANCELLED);
  EXPECT_THAT(Run({"report", "stopped"}).err, HasSubstr("ended without a step"));
}

}  // namespace
}  // namespace ringleader::cli
