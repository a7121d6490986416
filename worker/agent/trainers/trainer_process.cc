#include "worker/agent/trainers/trainer_process.h"

#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/net/message_size.h"
#include "jobspec/fields/text.h"

namespace ringleader::agent {
namespace {

using v1::TrainerExited;

// What was said longer before the end is a warning that training went on after, and no reason.
constexpr absl::Duration kLastWordsAge = absl::Minutes(1);

std::string LastWords(const Trainer& trainer, absl::Time now) {
  if (trainer.last_error_line.empty() || now - trainer.last_error_time > kLastWordsAge) return "";
  return absl::StrCat("; last line on stderr: ", trainer.last_error_line);
}

// How a process ended that gave no reason.
std::string SilentEnd(const Trainer& trainer, absl::Time now) {
  const ExitStatus& exit = *trainer.exit;
  if (exit.signal == 0) {
    return absl::StrFormat("exited with code %d without giving a reason%s", exit.code,
                           LastWords(trainer, now));
  }
  const char* const name = sigabbrev_np(exit.signal);
  return absl::StrFormat(
      "killed by signal %d (SIG%s)%s%s", exit.signal, name == nullptr ? "?" : name,
      exit.signal == SIGKILL ? ", e.g. for want of memory" : "", LastWords(trainer, now));
}

}  // namespace

TrainerExited DescribeExit(const Trainer& trainer, absl::Time now) {
  TrainerExited exited;
  exited.set_rank(trainer.rank);
  if (trainer.exit) {
    exited.set_exit_code(trainer.exit->code);
    exited.set_signal(trainer.exit->signal);
  }
  const auto known = [](TrainerExited::Outcome outcome) {
    return TrainerExited::Outcome_IsValid(outcome) && outcome != TrainerExited::OUTCOME_UNSPECIFIED;
  };
  if (trainer.result && known(trainer.result->outcome())) {
    exited.set_outcome(trainer.result->outcome());
    exited.set_message(jobspec::Shortened(trainer.result->message(), kMaxExitMessageBytes));
    exited.set_retryable(trainer.result->retryable());
    exited.set_collateral(trainer.result->collateral());
    return exited;
  }
  exited.set_outcome(TrainerExited::FAILED);
  exited.set_retryable(true);
  exited.set_collateral(trainer.told_to_abort);
  exited.set_message(trainer.killed_because.empty() ? SilentEnd(trainer, now)
                                                    : trainer.killed_because);
  return exited;
}

}  // namespace ringleader::agent
