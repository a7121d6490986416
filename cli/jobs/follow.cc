#include "cli/jobs/follow.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <ostream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "cli/job_text.h"
#include "cli/jobs/steps.h"
#include "cli/printer.h"
#include "jobspec/fields/text.h"

namespace ringleader::cli {
namespace {

constexpr int kBarWidth = 24;
constexpr int kLeastBarWidth = 6;
constexpr int kBracketColumns = 3;  // "[" and "] "

// Remaining seconds, by the coordinator's estimate or, before it has one, by this step's.
double Eta(const v1::Job& job, const v1::StepReport& step) {
  if (job.progress().eta_seconds() > 0) return job.progress().eta_seconds();
  const uint64_t total = job.progress().total_steps();
  return total > step.step() ? static_cast<double>(total - step.step()) * step.step_seconds() : 0;
}

// ", 97.5 % of 800 answers right"; empty where none was asked.
const char* WhySkipped(const v1::StepReport& step) {
  return step.no_labels() ? "skipped: no token to predict" : "skipped: gradient was not finite";
}

std::string DescribeAnswers(const google::protobuf::RepeatedPtrField<v1::TaskAnswers>& answers) {
  uint64_t asked = 0, right = 0;
  for (const v1::TaskAnswers& task : answers) {
    asked += task.asked();
    right += task.right();
  }
  if (asked == 0) return "";
  return absl::StrFormat(", %.1f %% of %d answers right",
                         100 * static_cast<double>(right) / static_cast<double>(asked), asked);
}

// While it lives, Ctrl-C says that the job goes on, which not everybody expects.
class InterruptNotice {
 public:
  explicit InterruptNotice(const std::string& name) {
    text_ = absl::StrCat("\nringctl: ", EscapeControls(name),
                         " goes on; follow it again with: ringctl watch ", EscapeControls(name),
                         "; end it with: ringctl cancel ", EscapeControls(name), "\n");
    before_ = std::signal(SIGINT, Say);
  }
  ~InterruptNotice() { std::signal(SIGINT, before_); }
  InterruptNotice(const InterruptNotice&) = delete;
  InterruptNotice& operator=(const InterruptNotice&) = delete;

 private:
  static void Say(int) {
    (void)!write(STDERR_FILENO, text_.data(), text_.size());
    _exit(128 + SIGINT);
  }
  static inline std::string text_;  // whole before the handler is
  void (*before_)(int) = SIG_DFL;
};

class Follower {
 public:
  explicit Follower(const Context& context) : context_(context) {}

  void OnResponse(const v1::WatchJobResponse& response) {
    if (context_.format != Format::kTable) {
      if (response.has_job()) job_ = response.job();
      return PrintParts(response);
    }
    // Counters first, the state last: what is shown of a step knows how many there are, and the
    // end is said at the end.
    const v1::Job before = job_;
    if (response.has_job()) job_ = response.job();
    for (const v1::StepReport& step : response.steps()) OnStep(step);
    for (const v1::EvalReport& eval : response.evals()) {
      const std::string dense = eval.has_dense()
                                    ? absl::StrFormat("; dense %.4f%s", eval.dense().loss(),
                                                      DescribeAnswers(eval.dense().answers()))
                                    : "";
      Line(absl::StrFormat("held-out loss %.4f%s%s after step %d (%.1f s)", eval.loss(),
                           DescribeAnswers(eval.answers()), dense, eval.step(), eval.seconds()));
    }
    if (response.has_job()) OnJob(before);
    context_.out.flush();
  }

  const v1::Job& job() const { return job_; }

 private:
  // A document each for steps, evaluations and the job as it became: in JSON a line.
  void PrintParts(const v1::WatchJobResponse& response) {
    const auto print = [&](const v1::WatchJobResponse& part) {
      if (context_.format == Format::kJson) {
        context_.out << ToJsonLine(part) << "\n";
      } else {
        context_.out << "---\n";
        Print(context_, part, nullptr);
      }
    };
    for (const v1::StepReport& step : response.steps()) {
      v1::WatchJobResponse part;
      *part.add_steps() = step;
      print(part);
    }
    for (const v1::EvalReport& eval : response.evals()) {
      v1::WatchJobResponse part;
      *part.add_evals() = eval;
      print(part);
    }
    if (response.has_job()) {
      v1::WatchJobResponse part;
      *part.mutable_job() = response.job();
      print(part);
    }
    context_.out.flush();
  }

  void OnStep(const v1::StepReport& step) {
    if (context_.terminal_columns) {
      // The bar is overwritten by the next step; this must stay in sight.
      if (step.skipped()) {
        Line(absl::StrFormat("step %d  %s", step.step(), WhySkipped(step)));
      }
      // One column stays free: some terminals wrap as soon as the last one is written.
      context_.out << "\r\033[K" << ProgressBar(job_, step, Columns(context_) - 1);
      bar_is_shown_ = true;
      return;
    }
    Line(
        absl::StrFormat("step %d/%d  loss %s  tokens/s %.0f  seconds %.2f  density %.3f  "
                        "imbalance %.3f  eta %s%s",
                        step.step(), job_.progress().total_steps(),
                        step.no_labels() ? "-" : absl::StrFormat("%.4f", step.loss()),
                        TokensPerSecond(step), step.step_seconds(), MeanDensity(step),
                        step.worker_imbalance(), FormatSeconds(Eta(job_, step)),
                        step.skipped() ? absl::StrCat("  ", WhySkipped(step)) : ""));
  }

  void OnJob(const v1::Job& before) {
    if (job_.attempts_size() > 0 && before.attempts_size() > 0) {
      // A failure is worth a line even when the job goes on with the next attempt, unless the job's
      // own line says the same.
      for (const v1::Attempt& attempt : job_.attempts()) {
        const bool is_known = std::any_of(
            before.attempts().begin(), before.attempts().end(), [&](const v1::Attempt& known) {
              return known.number() == attempt.number() && known.has_failure();
            });
        const bool is_reason = absl::StrContains(job_.state_reason(), attempt.failure().message());
        if (attempt.has_failure() && !is_known && !is_reason) {
          Line(absl::StrCat("attempt ", attempt.number(),
                            " failed: ", DescribeFailure(attempt.failure())));
        }
      }
    }
    if (job_.attempts_size() > 0) TellChanges(before);
    if (job_.state() == before.state() && job_.state_reason() == before.state_reason()) return;
    Line(absl::StrCat(ShortName(job_.name()), " is ", v1::Job::State_Name(job_.state()),
                      job_.state_reason().empty() ? "" : ": ", job_.state_reason()));
  }

  // What is new, or came to something, in the plan of the newest attempt.
  void TellChanges(const v1::Job& before) {
    const v1::Attempt& attempt = *job_.attempts().rbegin();
    v1::Attempt known;
    for (const v1::Attempt& one : before.attempts()) {
      if (one.number() == attempt.number()) known = one;
    }
    for (const v1::PlanChange& change : attempt.plan_changes()) {
      const bool is_told = std::ranges::any_of(known.plan_changes(), [&](const auto& other) {
        return other.version() == change.version() && other.state() == change.state();
      });
      if (!is_told) Line(DescribeChange(change));
    }
    for (const v1::SlowRank& slow : attempt.slow_ranks()) {
      const bool is_told = std::ranges::any_of(
          known.slow_ranks(), [&](const auto& other) { return other.rank() == slow.rank(); });
      if (!is_told) Line(DescribeSlowRank(slow));
    }
  }

  void Line(const std::string& text) {
    if (bar_is_shown_) context_.out << "\n";
    bar_is_shown_ = false;
    context_.out << EscapeControls(text) << "\n";
  }

  const Context& context_;
  v1::Job job_;
  bool bar_is_shown_ = false;
};

}  // namespace

std::string ProgressBar(const v1::Job& job, const v1::StepReport& step, int columns) {
  const uint64_t total = std::max<uint64_t>(1, job.progress().total_steps());
  // In the order in which they are left out, last first.
  std::vector<std::string> figures = {absl::StrFormat("%d/%d", step.step(), total),
                                      absl::StrFormat("loss %.4f", step.loss()),
                                      absl::StrCat("ETA ", FormatSeconds(Eta(job, step))),
                                      absl::StrCat(FormatCount(TokensPerSecond(step)), " tokens/s"),
                                      absl::StrFormat("imbalance %.3f", step.worker_imbalance())};
  const auto text = [&] { return absl::StrJoin(figures, "  "); };
  const auto room = [&] { return columns - static_cast<int>(text().size()) - kBracketColumns; };
  while (figures.size() > 2 && room() < kLeastBarWidth) figures.pop_back();
  const int width = std::min(kBarWidth, room());
  if (width < kLeastBarWidth) return CutToWidth(text(), columns);
  const auto filled = static_cast<int>(std::min<uint64_t>(step.step(), total) * width / total);
  return absl::StrCat("[", std::string(filled, '#'), std::string(width - filled, '-'), "] ",
                      text());
}

absl::StatusOr<int> FollowJob(const Context& context, Client* client, const std::string& name,
                              uint64_t after_step) {
  v1::WatchJobRequest request;
  request.set_name(name);
  request.set_include_steps(true);
  request.set_after_step(after_step);
  Follower follower(context);
  const InterruptNotice notice(ShortName(name));
  RETURN_IF_ERROR(client->WatchJob(request, [&](const v1::WatchJobResponse& response) {
    follower.OnResponse(response);
    return context.out.good();
  }));
  if (!context.out.good()) return kOk;  // RunRingctl says so
  const v1::Job::State state = follower.job().state();
  if (state == v1::Job::SUCCEEDED) return kOk;
  if (state == v1::Job::FAILED) return kJobFailed;
  if (state == v1::Job::CANCELLED) return kJobCancelled;
  return absl::UnavailableError(absl::StrCat("the coordinator stopped reporting on ",
                                             ShortName(name), "; run ringctl watch ",
                                             ShortName(name)));
}

}  // namespace ringleader::cli
