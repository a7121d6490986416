#include "worker/trainer/testing/attempt_test.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace ringleader::trainer::testing {
namespace {

std::string TrainerBinary() {
  const char* const named = std::getenv("RINGLEADER_TRAINER");
  if (named != nullptr) return named;
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "ringleader-trainer";
}

}  // namespace

std::vector<double> Losses(const RankLog& log) {
  std::vector<double> losses;
  for (const v1::StepReport& step : log.steps) losses.push_back(step.loss());
  return losses;
}

bool AllReachedStep(const std::vector<RankLog>& logs, uint64_t step) {
  for (const RankLog& log : logs) {
    if (log.steps.empty() || log.steps.back().step() < step) return false;
  }
  return true;
}

std::unique_ptr<FakeAgent> AttemptTest::Start(const v1::JobSpec& spec, const v1::StepPlan& plan) {
  const int attempt = ++attempts_;
  const int ranks = static_cast<int>(spec.resources().trainers());
  auto agent =
      std::make_unique<FakeAgent>(Path("agent-" + std::to_string(attempt)), spec, plan, ranks,
                                  /*threads=*/1, checkpoint_step_);
  agent->set_fencing_token(fencing_token_);
  agent->set_owner(owner_);
  log_directory_ = Path("logs-" + std::to_string(attempt));
  std::filesystem::create_directories(log_directory_);
  agent->Spawn(TrainerBinary(), log_directory_, Hosts(ranks));
  return agent;
}

std::string AttemptTest::Output() const {
  if (log_directory_.empty()) return "no attempt was started";
  std::ostringstream text;
  for (const auto& file : std::filesystem::directory_iterator(log_directory_)) {
    text << file.path().filename() << "\n" << std::ifstream(file.path()).rdbuf();
    text.clear();  // an empty file counts as a failure
  }
  return text.str();
}

void AttemptTest::EndTest(const std::string& why) const {
  throw std::runtime_error(why + "\n" + Output());
}

std::vector<RankLog> AttemptTest::RunToEnd(const v1::JobSpec& spec) {
  std::vector<RankLog> logs = Start(spec)->Finish();
  for (const RankLog& log : logs) {
    const bool completed =
        log.result.has_value() && log.result->outcome() == v1::TrainerExited::COMPLETED;
    if (!completed || log.exit_code != 0) EndTest("a rank did not run to its end");
  }
  return logs;
}

void AttemptTest::AwaitStep(FakeAgent& agent, uint64_t step) const {
  const bool reached = agent.WaitFor(
      [step](const std::vector<RankLog>& logs) { return AllReachedStep(logs, step); });
  if (!reached) EndTest("not every rank reached step " + std::to_string(step));
}

std::vector<RankLog> AttemptTest::StopEarly(const v1::JobSpec& spec) {
  auto agent = Start(spec);
  AwaitStep(*agent, 2);
  agent->SendToAll(Stop(v1::StopTrainers::CHECKPOINT));
  std::vector<RankLog> logs = agent->Finish();
  for (const RankLog& log : logs) {
    const bool stopped =
        log.result.has_value() && log.result->outcome() == v1::TrainerExited::STOPPED;
    if (!stopped) EndTest(log.result ? log.result->message() : "a rank left without a result");
  }
  if (logs[0].steps.back().step() >= spec.training().steps()) {
    EndTest("the stop came too late to test anything");
  }
  return logs;
}

v1::TrainerResult AttemptTest::Failure(const v1::JobSpec& spec) {
  const std::vector<RankLog> logs = Start(spec)->Finish();
  for (const RankLog& log : logs) {
    EXPECT_TRUE(log.result.has_value()) << Output();
    if (log.result.has_value() && !log.result->collateral()) return *log.result;
  }
  ADD_FAILURE() << "every rank says that another one failed\n" << Output();
  return {};
}

}  // namespace ringleader::trainer::testing
