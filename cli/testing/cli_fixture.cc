#include "cli/testing/cli_fixture.h"

#include <unistd.h>

#include <fstream>
#include <sstream>

#include "cli/app.h"
#include "worker/data/token_shard.h"

namespace ringleader::cli {

int64_t LongestLine(const std::string& text) {
  int64_t longest = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto begins = [](char byte) { return (byte & 0xc0) != 0x80; };  // in UTF-8
    longest = std::max<int64_t>(longest, std::ranges::count_if(line, begins));
  }
  return longest;
}

CliTest::CliTest()
    : folder_(std::filesystem::path(::testing::TempDir()) / ("cli_" + std::to_string(getpid()))),
      clock_(absl::FromUnixSeconds(1'000'000)) {
  std::filesystem::create_directories(folder_ / "tokens");
  WriteTokens("tokens", {.vocabulary = 257, .tokens = 100'000});
  Write("config.json", R"({"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256,
      "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320})");
  Write("job.yaml", R"(
name: tiny
model: {config: config.json}
data: {train: tokens, sequence_length: 16384}
parallelism: {context: 4}
training: {steps: 3}
checkpoint: {directory: checkpoints}
resources: {trainers: 4}
)");
}

void CliTest::WriteTokens(const std::string& folder, data::Manifest manifest) const {
  const std::string shard = "shard-00000.tokens";
  std::filesystem::create_directories(folder_ / folder);
  EXPECT_TRUE(data::WriteShard(Path(folder) + "/" + shard, std::vector<uint32_t>(manifest.tokens),
                               {},
                               /*token_bytes=*/2, {})
                  .ok());
  manifest.shards = {shard};
  EXPECT_TRUE(data::WriteManifest(Path(folder), manifest).ok());
}

void CliTest::Write(const std::string& name, const std::string& text) const {
  std::ofstream(folder_ / name) << text;
}

Result CliTest::Run(const std::vector<std::string>& arguments, int columns) {
  std::ostringstream out, err;
  Context context{.out = out,
                  .err = err,
                  .clock = &clock_,
                  .environment = [this](const char* name) -> std::optional<std::string> {
                    const auto found = environment_.find(name);
                    if (found == environment_.end()) return std::nullopt;
                    return found->second;
                  }};
  if (columns > 0) context.terminal_columns = [columns] { return columns; };
  context.retry.first_delay = absl::Milliseconds(5);
  context.retry.longest_delay = absl::Milliseconds(50);
  context.keepalive = keepalive_;
  const int code = RunRingctl(arguments, std::move(context));
  return {code, out.str(), err.str()};
}

v1::Job& CliTest::AddJob(const std::string& id, v1::Job::State state) {
  v1::Job& job = coordinator_.jobs["jobs/" + id];
  job.set_name("jobs/" + id);
  job.set_state(state);
  job.set_revision(1);
  job.mutable_progress()->set_total_steps(3);
  job.mutable_create_time()->set_seconds(1'000'000 - 300);
  return job;
}

void CliTest::ScriptRun(const std::string& id, v1::Job::State last) {
  v1::Job job = AddJob(id, v1::Job::PENDING);
  const auto add_job = [&](v1::Job::State state, uint64_t revision) {
    job.set_state(state);
    job.set_revision(revision);
    *coordinator_.watch.emplace_back().mutable_job() = job;
  };
  add_job(v1::Job::PENDING, 1);
  add_job(v1::Job::RUNNING, 2);
  for (uint64_t step = 1; step <= 3; ++step) {
    v1::StepReport* report = coordinator_.watch.emplace_back().add_steps();
    report->set_step(step);
    report->set_loss(6.0 - static_cast<double>(step));
    report->set_tokens(16384);
    report->set_step_seconds(2);
    report->set_worker_imbalance(1.01);
    report->set_step_imbalance(1.1);
    report->mutable_phases()->set_linear(0.5);
    report->mutable_phases()->set_exposed_offload(0.25);
    for (int l = 0; l < 2; ++l) {
      report->add_layers()->set_layer(l);
      report->mutable_layers(l)->set_density(l == 0 ? 1.0 : 0.2);
      report->mutable_layers(l)->set_recall(l == 0 ? -1 : 0.9);
      report->mutable_layers(l)->set_slashes_at_budget(0.75);
      if (l == 1) report->mutable_layers(l)->set_balanced(8);
      if (l == 1) report->mutable_layers(l)->set_anchor_missed(2);
      if (l == 0 || step == 2) continue;  // probed in the first step and the third
      report->mutable_layers(l)->add_probed_recall_by_head(step == 1 ? 0.5F : 1.0F);
      report->mutable_layers(l)->add_probed_recall_by_head(0.25);
    }
  }
  v1::EvalReport* eval = coordinator_.watch.emplace_back().add_evals();
  eval->set_step(3);
  eval->set_loss(2.5);
  eval->set_seconds(1);
  v1::TaskAnswers* answers = eval->add_answers();
  answers->set_task("recall");
  answers->set_asked(40);
  answers->set_right(39);
  answers->set_loss(0.25);
  eval->mutable_dense()->set_loss(2.25);
  *eval->mutable_dense()->add_answers() = *answers;
  job.mutable_progress()->set_step(3);
  job.mutable_first_eval()->set_loss(5);
  *job.mutable_last_eval() = *eval;
  if (last == v1::Job::FAILED) job.set_state_reason("rank 2 on b: out of memory");
  add_job(last, 3);
  coordinator_.jobs[job.name()] = job;
}

}  // namespace ringleader::cli
