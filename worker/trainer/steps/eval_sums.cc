#include "worker/trainer/steps/eval_sums.h"

#include <cmath>
#include <cstdint>

namespace ringleader::trainer {

EvalSums::EvalSums(const std::vector<std::string>& tasks)
    : tasks_(tasks), sums_(kOfAll + kOfTask * tasks.size()) {}

void EvalSums::Add(const data::LocalSequence& sequence, const RankScores& scores) {
  for (size_t i = 0; i < sequence.labels.size(); ++i) {
    if (sequence.labels[i] == data::kIgnoreLabel) continue;
    sums_[0] += scores.losses[i];
    sums_[1] += 1;
    if (sequence.answers[i] == data::kPlainMark) continue;
    double* task = sums_.data() + kOfAll + kOfTask * (sequence.answers[i] - 1);
    task[0] += scores.losses[i];
    task[1] += 1;
    task[2] += scores.right[i];
  }
}

EvalOutcome EvalSums::Outcome() const {
  EvalOutcome outcome{.loss = sums_[1] == 0 ? std::nan("") : sums_[0] / sums_[1],
                      .tokens = static_cast<uint64_t>(sums_[1]),
                      .answers = {}};
  for (size_t t = 0; t < tasks_.size(); ++t) {
    const double* task = sums_.data() + kOfAll + kOfTask * t;
    outcome.answers.push_back({.task = tasks_[t],
                               .asked = static_cast<uint64_t>(task[1]),
                               .right = static_cast<uint64_t>(task[2]),
                               .loss = task[1] == 0 ? 0 : task[0] / task[1]});
  }
  return outcome;
}

}  // namespace ringleader::trainer
