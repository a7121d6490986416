// What an evaluation adds up, over sequences and then over ranks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "worker/data/loader.h"
#include "worker/trainer/engine/step_engine.h"
#include "worker/trainer/host.h"

namespace ringleader::trainer {

class EvalSums {
 public:
  // `tasks` outlive it: data::Loader::tasks().
  explicit EvalSums(const std::vector<std::string>& tasks);

  // Adds this rank's tokens of one sequence.
  void Add(const data::LocalSequence& sequence, const RankScores& scores);
  // What ranks sum.
  std::vector<double>& sums() { return sums_; }
  // Returns means. The loss is NaN where no token has a label, and a task's 0 if none was asked.
  EvalOutcome Outcome() const;

 private:
  // sums_: loss and labels of all, then loss, answers asked and answers right of each task.
  static constexpr size_t kOfAll = 2, kOfTask = 3;

  const std::vector<std::string>& tasks_;
  std::vector<double> sums_;
};

}  // namespace ringleader::trainer
