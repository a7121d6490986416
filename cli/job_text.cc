#include "cli/job_text.h"

#include <algorithm>
#include <map>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/plan_text.h"
#include "cli/printer.h"
#include "jobspec/fields/text.h"
#include "proto/timestamps.h"

namespace ringleader::cli {
namespace {

std::string Steps(const v1::Progress& progress) {
  return absl::StrCat(progress.step(), "/", progress.total_steps());
}

std::string PlacementText(const v1::Attempt& attempt) {
  std::string text;
  for (const v1::Placement& placement : attempt.placements()) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", ShortName(placement.node()), "×",
                    placement.trainers());
  }
  return text;
}

using Rows = std::vector<std::vector<std::string>>;

// "2026-11-23 01:55:02 UTC, 5m ago".
std::string TimeText(const google::protobuf::Timestamp& time, const Clock& clock) {
  return absl::StrCat(absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", ToTime(time), absl::UTCTimeZone()),
                      ", ", FormatAge(clock.Now() - ToTime(time)), " ago");
}

void AddTimes(const v1::Job& job, const Clock& clock, Rows* rows) {
  rows->push_back({"submitted", TimeText(job.create_time(), clock)});
  if (job.has_start_time()) rows->push_back({"started", TimeText(job.start_time(), clock)});
  if (!job.has_end_time()) return;
  std::string text = TimeText(job.end_time(), clock);
  if (job.has_start_time()) {
    const absl::Duration ran = ToTime(job.end_time()) - ToTime(job.start_time());
    absl::StrAppend(&text, ", after ", FormatSeconds(absl::ToDoubleSeconds(ran)));
  }
  rows->push_back({"ended", text});
}

// What the attempt began with, with the changes that its ranks took.
v1::StepPlan PlanInForce(const v1::Attempt& attempt) {
  v1::StepPlan plan = attempt.plan();
  for (const v1::PlanChange& change : attempt.plan_changes()) {
    if (change.state() != v1::PlanChange::IN_FORCE) continue;
    *plan.mutable_ring() = change.ring();
    plan.set_layout(change.layout());
    plan.set_stripe(change.stripe());
  }
  return plan;
}

// What the job asked for and, of layout and ring, what its newest attempt has.
void AddSpec(const v1::Job& job, Rows* rows) {
  const v1::JobSpec& spec = job.spec();
  if (!job.owner().empty()) rows->push_back({"owner", job.owner()});
  if (!job.project().empty()) rows->push_back({"project", job.project()});
  const std::map<std::string, std::string> labels(spec.labels().begin(), spec.labels().end());
  if (!labels.empty())
    rows->push_back({"labels", absl::StrJoin(labels, ", ", absl::PairFormatter("="))});
  rows->push_back({"priority", absl::StrCat(spec.scheduling().priority())});
  rows->push_back({"checkpoints in", spec.checkpoint().directory()});
  for (auto attempt = job.attempts().rbegin(); attempt != job.attempts().rend(); ++attempt) {
    if (!attempt->has_plan()) continue;
    const v1::StepPlan plan = PlanInForce(*attempt);
    rows->push_back({"layout", LayoutText(plan)});
    rows->push_back({"ring", RingText(plan)});
    break;
  }
}

void AddProgress(const v1::Job& job, Rows* rows) {
  const v1::Progress& progress = job.progress();
  if (progress.step() > 0) {
    rows->push_back({"tokens", FormatCount(static_cast<double>(progress.tokens()))});
    rows->push_back(
        {"loss", absl::StrFormat("%.4f (first %.4f)", progress.loss(), progress.first_loss())});
    rows->push_back({"tokens/s", FormatCount(progress.tokens_per_second())});
    rows->push_back({"imbalance", absl::StrFormat("%.3f of a step, %.3f by layer and ring step",
                                                  progress.worker_imbalance(),
                                                  std::max(1.0, progress.ring_imbalance()))});
    rows->push_back({"checkpoint", progress.checkpoint_step() == 0
                                       ? "none yet"
                                       : absl::StrCat("step ", progress.checkpoint_step())});
  }
  if (job.has_last_eval()) {
    rows->push_back(
        {"held-out", absl::StrFormat("%.4f at step %d (first %.4f)", job.last_eval().loss(),
                                     job.last_eval().step(), job.first_eval().loss())});
  }
}

}  // namespace

std::string ShortName(const std::string& name) {
  const size_t slash = name.rfind('/');
  return slash == std::string::npos ? name : name.substr(slash + 1);
}

std::vector<std::string> JobHeading(bool with_owner) {
  std::vector<std::string> row = {"NAME",     "STATE", "STEP", "LOSS",
                                  "TOKENS/S", "ETA",   "AGE",  "REASON"};
  if (with_owner) row.insert(row.begin() + 1, {"OWNER", "PROJECT"});
  return row;
}

std::vector<std::string> JobRow(const v1::Job& job, const Clock& clock, bool with_owner) {
  const v1::Progress& progress = job.progress();
  const bool trained = progress.step() > 0;
  std::vector<std::string> row = {
      ShortName(job.name()),
      v1::Job::State_Name(job.state()),
      Steps(progress),
      trained ? absl::StrFormat("%.4f", progress.loss()) : "",
      trained ? FormatCount(progress.tokens_per_second()) : "",
      job.state() == v1::Job::RUNNING && trained ? FormatSeconds(progress.eta_seconds()) : "",
      FormatAge(clock.Now() - ToTime(job.create_time())),
      job.state_reason()};
  if (with_owner) row.insert(row.begin() + 1, {job.owner(), job.project()});
  return row;
}

void WriteJob(std::ostream& out, const v1::Job& job, const Clock& clock, int columns) {
  std::vector<std::vector<std::string>> rows = {{"name", ShortName(job.name())},
                                                {"state", v1::Job::State_Name(job.state())},
                                                {"reason", job.state_reason()}};
  AddTimes(job, clock, &rows);
  rows.push_back({"steps", Steps(job.progress())});
  AddSpec(job, &rows);
  AddProgress(job, &rows);
  if (!job.model_directory().empty()) rows.push_back({"model", job.model_directory()});
  WriteColumns(out, rows);
  if (job.attempts().empty()) return;

  out << "\n";
  std::vector<std::vector<std::string>> attempts = {
      {"ATTEMPT", "STATE", "STEPS", "NODES", "REASON"}};
  for (const v1::Attempt& attempt : job.attempts()) {
    attempts.push_back(
        {absl::StrCat(attempt.number()), v1::Attempt::State_Name(attempt.state()),
         absl::StrCat(attempt.first_step(), "..", attempt.last_step()), PlacementText(attempt),
         attempt.has_failure() ? DescribeFailure(attempt.failure()) : attempt.state_reason()});
  }
  WriteColumns(out, attempts, columns);
  const v1::Attempt& last = *job.attempts().rbegin();
  if (last.plan_changes().empty() && last.slow_ranks().empty()) return;
  out << "\n";
  std::vector<std::string> notes;
  for (const v1::PlanChange& change : last.plan_changes()) notes.push_back(DescribeChange(change));
  for (const v1::SlowRank& slow : last.slow_ranks()) notes.push_back(DescribeSlowRank(slow));
  WriteNotes(out, notes, columns);
}

std::string DescribeChange(const v1::PlanChange& change) {
  v1::StepPlan shape;
  *shape.mutable_ring() = change.ring();
  shape.set_layout(change.layout());
  shape.set_stripe(change.stripe());
  const std::string when = change.state() == v1::PlanChange::MISSED      ? "was not taken up at"
                           : change.state() == v1::PlanChange::ANNOUNCED ? "is to begin at"
                                                                         : "from";
  return absl::StrCat("plan ", change.version(), " ", when, " step ", change.effective_step(), ": ",
                      LayoutText(shape), "; ", RingText(shape), ". ",
                      absl::StrJoin(change.reasons(), "; "));
}

std::string DescribeSlowRank(const v1::SlowRank& slow) {
  return absl::StrFormat(
      "rank %d on %s is slow: %.2f x the time of others for the same work (since step %d)",
      slow.rank(), ShortName(slow.node()), slow.ratio(), slow.step());
}

std::string DescribeFailure(const v1::Failure& failure) {
  std::string text;
  if (failure.rank() >= 0) absl::StrAppend(&text, "rank ", failure.rank());
  if (!failure.node().empty()) {
    absl::StrAppend(&text, text.empty() ? "" : " on ", ShortName(failure.node()));
  }
  return absl::StrCat(text, text.empty() ? "" : ": ", failure.message());
}

}  // namespace ringleader::cli
