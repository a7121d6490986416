// What trainers report step by step and line by line: how it is read, and how much of it is kept.
#include <gmock/gmock.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/store/testing/opened_store.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

v1::LogLine Line(int rank, const std::string& text) {
  v1::LogLine line;
  line.set_rank(rank);
  line.set_text(text);
  return line;
}

class ReportsTest : public testing::OpenedStoreTest {
 protected:
  ReportsTest()
      : OpenedStoreTest({.log_bytes_per_job = 2000, .steps_per_job = 256, .evals_per_job = 256}) {}

  LogPage ReadLogs(const LogQuery& query) {
    const auto page = Read([&](ReadTransaction& t) { return t.ReadLogs(query); });
    EXPECT_TRUE(page.ok()) << page.status();
    return page.value_or(LogPage());
  }
  std::vector<std::string> Logs(const LogQuery& query) {
    std::vector<std::string> texts;
    for (const v1::LogLine& line : ReadLogs(query).lines)
      texts.push_back(absl::StrCat(line.offset(), ":", line.text()));
    return texts;
  }
  void Evaluate(const std::string& job, const std::vector<uint64_t>& steps) {
    Write([&](WriteTransaction& t) -> absl::Status {
      v1::EvalReport eval;
      for (const uint64_t step : steps) {
        eval.set_step(step);
        RETURN_IF_ERROR(t.PutEval(job, eval));
      }
      return absl::OkStatus();
    });
  }
  // The steps of those that are kept, in the order of writing.
  std::vector<uint64_t> Evaluated(const std::string& job) {
    const auto page = Read([&](ReadTransaction& t) { return t.ListEvals(job, 0, 10'000); });
    EXPECT_TRUE(page.ok()) << page.status();
    std::vector<uint64_t> steps;
    for (const v1::EvalReport& eval : page.value_or(EvalPage()).evals) steps.push_back(eval.step());
    return steps;
  }
  void AppendLines(const std::string& job, uint32_t attempt, int count) {
    for (int i = 0; i < count; ++i) {
      Write([&](WriteTransaction& t) {
        return t.AppendLogs(job, attempt, {Line(0, std::string(100, 'x'))});
      });
    }
  }
};

using RoomyReportsTest = testing::OpenedStoreTest;

TEST_F(ReportsTest, StepsComeInOrderAndTrainedAgainReplace) {
  Create("a");
  const auto put = [&](uint64_t step, double loss) {
    Write([&](WriteTransaction& t) {
      v1::StepReport report;
      report.set_step(step);
      report.set_loss(loss);
      return t.PutStep("a", report);
    });
  };
  for (uint64_t step = 1; step <= 4; ++step) put(step, 1.0);
  auto page = Read([](ReadTransaction& t) { return t.ListSteps("a", 1, 0, 2); });
  ASSERT_THAT(page->steps, SizeIs(2));
  EXPECT_EQ(page->steps[0].step(), 2u);
  page = Read([&](ReadTransaction& t) { return t.ListSteps("a", 0, page->last_sequence, 10); });
  ASSERT_THAT(page->steps, SizeIs(1));
  const uint64_t seen = page->last_sequence;
  put(3, 2.0);  // by a later attempt
  page = Read([&](ReadTransaction& t) { return t.ListSteps("a", 0, seen, 10); });
  ASSERT_THAT(page->steps, SizeIs(1));
  EXPECT_EQ(page->steps[0].step(), 3u);
  EXPECT_EQ(page->steps[0].loss(), 2.0);
  page = Read([&](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 10); });
  std::vector<uint64_t> steps;
  for (const v1::StepReport& step : page->steps) steps.push_back(step.step());
  EXPECT_THAT(steps, ElementsAre(1, 2, 4, 3)) << "in the order of writing";
}

// Whoever pages through what is large is told that there is more, and gets it.
TEST_F(RoomyReportsTest, APageIsFullByItsBytesToo) {
  Create("a");
  for (uint64_t step = 1; step <= 3; ++step) {
    Write([&](WriteTransaction& t) -> absl::Status {
      v1::StepReport report;
      report.set_step(step);
      for (size_t layer = 0; layer < kPageBytes / 16; ++layer) {
        report.add_layers()->set_density(0.5);
      }
      RETURN_IF_ERROR(t.PutStep("a", report));
      v1::EvalReport eval;
      eval.set_step(step);
      for (size_t task = 0; task < kPageBytes * 2 / 3 / 100; ++task) {
        eval.add_answers()->set_task(std::string(100, 'x'));
      }
      RETURN_IF_ERROR(t.PutEval("a", eval));
      return t.AppendLogs("a", 1, {Line(0, std::string(kPageBytes * 2 / 3, 'x'))});
    });
  }
  StepPage steps;
  EvalPage evals;
  LogPage logs;
  for (uint64_t step = 1; step <= 3; ++step) {
    steps = *Read([&](ReadTransaction& t) { return t.ListSteps("a", 0, steps.last_sequence, 9); });
    evals = *Read([&](ReadTransaction& t) { return t.ListEvals("a", evals.last_sequence, 9); });
    logs = *Read([&](ReadTransaction& t) {
      return t.ReadLogs({.job = "a", .after_offset = logs.next_offset});
    });
    ASSERT_THAT(steps.steps, SizeIs(1));
    EXPECT_EQ(steps.steps[0].step(), step);
    ASSERT_THAT(evals.evals, SizeIs(1));
    EXPECT_EQ(evals.evals[0].step(), step);
    ASSERT_THAT(logs.lines, SizeIs(1));
    EXPECT_EQ(logs.lines[0].offset(), step);
    for (const bool more : {steps.more, evals.more, logs.more}) EXPECT_EQ(more, step < 3);
  }
}

// It goes on a full disk, too.
TEST_F(RoomyReportsTest, WhatGoesWithAJobIsNotWrittenOver) {
  Create("a");
  for (int i = 0; i < 32; ++i) {
    Write([](WriteTransaction& t) {
      return t.AppendLogs("a", 1, {Line(0, std::string(size_t{1} << 20, 'x'))});
    });
  }
  Reopen();  // with an empty log of writes
  Write([](WriteTransaction& t) { return t.DeleteJob("a"); });
  EXPECT_LT(std::filesystem::file_size(options_.path + "-wal"), uintmax_t{4} << 20);
}

TEST_F(ReportsTest, LogsByRankAttemptAndTail) {
  Create("a");
  Write([](WriteTransaction& t) { return t.AppendLogs("a", 1, {Line(0, "x"), Line(1, "y")}); });
  Write([](WriteTransaction& t) { return t.AppendLogs("a", 2, {Line(0, "z")}); });
  EXPECT_THAT(Logs({.job = "a"}), ElementsAre("1:x", "2:y", "3:z"));
  EXPECT_THAT(Logs({.job = "a", .rank = 0}), ElementsAre("1:x", "3:z"));
  EXPECT_THAT(Logs({.job = "a", .attempt = 1}), ElementsAre("1:x", "2:y"));
  EXPECT_THAT(Logs({.job = "a", .after_offset = 1}), ElementsAre("2:y", "3:z"));
  EXPECT_THAT(Logs({.job = "a", .rank = 0, .last_lines = 1}), ElementsAre("3:z"));
  EXPECT_THAT(Logs({.job = "a", .rank = 1, .last_lines = 1}), ElementsAre("2:y"));
  EXPECT_THAT(Logs({.job = "a", .attempt = 1, .last_lines = 1}), ElementsAre("2:y"));
  EXPECT_THAT(Logs({.job = "a", .last_lines = 2}), ElementsAre("2:y", "3:z"));
  EXPECT_THAT(Logs({.job = "a", .after_offset = 1, .last_lines = 3}), ElementsAre("2:y", "3:z"));
  for (const int limit : {1, 2}) {
    const LogPage page = ReadLogs({.job = "a", .limit = limit});
    EXPECT_TRUE(page.more);
    EXPECT_EQ(page.next_offset, 2u);  // whole batches
  }
  std::vector<uint32_t> attempts;
  for (const v1::LogLine& line : ReadLogs({.job = "a"}).lines) attempts.push_back(line.attempt());
  EXPECT_THAT(attempts, ElementsAre(1, 1, 2));
}

TEST_F(ReportsTest, LogsAreBounded) {
  Create("a");
  AppendLines("a", 1, 50);
  const std::vector<std::string> kept = Logs({.job = "a"});
  EXPECT_LT(kept.size(), 20u);
  EXPECT_GT(kept.size(), 10u);
  EXPECT_THAT(kept.back(), HasSubstr("50:"));
  // Who had read up to line 2 learns how many it missed.
  const auto page =
      Read([](ReadTransaction& t) { return t.ReadLogs({.job = "a", .after_offset = 2}); });
  EXPECT_EQ(page->dropped, 50 - kept.size() - 2);
  // Who begins, or asks for the end alone, misses none.
  EXPECT_EQ(ReadLogs({.job = "a"}).dropped, 0u);
  EXPECT_EQ(ReadLogs({.job = "a", .after_offset = 2, .last_lines = 1}).dropped, 0u);
}

TEST_F(ReportsTest, WhatIsLargerThanTheBoundOfALogGoesWhole) {
  Create("a");
  Write([](WriteTransaction& t) { return t.AppendLogs("a", 1, {Line(0, "x"), Line(0, "y")}); });
  Write(
      [](WriteTransaction& t) { return t.AppendLogs("a", 1, {Line(0, std::string(3000, 'x'))}); });
  const LogPage page = ReadLogs({.job = "a", .after_offset = 1});
  EXPECT_THAT(page.lines, IsEmpty());
  EXPECT_EQ(page.dropped, 2u);
  EXPECT_EQ(ReadLogs({.job = "a", .after_offset = 2}).dropped, 1u);
  AppendLines("a", 1, 1);
  EXPECT_EQ(ReadLogs({.job = "a", .after_offset = 1}).dropped, 2u);
  ASSERT_THAT(ReadLogs({.job = "a"}).lines, SizeIs(1));
  EXPECT_EQ(ReadLogs({.job = "a"}).lines[0].offset(), 4u);
}

// Lines are dropped of the job, and read of an attempt: of one whose lines have all gone, too, the
// reader comes to an end.
TEST_F(ReportsTest, DroppedLinesAreCountedOnce) {
  Create("a");
  for (uint32_t attempt : {1u, 2u}) AppendLines("a", attempt, 50);
  const auto read = [&](uint64_t after) {
    return *Read([&](ReadTransaction& t) {
      return t.ReadLogs({.job = "a", .attempt = 1, .after_offset = after});
    });
  };
  const LogPage page = read(2);
  EXPECT_THAT(page.lines, IsEmpty());
  EXPECT_EQ(page.dropped, 100 - Logs({.job = "a"}).size() - 2);
  EXPECT_EQ(page.next_offset, 2 + page.dropped);
  EXPECT_EQ(read(page.next_offset).dropped, 0u);
}

TEST_F(ReportsTest, WhereNoneWasDroppedNoneIsCounted) {
  Create("a");
  for (const int lines : {3, 2}) AppendLines("a", 1, lines);
  for (const uint64_t after : {1, 3, 5}) {
    const auto page =
        Read([&](ReadTransaction& t) { return t.ReadLogs({.job = "a", .after_offset = after}); });
    EXPECT_EQ(page->dropped, 0u);
    EXPECT_EQ(page->next_offset, 5u);
    EXPECT_EQ(page->lines.size(), 5 - after);
  }
}

TEST_F(ReportsTest, OldStepsAreThinnedOut) {
  Create("a");
  for (uint64_t step = 1; step <= 3000; ++step) {
    Write([&](WriteTransaction& t) {
      v1::StepReport report;
      report.set_step(step);
      return t.PutStep("a", report);
    });
  }
  const absl::StatusOr<StepPage> page =
      Read([](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 10'000); });
  std::vector<uint64_t> steps;
  for (const v1::StepReport& step : page->steps) steps.push_back(step.step());
  EXPECT_LE(steps.size(), 256u + 64u);
  EXPECT_GE(steps.size(), 128u + 64u);
  EXPECT_EQ(steps.front(), 1u);
  EXPECT_EQ(steps.back(), 3000u);
  // 2,872 older steps, of which at most 128 stay: every 32nd.
  for (size_t i = 1; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i] - steps[i - 1], steps[i] > 3000 - 128 ? 1u : 32u) << steps[i];
    if (steps[i] > 2800) break;
  }
  for (size_t i = steps.size() - 128; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i], 3000 - (steps.size() - 1 - i));
  }
}

// However far apart they are: the newest half whole, and of those before one in each 512 steps.
TEST_F(ReportsTest, OldEvaluationsAreThinnedOut) {
  Create("a");
  std::vector<uint64_t> reported(3000);
  for (size_t i = 0; i < reported.size(); ++i) reported[i] = 10 * (i + 1);
  Evaluate("a", {reported.begin(), reported.begin() + 256});
  EXPECT_THAT(Evaluated("a"), SizeIs(256)) << "as many as there is room for stay whole";
  Evaluate("a", {reported.begin() + 256, reported.end()});
  const std::vector<uint64_t> kept = Evaluated("a");
  EXPECT_LE(kept.size(), 256u);
  ASSERT_GE(kept.size(), 128u + 56u);
  EXPECT_EQ(kept.front(), 10u);
  for (size_t i = kept.size() - 128; i < kept.size(); ++i) {
    EXPECT_EQ(kept[i], 10 * (3000 - (kept.size() - 1 - i)));
  }
  for (size_t i = 1; i < kept.size(); ++i) {
    EXPECT_LE(kept[i] - kept[i - 1], 512u + 10u) << kept[i];
  }
  const auto sample = Read([](ReadTransaction& t) { return t.SampleEvals("a", 3); });
  ASSERT_THAT(*sample, SizeIs(3));
  EXPECT_EQ(sample->front().step(), 10u);
  EXPECT_EQ(sample->back().step(), 30'000u);
}

// A node reports for a job whatever steps it likes, in whatever order.
TEST_F(ReportsTest, EvaluationsOfARunningJobAreBoundedInAnyOrder) {
  for (const char* id : {"up", "down", "mixed", "other"}) Create(id);
  constexpr uint64_t kSteps = 1'000'000'000'000;
  for (uint64_t i = 1; i <= 1000; ++i) {
    Evaluate("up", {i * 1'000'000});
    Evaluate("down", {kSteps - i});
    Evaluate("mixed", {i * 7919 % 1009 * 991'000'000});
  }
  Evaluate("other", {1});
  for (const char* id : {"up", "down", "mixed"}) {
    EXPECT_LE(Evaluated(id).size(), 256u) << id;
    EXPECT_GE(Evaluated(id).size(), 128u) << id;
  }
  EXPECT_THAT(Evaluated("other"), ElementsAre(1)) << "each job has its own bound";
  std::vector<uint64_t> newest = Evaluated("up");
  EXPECT_EQ(newest.back(), 1'000'000'000u);
  EXPECT_EQ(newest.front(), 1'000'000u);
  const std::vector<uint64_t> down = Evaluated("down");
  EXPECT_EQ(down.front(), kSteps - 1);
  EXPECT_THAT(down, ::testing::Contains(kSteps - 1000));
}

TEST_F(ReportsTest, FiguresOfRanksAndRingStepsAreKeptUpToTheirBound) {
  Create("a");
  v1::StepReport report;
  report.set_step(1);
  report.mutable_rank_tiles()->Resize(kFiguresKept, 7);
  report.mutable_rank_paces()->Resize(kFiguresKept, 7);
  for (int layer = 0; layer < 3; ++layer) {
    report.add_layers()->mutable_tiles_per_ring_step()->Resize(kFiguresKept, 5);
  }
  Write([&](WriteTransaction& t) { return t.PutStep("a", report); });
  report.set_step(2);
  report.add_rank_tiles(7);
  report.add_rank_paces(7);
  report.mutable_layers(2)->add_tiles_per_ring_step(5);
  Write([&](WriteTransaction& t) { return t.PutStep("a", report); });
  const auto within = Read([](ReadTransaction&t) { return t.GetStep("a", 1); }),
             beyond = Read([](ReadTransaction&t) { return t.GetStep("a", 2); });
  EXPECT_EQ(within->rank_tiles_size(), kFiguresKept);
  EXPECT_EQ(beyond->rank_tiles_size(), 0);
  EXPECT_EQ(within->rank_paces_size(), kFiguresKept);
  EXPECT_EQ(beyond->rank_paces_size(), 0);
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(within->layers(layer).tiles_per_ring_step_size(), kFiguresKept);
    EXPECT_THAT(beyond->layers(layer).tiles_per_ring_step(),
                ElementsAre(5 * (kFiguresKept + (layer == 2 ? 1 : 0))));
  }
}

// Of the older steps every 16th has its layers, and no other has figures by rank either.
TEST_F(ReportsTest, OldStepsLoseTheirFiguresOfRanksWithTheirLayers) {
  Create("a");
  Write([](WriteTransaction& t) -> absl::Status {
    v1::StepReport report;
    report.add_rank_tiles(7);
    report.add_rank_paces(7);
    report.add_layers()->set_density(0.5);
    for (uint64_t step = 1; step <= 1088; ++step) {
      report.set_step(step);
      RETURN_IF_ERROR(t.PutStep("a", report));
    }
    return absl::OkStatus();
  });
  for (const auto& [step, kept] : {std::pair{1, 1}, {9, 0}, {17, 1}, {25, 0}, {1088, 1}}) {
    const auto report = Read([&](ReadTransaction& t) { return t.GetStep("a", step); });
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->layers_size(), kept) << step;
    EXPECT_EQ(report->rank_tiles_size(), kept) << step;
    EXPECT_EQ(report->rank_paces_size(), kept) << step;
  }
}

TEST_F(ReportsTest, AMissingStepIsFilledInAndAKnownOneKept) {
  Create("a");
  v1::StepReport report;
  report.set_step(1);
  report.set_loss(3);
  Write([&](WriteTransaction& t) { return t.PutStep("a", report); });
  report.set_loss(4);
  Write([&](WriteTransaction& t) { return t.PutMissingStep("a", report); });
  report.set_step(2);
  Write([&](WriteTransaction& t) { return t.PutMissingStep("a", report); });
  const absl::StatusOr<StepPage> page =
      Read([](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 10); });
  ASSERT_THAT(page->steps, SizeIs(2));
  EXPECT_EQ(page->steps[0].loss(), 3);
  EXPECT_EQ(page->steps[1].loss(), 4);
}

TEST_F(ReportsTest, TheLastStepIsThatOfTheHighestNumber) {
  for (const char* id : {"a", "b"}) Create(id);
  const auto last = [&] { return *Read([](ReadTransaction& t) { return t.GetLastStep("a"); }); };
  EXPECT_EQ(last(), 0u);
  v1::StepReport report;
  for (const uint64_t step : {3, 1}) {
    report.set_step(step);
    Write([&](WriteTransaction& t) { return t.PutStep("a", report); });
  }
  report.set_step(9);
  Write([&](WriteTransaction& t) { return t.PutStep("b", report); });
  EXPECT_EQ(last(), 3u);
}

TEST_F(ReportsTest, AnAttemptIsReadByItsNumber) {
  Create("a");
  Write([](WriteTransaction& t) -> absl::Status {
    for (const uint32_t number : {1, 2}) {
      v1::Attempt attempt;
      attempt.set_number(number);
      attempt.set_fencing_token(10 * number);
      RETURN_IF_ERROR(t.PutAttempt("a", attempt));
    }
    return absl::OkStatus();
  });
  const auto attempt = [&](const std::string& job, uint32_t number) {
    return Read([&](ReadTransaction& t) { return t.GetAttempt(job, number); });
  };
  EXPECT_EQ(attempt("a", 2)->fencing_token(), 20u);
  EXPECT_EQ(attempt("a", 3).status(), absl::NotFoundError("jobs/a, attempt 3 does not exist"));
  EXPECT_TRUE(absl::IsNotFound(attempt("b", 1).status()));
}

// However many an attempt that was given up reports of a job that has ended.
TEST_F(ReportsTest, LateReportsOfMissingStepsAreBoundedToo) {
  Create("a", v1::Job::SUCCEEDED);
  Write([](WriteTransaction& t) -> absl::Status {
    v1::StepReport report;
    for (uint64_t step = 1; step <= 4096; ++step) {
      report.set_step(step);
      RETURN_IF_ERROR(t.PutMissingStep("a", report));
    }
    return absl::OkStatus();
  });
  const absl::StatusOr<StepPage> page =
      Read([](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 10'000); });
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_LE(page->steps.size(), 256u);
  EXPECT_EQ(page->steps.back().step(), 4096u);
}

// It would not go again.
TEST_F(ReportsTest, AStepThatWasThinnedOutIsNotMissing) {
  Create("a");
  Write([](WriteTransaction& t) -> absl::Status {
    v1::StepReport report;
    for (uint64_t step = 1; step <= 4096; ++step) {
      report.set_step(step);
      RETURN_IF_ERROR(t.PutStep("a", report));
    }
    return absl::OkStatus();
  });
  const auto steps = [&] {
    return Read([](ReadTransaction& t) { return t.ListSteps("a", 0, 0, 10'000); })->steps.size();
  };
  const size_t kept = steps();
  EXPECT_LE(kept, 256u);
  Write([](WriteTransaction& t) -> absl::Status {
    v1::StepReport report;
    for (uint64_t step = 1; step <= 4096; ++step) {
      if (step % 64 == 0) continue;
      report.set_step(step);
      RETURN_IF_ERROR(t.PutMissingStep("a", report));
    }
    return absl::OkStatus();
  });
  EXPECT_EQ(steps(), kept);
}

// A job that failed long ago may be resumed when its reports have gone.
TEST_F(ReportsTest, ALogThatWasDeletedHasItsWholeRoomAgain) {
  Create("a");
  AppendLines("a", 1, 13);
  ASSERT_THAT(Logs({.job = "a"}), SizeIs(13));
  Write([](WriteTransaction& t) { return t.DeleteReports("a").status(); });
  AppendLines("a", 2, 13);
  EXPECT_THAT(Logs({.job = "a"}), SizeIs(13));
}

// However little there was of them.
TEST_F(ReportsTest, ThatReportsWentIsSaidAndToldOnce) {
  for (const char* id : {"evaluated", "stepped", "logged", "none"}) Create(id);
  Write([](WriteTransaction& t) -> absl::Status {
    RETURN_IF_ERROR(t.PutEval("evaluated", v1::EvalReport()));
    RETURN_IF_ERROR(t.PutStep("stepped", v1::StepReport()));
    return t.AppendLogs("logged", 1, {Line(0, "x")});
  });
  std::vector<std::string> touched;
  const auto subscription = store_->Subscribe([&](const Change& change) {
    touched.insert(touched.end(), change.jobs.begin(), change.jobs.end());
  });
  const auto deleted = [&](const std::string& id) {
    bool any = false;
    Write([&](WriteTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(any, t.DeleteReports(id));
      return absl::OkStatus();
    });
    return any;
  };
  const std::vector<std::string> reported = {"evaluated", "stepped", "logged"};
  for (const std::string& id : reported) {
    EXPECT_TRUE(deleted(id)) << id;
    EXPECT_FALSE(deleted(id)) << id;
  }
  EXPECT_FALSE(deleted("none"));
  EXPECT_EQ(touched, reported);
}

}  // namespace
}  // namespace ringleader::store
