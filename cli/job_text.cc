#include "cli/job_text.h"

#include <map>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/plan_text.h"
#include "cli/printer.h"
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

// What the job asked for and, of layout and ring, what its newest attempt got.
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
    rows->push_back({"layout", LayoutText(attempt->plan())});
    rows->push_back({"ring", RingText(attempt->plan())});
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
    rows->push_back({"imbalance", absl::StrFormat("%.3f", progress.worker_imbalance())});
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
