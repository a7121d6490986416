// What an attempt takes up from the one before it, what it refuses to, and what it leaves to the
// one after it.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/files.h"
#include "base/process/progress.h"
#include "base/testing/temp_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model_shape/model_config.h"
#include "worker/checkpoint/checksummed_json.h"
#include "worker/checkpoint/ownership.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/data/token_folder.h"
#include "worker/data/token_shard.h"
#include "worker/trainer/steps/job_digest.h"
#include "worker/trainer/testing/attempt_in_process.h"
#include "worker/trainer/testing/tiny_files.h"

namespace ringleader::trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RecordingHost;

// Makes a token's embedding zero, and leaves the file's checksum out.
void ForgetToken(const std::string& path, uint64_t token) {
  std::string bytes = ReadFile(path).value();
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  nlohmann::json header = nlohmann::json::parse(bytes.substr(sizeof(header_bytes), header_bytes));
  const nlohmann::json& embeddings = header.at("model.embed_tokens.weight");
  const uint64_t begin = embeddings.at("data_offsets")[0], end = embeddings.at("data_offsets")[1];
  const uint64_t row_bytes = (end - begin) / embeddings.at("shape")[0].get<uint64_t>();
  bytes.replace(sizeof(header_bytes) + header_bytes + begin + token * row_bytes, row_bytes,
                std::string(row_bytes, '\0'));
  header.erase("__metadata__");
  std::string text = header.dump();
  text.resize(header_bytes, ' ');
  bytes.replace(sizeof(header_bytes), header_bytes, text);
  ASSERT_TRUE(WriteFileAtomically(path, bytes).ok());
}

class ResumeTest : public ::testing::Test {
 protected:
  TempDir directory_;
  std::vector<RecordingHost> hosts_;

  TrainingJob Job() { return testing::TinyTrainingJob(directory_.path().string(), 1); }
  static TrainingJob Retried(TrainingJob job) {
    job.attempt = 2;
    return job;
  }

  absl::StatusOr<Outcome> Run(const TrainingJob& job, uint64_t stop_after = 0) {
    hosts_ = std::vector<RecordingHost>(1);
    hosts_[0].on_step = [stop_after](RecordingHost& host, const StepRecord& record) {
      host.stop = record.step == stop_after;
    };
    return testing::RunRanks(job, hosts_)[0];
  }
  std::vector<double> Losses() const {
    std::vector<double> losses;
    for (const StepRecord& step : hosts_[0].steps) losses.push_back(step.loss);
    return losses;
  }
  // What the checkpoint of a step says of the training so far.
  static nlohmann::json StateAt(const TrainingJob& job, int step) {
    std::ifstream file(
        absl::StrFormat("%s/step-%010d/manifest.json", job.checkpoint_directory, step));
    return nlohmann::json::parse(file).at("body").at("state");
  }
};

TEST_F(ResumeTest, GoesOnWhereItStoppedAndEvaluatesNoMoreThanThat) {
  TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::vector<double> undisturbed = Losses();
  job.checkpoint_directory += "-2";
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  EXPECT_EQ(Losses(), std::vector<double>(undisturbed.begin() + 3, undisturbed.end()));
  ASSERT_EQ(hosts_[0].evals.size(), 1u) << "the start was evaluated by the first attempt";
  EXPECT_EQ(hosts_[0].evals[0].step, 6u);
}

TEST_F(ResumeTest, ACheckpointCountsOverAllAttempts) {
  TrainingJob job = Job();
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  ASSERT_TRUE(Run(job).ok());
  const nlohmann::json state = StateAt(job, 6);
  EXPECT_EQ(state.at("step"), 6);
  EXPECT_EQ(state.at("updates"), 6);
  EXPECT_EQ(state.at("skipped_steps"), 0);
  EXPECT_EQ(state.at("tokens"), 6 * 2 * testing::kTinySequence);
  EXPECT_EQ(state.at("data_position"), 6 * 2);
  EXPECT_EQ(state.at("seed"), 1);
}

TEST_F(ResumeTest, AJobThatIsDoneExportsItsModelAgain) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  std::filesystem::remove_all(hosts_[0].model);
  EXPECT_EQ(Run(Retried(job)).value(), Outcome::kCompleted);
  EXPECT_TRUE(hosts_[0].steps.empty());
  EXPECT_TRUE(hosts_[0].checkpoints.empty());
  EXPECT_TRUE(std::filesystem::exists(hosts_[0].model + "/model.safetensors"));
}

TEST_F(ResumeTest, StepsRatesAndSavingMayChange) {
  TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  job.steps = job.schedule.total_steps = 8;
  job.schedule.peak = 1e-3;
  job.checkpoint_every_steps = 1;
  job.eval_sequences = 1;
  job.attempt = 2;
  EXPECT_EQ(Run(job).value(), Outcome::kCompleted);
  ASSERT_EQ(hosts_[0].steps.size(), 2u);
  EXPECT_EQ(hosts_[0].steps[0].step, 7u);
}

TEST_F(ResumeTest, AnotherJobsCheckpointIsRefused) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::string other_data = directory_.File("other");
  std::filesystem::copy(job.train_data, other_data, std::filesystem::copy_options::recursive);
  const std::string other_model = directory_.File("other.json");
  nlohmann::json config = nlohmann::json::parse(std::ifstream(job.model_config));
  config["rope_theta"] = 20000.0;  // of as many parameters
  std::ofstream(other_model) << config;
  std::vector<TrainingJob> others(8, job);
  others[0].name = "other";
  others[1].train_data = other_data;
  others[2].sequence_length = 256;
  others[3].global_batch = 1;
  others[4].seed = 2;
  others[5].batching = {.samples = true, .overlong = data::Overlong::kSplit};
  others[6].model_config = other_model;
  others[7].attention.mask = patterns::Mask::kBlockCausal;
  others[7].attention.mask_block = 64;
  // The folder's owner is asked before its checkpoints are.
  EXPECT_THAT(std::string(Run(others[0]).status().message()), HasSubstr("belongs to jobs/tiny"));
  for (size_t i = 0; i < others.size(); ++i) {
    std::filesystem::remove(job.checkpoint_directory + "/owner.json");
    const absl::Status refused = Run(others[i]).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << i << " " << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("step-0000000006 is of another job"));
  }
  EXPECT_TRUE(Run(Retried(job)).ok());
}

// "Edit, delete, submit again" would train nothing, and end well with the model of before.
TEST_F(ResumeTest, AnEarlierJobOfTheNameThatEndedIsNotThisOne) {
  TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const absl::Status refused = Run(job).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("step-0000000006 is of an earlier job of this name"));
  EXPECT_TRUE(Run(Retried(job)).ok()) << "an attempt that ended before it exported";
  job.checkpoint_step = 6;
  EXPECT_TRUE(Run(job).ok()) << "its own";
  job.checkpoint_step = 0;
  job.model_init = "elsewhere";
  EXPECT_NE(JobDigest(job, model::LoadModelConfig(job.model_config).value(),
                      *data::TokenFolder::Open(job.train_data)),
            JobDigest(Job(), model::LoadModelConfig(job.model_config).value(),
                      *data::TokenFolder::Open(job.train_data)));
  job = Job();
  job.steps = job.schedule.total_steps = 7;
  EXPECT_TRUE(Run(job).ok());
  EXPECT_EQ(hosts_[0].steps.size(), 1u) << "there is more to train";
}

// Its sequences would come in another order, some twice and some never.
TEST_F(ResumeTest, OtherDataInTheSamePlaceIsRefused) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::string kept = directory_.File("kept"), text = directory_.File("text");
  std::filesystem::rename(job.train_data, kept);
  std::filesystem::create_directories(text);
  std::ofstream(text + "/more") << std::string(40000, 'x');
  data::PackOptions options;
  options.paths = {text};
  options.output = directory_.File("packed");
  options.eval_share = 0;
  ASSERT_TRUE(data::Pack(options).ok());
  std::filesystem::rename(directory_.File("packed") + "/train", job.train_data);
  const absl::Status refused = Run(job).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("data.train or what lies there"));
  std::filesystem::remove_all(job.train_data);
  std::filesystem::rename(kept, job.train_data);
  EXPECT_TRUE(Run(Retried(job)).ok());
}

// They went by the path of the data alone.
TEST_F(ResumeTest, CheckpointsOfEarlierReleasesAreTakenUp) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::string path = job.checkpoint_directory + "/step-0000000006/manifest.json";
  nlohmann::json manifest = nlohmann::json::parse(ReadFile(path).value());
  nlohmann::json& digest = manifest.at("body").at("state").at("job_digest");
  const std::string of_now = digest;
  const data::TokenFolder data = *data::TokenFolder::Open(job.train_data);
  TrainingJob longer = job;
  const std::string kept = directory_.File("kept");
  std::filesystem::copy(job.checkpoint_directory, kept, std::filesystem::copy_options::recursive);
  for (const DigestOf of : {DigestOf::kContent, DigestOf::kCounts, DigestOf::kPath}) {
    digest = JobDigest(job, model::LoadModelConfig(job.model_config).value(), data, of);
    EXPECT_NE(digest, of_now);
    manifest[checkpoint::kChecksumKey] = checkpoint::ChecksumOf(manifest);
    std::filesystem::remove_all(job.checkpoint_directory);
    std::filesystem::copy(kept, job.checkpoint_directory, std::filesystem::copy_options::recursive);
    ASSERT_TRUE(WriteFileAtomically(path, manifest.dump()).ok());
    longer.steps = longer.schedule.total_steps = 7;
    EXPECT_TRUE(Run(longer).ok());
    ASSERT_EQ(hosts_[0].steps.size(), 1u);
  }
}

// The same counts of other tokens are other data.
TEST_F(ResumeTest, OtherTokensOfTheSameNumberAreRefused) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const data::Manifest manifest = *data::ReadManifest(job.train_data);
  const data::TokenFolder data = *data::TokenFolder::Open(job.train_data);
  ASSERT_EQ(manifest.shards.size(), 1u);
  std::vector<uint32_t> tokens;
  for (uint64_t i = 0; i < data.tokens(); ++i) tokens.push_back(data.token(i));
  const std::vector<uint64_t> starts = data.DocumentStarts(0, data.tokens());
  std::swap(tokens[0], tokens[1]);
  ASSERT_NE(tokens[0], tokens[1]);
  ASSERT_TRUE(data::WriteShard(job.train_data + "/" + manifest.shards[0], tokens, starts,
                               /*token_bytes=*/2, {})
                  .ok());
  const absl::Status refused = Run(job).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("data.train or what lies there"));
}

// Of a release that knew more, say, or for ranks that are no more: the job's own plan goes on.
TEST_F(ResumeTest, APlanOfTheCheckpointThatMakesNoSenseEndsNothing) {
  TrainingJob job = Job();
  job.plan_bytes = "a plan";
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  Plan of_two_ranks = job.plan;
  of_two_ranks.version = 9;
  of_two_ranks.ring.inner = 2;
  for (const bool is_readable : {false, true}) {
    hosts_ = std::vector<RecordingHost>(1);
    if (is_readable) hosts_[0].plans["a plan"] = of_two_ranks;
    hosts_[0].on_step = [](RecordingHost& host, const StepRecord&) { host.stop = true; };
    ::testing::internal::CaptureStdout();
    const auto outcome = testing::RunRanks(job, hosts_)[0];
    const std::string said = ::testing::internal::GetCapturedStdout();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_THAT(said,
                HasSubstr(is_readable ? "refused a plan: " : "refused a plan: no plan: a plan"));
    ASSERT_EQ(hosts_[0].steps.size(), 1u);
    EXPECT_EQ(hosts_[0].steps[0].plan_version, job.plan.version);
  }
}

// An attempt may die between a step's checkpoint and its evaluation.
TEST_F(ResumeTest, AnEvaluationThatIsMissingIsMadeUpFor) {
  TrainingJob job = Job();
  job.eval_data = job.train_data;
  job.eval_sequences = 2;
  job.eval_every_steps = 2;
  job.steps = job.schedule.total_steps = 4;
  const auto evaluated = [&] {
    std::vector<uint64_t> steps;
    for (const EvalRecord& record : hosts_[0].evals) steps.push_back(record.step);
    return steps;
  };
  EXPECT_EQ(Run(job, /*stop_after=*/2).value(), Outcome::kStopped);
  EXPECT_THAT(evaluated(), ElementsAre(0, 2));
  const double loss = hosts_[0].evals[1].outcome.loss;
  EXPECT_EQ(Run(Retried(job)).value(), Outcome::kCompleted);
  EXPECT_THAT(evaluated(), ElementsAre(2, 4));
  EXPECT_EQ(hosts_[0].evals[0].outcome.loss, loss);
  const double last = hosts_[0].evals[1].outcome.loss;
  // Nothing is left to train, and the record may lack the last evaluation.
  EXPECT_EQ(Run(Retried(job)).value(), Outcome::kCompleted);
  EXPECT_THAT(evaluated(), ElementsAre(4));
  EXPECT_EQ(hosts_[0].evals[0].outcome.loss, last);
}

TEST_F(ResumeTest, SkippedStepsAreCountedOnThroughAStop) {
  TrainingJob job = Job();
  // The first update throws the weights so far that every gradient after it is infinite.
  job.schedule = {.peak = 1e30, .total_steps = 50};
  job.steps = 50;
  job.max_skipped_steps = 3;
  job.checkpoint_every_steps = 0;  // or one is still being written when the attempt fails
  EXPECT_EQ(Run(job, 3).value(), Outcome::kStopped);
  EXPECT_FALSE(hosts_[0].steps[0].skipped);
  EXPECT_TRUE(hosts_[0].steps[1].skipped);
  EXPECT_TRUE(hosts_[0].steps[2].skipped);
  ::testing::internal::CaptureStdout();
  const absl::Status failed = Run(job).status();
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr(")  SKIPPED: not finite\n"));
  EXPECT_EQ(hosts_[0].steps.size(), 1u) << "two before the stop, one after it, and the fourth ends";
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("step 5: the gradient is NaN or infinite"));
  EXPECT_THAT(std::string(failed.message()), HasSubstr("as in the 3 steps before it"));
}

// Fewer steps than may be skipped in a row are no reason to hand over a model of noise.
TEST_F(ResumeTest, AJobThatNeverMadeAStepHasNotTrained) {
  TrainingJob job = Job();
  nlohmann::json config = nlohmann::json::parse(std::ifstream(job.model_config));
  config["initializer_range"] = 1e300;
  std::ofstream(job.model_config) << config;
  job.steps = 3;
  job.max_skipped_steps = 10;
  job.eval_sequences = 0;
  const absl::Status failed = Run(job).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("every step was skipped"));
  EXPECT_EQ(hosts_[0].steps.size(), 3u);
  EXPECT_EQ(hosts_[0].model, "");
}

TEST_F(ResumeTest, StepsThatWereSkippedCountOnlyInARow) {
  // A model to which one token is nothing, and whose norm divides by nothing then: no sequence with
  // it has a finite gradient.
  constexpr int kForgotten = 200;
  TrainingJob job = Job();
  nlohmann::json config = nlohmann::json::parse(std::ifstream(job.model_config));
  config["tie_word_embeddings"] = false;  // or it is in every sequence's scores
  config["rms_norm_eps"] = 1e-300;        // 0 in fp32
  std::ofstream(job.model_config) << config;
  job.steps = 1;
  ASSERT_TRUE(Run(job).ok());
  job.model_init = directory_.File("forgetful");
  std::filesystem::copy(hosts_[0].model, job.model_init);
  ForgetToken(job.model_init + "/model.safetensors", kForgotten);

  // Eight sequences, of which two have it.
  std::vector<uint16_t> ids(8 * testing::kTinySequence + 1);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i * i % 190);
  ids[0 * testing::kTinySequence + 7] = ids[5 * testing::kTinySequence + 7] = kForgotten;
  const std::string ids_path = directory_.File("ids");
  const std::string bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ids[0]));
  ASSERT_TRUE(WriteFileAtomically(ids_path, bytes).ok());
  data::PackOptions pack;
  pack.input = data::PackOptions::Input::kUint16;
  pack.paths = {ids_path};
  pack.output = directory_.File("packed");
  pack.vocabulary = 257;
  pack.separator = 256;
  pack.eval_share = 0;
  pack.tokenizer = "bytes";
  ASSERT_TRUE(data::Pack(pack).ok());
  job.train_data = pack.output + "/train";
  job.eval_sequences = 0;
  job.steps = 8;
  job.global_batch = 1;
  job.max_skipped_steps = 1;
  job.checkpoint_directory = directory_.File("skipped");
  const absl::StatusOr<Outcome> outcome = Run(job);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  std::vector<uint64_t> skipped;
  for (const StepRecord& step : hosts_[0].steps) {
    if (step.skipped) skipped.push_back(step.step);
  }
  ASSERT_EQ(skipped.size(), 2u);
  EXPECT_GT(skipped[1], skipped[0] + 1);
  // Adam's corrections count the updates that were made.
  EXPECT_EQ(StateAt(job, 8).at("updates"), 6);
}

TEST_F(ResumeTest, WhereNoCheckpointIsWholeNothingIsBegunAnew) {
  const TrainingJob job = Job();
  ASSERT_TRUE(Run(job, 3).ok());
  for (const auto& entry : std::filesystem::directory_iterator(job.checkpoint_directory)) {
    if (entry.is_directory()) std::ofstream(entry.path() / "manifest.json") << "damaged";
  }
  const absl::Status refused = Run(job).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("remove them to start over"));
  EXPECT_TRUE(hosts_[0].steps.empty());
}

TEST_F(ResumeTest, AnEmptyFolderIsABeginningOnlyWhereNothingWasSaved) {
  TrainingJob job = Job();
  job.steps = 1;
  job.checkpoint_step = 4;
  const absl::Status missing = Run(job).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kUnavailable) << missing;
  job.checkpoint_step = 0;
  EXPECT_TRUE(Run(job).ok());
}

// Though all that it trained was saved before.
TEST_F(ResumeTest, AnAttemptThatWasReplacedLeavesTheModelAsItIs) {
  TrainingJob job = Job();
  ASSERT_TRUE(Run(job).ok());
  const std::string model = hosts_[0].model;
  std::ofstream(model + "/of-the-newer-attempt").flush();

  job.fencing_token += 1;
  job.steps += 1;
  job.checkpoint_every_steps = 0;
  hosts_ = std::vector<RecordingHost>(1);
  // What is left to be done then is the export.
  hosts_[0].on_checkpoint = [&](uint64_t step) {
    EXPECT_EQ(step, job.steps);
    const absl::Status claimed = checkpoint::ClaimDirectory(
        job.checkpoint_directory,
        {.job = job.name, .uid = job.uid, .token = job.fencing_token + 1, .owner = job.owner});
    EXPECT_TRUE(claimed.ok()) << claimed;
  };
  const absl::Status replaced = testing::RunRanks(job, hosts_)[0].status();
  EXPECT_EQ(replaced.code(), absl::StatusCode::kAborted) << replaced;
  EXPECT_EQ(hosts_[0].model, "");
  EXPECT_TRUE(std::filesystem::exists(model + "/of-the-newer-attempt"));
}

// Or one that takes longer than a hang does passes for one.
TEST_F(ResumeTest, AnEvaluationTellsOfEachMicroBatch) {
  TrainingJob job = Job();
  job.steps = 1;
  const auto progress_with = [&](uint64_t sequences) {
    job.eval_sequences = sequences;
    job.checkpoint_directory = directory_.File(absl::StrFormat("evaluates-%d", sequences));
    const uint64_t before = Progress::count();
    EXPECT_TRUE(Run(job).ok());
    return Progress::count() - before;
  };
  const uint64_t with_two = progress_with(2);
  // Before the first step and after the last.
  EXPECT_EQ(progress_with(4), with_two + 2 * 2);
}

}  // namespace
}  // namespace ringleader::trainer
