#include "worker/trainer/steps/run.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/checksum.h"
#include "base/process/progress.h"
#include "base/status_macros.h"
#include "model_shape/companion_files.h"
#include "worker/attention/stats/stopwatch.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/checkpointer.h"
#include "worker/checkpoint/directory.h"
#include "worker/checkpoint/ownership.h"
#include "worker/data/loader.h"
#include "worker/model/files/export_place.h"
#include "worker/trainer/engine/machine_memory.h"
#include "worker/trainer/engine/model_source.h"
#include "worker/trainer/engine/same_inputs.h"
#include "worker/trainer/measure/attention_grid.h"
#include "worker/trainer/measure/links.h"
#include "worker/trainer/steps/job_digest.h"
#include "worker/trainer/steps/step_agreement.h"
#include "worker/trainer/steps/step_loop.h"
#include "worker/trainer/steps/step_profiler.h"

namespace ringleader::trainer {
namespace {

using attention::Stopwatch;

// The parts of one attempt and its course: Prepare, then Train, then Finish.
class Attempt {
 public:
  Attempt(const TrainingJob& job, comm::Communicator& world, Host& host)
      : job_(job), world_(world), host_(host), plan_bytes_(job.plan_bytes) {}

  absl::StatusOr<Outcome> Run() {
    RETURN_IF_ERROR(Prepare());
    ASSIGN_OR_RETURN(const Outcome outcome, Train());
    if (outcome == Outcome::kCompleted) RETURN_IF_ERROR(ExportModel());
    return outcome;
  }

 private:
  bool is_first() const { return world_.rank() == 0; }
  checkpoint::FolderOwner Owner() const {
    return {.job = job_.name, .uid = job_.uid, .token = job_.fencing_token, .owner = job_.owner};
  }

  absl::Status Prepare();
  absl::Status MeasureMachine();
  absl::Status OpenData();
  absl::Status CheckInputs();
  absl::Status Resume();
  // Goes by the plan of a checkpoint where that is newer than the job's: the coordinator's record
  // was put back to an earlier state.
  absl::Status TakeSavedPlan(const std::string& bytes);
  absl::Status StartCheckpointer();
  absl::StatusOr<Outcome> Train();
  bool IsEvaluated(uint64_t step) const;
  // Where the job has something to evaluate on.
  absl::Status Evaluate(uint64_t step);
  absl::Status Save(uint64_t step);
  absl::Status ExportModel();
  void WarnOfPlan(std::string_view problem) const;
  void PrintSettings() const;
  void PrintStep(const StepRecord& record) const;

  const TrainingJob& job_;
  comm::Communicator& world_;
  Host& host_;

  std::unique_ptr<StepEngine> engine_;
  std::unique_ptr<data::Loader> train_, eval_;
  std::unique_ptr<checkpoint::Checkpointer> checkpointer_;
  std::unique_ptr<StepLoop> loop_;
  // Rank 0: files of the start model, as they were when training began; exported with the result.
  std::map<std::string, std::string> companions_;
  std::string resumed_from_;  // a checkpoint's folder; empty: none
  // The plan in force, as it travels.
  std::string plan_bytes_;
  uint64_t done_ = 0;      // steps
  uint64_t tokens_ = 0;    // trained on
  absl::Time save_start_;  // written only while no save is under way
  double checkpoint_seconds_ = 0, evaluation_seconds_ = 0;  // since the last step
};

absl::Status Attempt::Prepare() {
  // What could never be saved is not begun: the first checkpoint may be hours away.
  RETURN_IF_ERROR(checkpoint::CheckDirectory(job_.checkpoint_directory, world_));
  // Before anything is read: from here on no attempt before this one publishes anything.
  if (is_first()) {
    RETURN_IF_ERROR(checkpoint::ClaimDirectory(job_.checkpoint_directory, Owner()));
  }
  if (is_first()) {
    ASSIGN_OR_RETURN(companions_, model::ReadCompanionFiles(
                                      model::CompanionFolder(job_.model_config, job_.model_init)));
  }
  ASSIGN_OR_RETURN(engine_, StepEngine::Create(job_, world_, host_));
  if (is_first()) PrintSettings();
  RETURN_IF_ERROR(MeasureMachine());
  RETURN_IF_ERROR(OpenData());
  RETURN_IF_ERROR(CheckInputs());
  loop_ = std::make_unique<StepLoop>(job_, StepParts{.engine = engine_.get(),
                                                     .train = train_.get(),
                                                     .eval = eval_.get(),
                                                     .world = &world_,
                                                     .host = &host_});
  RETURN_IF_ERROR(loop_->Apply(job_.plan, 0));
  RETURN_IF_ERROR(Resume());
  return StartCheckpointer();
}

// The other ranks help with links, and then wait where they next need rank 0.
absl::Status Attempt::MeasureMachine() {
  const balance::MeasureRequest& request = host_.measure();
  if (request.budget_seconds <= 0) return absl::OkStatus();
  balance::Measurements measured = {.machine = engine_->device().Machine()};
  double seconds = 0;
  {
    const Stopwatch timer(&seconds);
    host_.SetPlace(0, "measuring links");
    ASSIGN_OR_RETURN(measured.links, MeasureLinks(job_, request, engine_->device(), world_));
    if (!is_first()) return absl::OkStatus();
    const auto& known = request.known_layers;
    if (std::find(known.begin(), known.end(), measured.machine) == known.end()) {
      host_.SetPlace(0, "measuring attention");
      measured.rows = MeasureAttention(job_, engine_->config(), request.budget_seconds,
                                       engine_->device(), host_);
    }
  }
  if (measured.rows.empty() && measured.links.empty()) return absl::OkStatus();
  std::printf("measured attention at %zu points and %zu links in %.1f s (docs/latency.md)\n",
              measured.rows.size(), measured.links.size(), seconds);
  std::fflush(stdout);
  host_.ReportMeasurements(measured);
  return absl::OkStatus();
}

absl::Status Attempt::CheckInputs() {
  const std::string config = model::ModelConfigJson(engine_->config());
  ASSIGN_OR_RETURN(const uint64_t weights, DigestOfWeights(job_.model_init));
  const Input inputs[] = {
      {"model.config", ConfigPath(job_), Checksum(config.data(), config.size())},
      {"model.init", job_.model_init, weights},
      {"data.train", job_.train_data, train_->folder().checksum()},
      {"data.eval", job_.eval_data, eval_ == nullptr ? 0 : eval_->folder().checksum()}};
  return CheckSameInputs(inputs, world_);
}

absl::Status Attempt::OpenData() {
  host_.SetPlace(0, "opening the data");
  const auto vocabulary = static_cast<uint64_t>(engine_->config().vocab_size);
  ASSIGN_OR_RETURN(data::Loader train, data::Loader::Open(job_.train_data, job_.sequence_length,
                                                          job_.seed, vocabulary, job_.batching));
  RETURN_IF_ERROR(
      data::CheckTokenizer(job_.train_data, train.folder().manifest(), job_.model_init));
  if (is_first()) std::printf("%s: %s\n", job_.train_data.c_str(), train.Summary().c_str());
  train_ = std::make_unique<data::Loader>(std::move(train));
  if (job_.eval_data.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(data::Loader eval, data::Loader::Open(job_.eval_data, job_.sequence_length,
                                                         job_.seed, vocabulary, job_.batching));
  RETURN_IF_ERROR(data::CheckPackedAlike(job_.train_data, train_->folder().manifest(),
                                         job_.eval_data, eval.folder().manifest()));
  if (is_first()) std::printf("%s: %s\n", job_.eval_data.c_str(), eval.Summary().c_str());
  eval_ = std::make_unique<data::Loader>(std::move(eval));
  return absl::OkStatus();
}

absl::Status Attempt::Resume() {
  host_.SetPlace(0, "looking for a checkpoint");
  std::vector<std::string> problems;
  ASSIGN_OR_RETURN(const std::optional<checkpoint::CheckpointInfo> newest,
                   checkpoint::FindNewestCheckpoint(job_.checkpoint_directory, engine_->layout(),
                                                    world_, &problems));
  if (is_first()) {
    for (const std::string& problem : problems) std::printf("passed over: %s\n", problem.c_str());
  }
  if (!newest.has_value()) {
    if (problems.empty() && job_.checkpoint_step > 0) {
      return absl::UnavailableError(absl::StrFormat(
          "checkpoint.directory %s has no checkpoint, but the job saved one at step %d; mount the "
          "folder on this node (to begin anew, delete the job and submit it again)",
          job_.checkpoint_directory, job_.checkpoint_step));
    }
    if (problems.empty()) return absl::OkStatus();
    // Starting over would throw away what may be mended, and nobody would notice.
    return absl::DataLossError(
        absl::StrFormat("no checkpoint in %s is whole (%s); mend one, or remove them to start over",
                        job_.checkpoint_directory, problems.front()));
  }

  const checkpoint::TrainingState& state = newest->state;
  RETURN_IF_ERROR(CheckIsOf(job_, engine_->config(), train_->folder(), *newest));
  ASSIGN_OR_RETURN(
      const optim::OptimizerShard shard,
      checkpoint::ReadShard(*newest, engine_->shard_begin(), engine_->shard_elements()));
  RETURN_IF_ERROR(engine_->Restore(shard, static_cast<int64_t>(state.updates)));
  RETURN_IF_ERROR(TakeSavedPlan(state.plan));
  loop_->set_skipped_in_a_row(state.skipped_steps);
  if (!patterns::AreOfModel(state.head_budgets, engine_->config().layers,
                            engine_->config().heads)) {
    return absl::DataLossError(newest->path + ": its heads' budgets are of another model");
  }
  loop_->set_head_budgets(state.head_budgets);
  done_ = state.step;
  tokens_ = state.tokens;
  resumed_from_ = newest->path;
  if (is_first()) std::printf("resuming from %s\n", newest->path.c_str());
  return absl::OkStatus();
}

absl::Status Attempt::TakeSavedPlan(const std::string& bytes) {
  if (bytes.empty()) return absl::OkStatus();  // of an earlier release
  const absl::StatusOr<Plan> saved = host_.ParsePlan(bytes);
  if (saved.ok() && saved->version <= job_.plan.version) return absl::OkStatus();
  const absl::Status taken = saved.ok() ? loop_->Apply(*saved, 0) : saved.status();
  if (!taken.ok()) {
    WarnOfPlan(std::string(taken.message()));
    return absl::OkStatus();
  }
  plan_bytes_ = bytes;
  if (is_first()) {
    std::printf("going on by the checkpoint's plan %" PRIu64 ", which is newer than %" PRIu64 "\n",
                saved->version, job_.plan.version);
  }
  return absl::OkStatus();
}

absl::Status Attempt::StartCheckpointer() {
  ASSIGN_OR_RETURN(std::unique_ptr<comm::Communicator> checkpoint_ranks, world_.Split([&] {
    std::vector<int> all(world_.size());
    for (int rank = 0; rank < world_.size(); ++rank) all[rank] = rank;
    return all;
  }()));
  checkpointer_ = std::make_unique<checkpoint::Checkpointer>(
      checkpoint::CheckpointerOptions{.directory = job_.checkpoint_directory,
                                      .keep_last = job_.keep_last,
                                      .owner = Owner(),
                                      .resumed_from = resumed_from_},
      engine_->layout(), std::move(checkpoint_ranks),
      [this](uint64_t step, const absl::StatusOr<std::string>& path) {
        if (!path.ok()) {
          std::printf("step %" PRIu64 ": no checkpoint: %s\n", step,
                      std::string(path.status().message()).c_str());
          return;
        }
        uint64_t bytes = 0;
        std::error_code error;
        for (std::filesystem::directory_iterator file(*path, error), end; file != end;
             file.increment(error)) {
          bytes += file->is_regular_file(error) ? file->file_size(error) : 0;
        }
        host_.ReportCheckpoint(step, *path, bytes,
                               absl::ToDoubleSeconds(absl::Now() - save_start_));
      });
  return absl::OkStatus();
}

absl::StatusOr<Outcome> Attempt::Train() {
  // A step's evaluation comes after its checkpoint: the attempt before may have died in between.
  if (done_ == 0 || IsEvaluated(done_)) RETURN_IF_ERROR(Evaluate(done_));
  uint64_t saved = done_;
  std::optional<Plan> next_plan;
  std::string next_bytes;
  StepProfiler profiler(job_.checkpoint_directory + "/profiles", world_.rank(),
                        job_.engine == Engine::kCuda);
  while (done_ < job_.steps) {
    ASSIGN_OR_RETURN(Agreement agreement, Agree(world_, host_));
    if (agreement.stop) break;
    // One that is told again takes nothing back.
    const uint64_t newest = next_plan.has_value() ? next_plan->version : loop_->plan_version();
    if (agreement.plan.has_value() && agreement.plan->version > newest) {
      next_plan = std::move(agreement.plan);
      next_bytes = std::move(agreement.plan_bytes);
    }
    if (!agreement.refused_plan.empty()) WarnOfPlan(agreement.refused_plan);
    if (agreement.profile_steps > 0) profiler.Start(done_, agreement.profile_steps);
    if (next_plan.has_value() && next_plan->effective_step <= done_ + 1) {
      // Every rank refuses it alike, and the attempt goes on under the last one.
      const uint64_t version = next_plan->version;
      const absl::Status applied = loop_->Apply(*std::exchange(next_plan, std::nullopt), done_);
      if (applied.ok()) {
        plan_bytes_ = std::exchange(next_bytes, {});
      } else {
        WarnOfPlan(absl::StrCat("plan ", version, ": ", std::string(applied.message())));
      }
    }

    ASSIGN_OR_RETURN(StepRecord record, loop_->Train(done_ + 1));
    record.phases.checkpoint += std::exchange(checkpoint_seconds_, 0.0);
    record.phases.evaluation = std::exchange(evaluation_seconds_, 0.0);
    ++done_;
    profiler.StepDone(done_);
    tokens_ += record.tokens;
    host_.ReportStep(record);
    if (is_first()) PrintStep(record);

    const bool last = done_ == job_.steps;
    if (last && engine_->updates() == 0) {
      return absl::FailedPreconditionError(
          "every step was skipped, for gradients were NaN or infinite, and nothing was learned; "
          "look at the model's weights and config.json");
    }
    if (last || (job_.checkpoint_every_steps > 0 && done_ % job_.checkpoint_every_steps == 0)) {
      RETURN_IF_ERROR(Save(done_));
      saved = done_;
    }
    if (IsEvaluated(done_)) RETURN_IF_ERROR(Evaluate(done_));
  }
  if (saved != done_) RETURN_IF_ERROR(Save(done_));
  host_.SetPlace(done_, "finishing the checkpoint");
  RETURN_IF_ERROR(checkpointer_->Wait());
  return done_ == job_.steps ? Outcome::kCompleted : Outcome::kStopped;
}

bool Attempt::IsEvaluated(uint64_t step) const {
  return step == job_.steps || (job_.eval_every_steps > 0 && step % job_.eval_every_steps == 0);
}

absl::Status Attempt::Evaluate(uint64_t step) {
  if (eval_ == nullptr || job_.eval_sequences == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const EvalRecord record, loop_->Evaluate(step));
  evaluation_seconds_ += record.seconds;
  if (is_first()) {
    host_.ReportEval(record);
    std::printf("step %5" PRIu64 "/%" PRIu64 "  held-out loss %.4f\n", step, job_.steps,
                record.outcome.loss);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Attempt::Save(uint64_t step) {
  host_.SetPlace(step, "checkpoint");
  const Stopwatch timer(&checkpoint_seconds_);
  // One save runs at a time. That the one before failed ends nothing, for earlier checkpoints are
  // there, unless it failed because another attempt has taken this one's place.
  if (absl::Status last = checkpointer_->Wait(); absl::IsAborted(last)) return last;
  save_start_ = absl::Now();
  ASSIGN_OR_RETURN(optim::ShardSource shard, engine_->Snapshot());
  checkpointer_->Save(std::move(shard), engine_->shard_elements(),
                      {.step = step,
                       .updates = static_cast<uint64_t>(engine_->updates()),
                       .skipped_steps = loop_->skipped_in_a_row(),
                       .tokens = tokens_,
                       .data_position = step * job_.global_batch,
                       .seed = job_.seed,
                       .job_digest = JobDigest(job_, engine_->config(), train_->folder()),
                       .plan = plan_bytes_,
                       .head_budgets = loop_->head_budgets()});
  return absl::OkStatus();
}

absl::Status Attempt::ExportModel() {
  host_.SetPlace(done_, "exporting the model");
  const std::string token = absl::StrCat("token-", job_.fencing_token);
  const std::string fresh = absl::StrCat(job_.checkpoint_directory, "/.model.", token);
  RETURN_IF_ERROR(engine_->ExportModel(
      fresh, {.type = job_.export_bf16 ? model::StoredType::kBFloat16 : model::StoredType::kFloat32,
              .companions = companions_,
              .mask = std::string(patterns::MaskName(job_.attention.mask))}));
  if (is_first()) {
    std::string place;
    RETURN_IF_ERROR(
        checkpoint::ChangeAsOwner(job_.checkpoint_directory, Owner(), [&]() -> absl::Status {
          ASSIGN_OR_RETURN(place, model::PlaceExport(fresh, job_.checkpoint_directory,
                                                     absl::StrCat("model-", token)));
          return absl::OkStatus();
        }));
    if (place.ends_with(token)) {
      std::printf("%s/model is no export: it was left there, and the model is in %s\n",
                  job_.checkpoint_directory.c_str(), place.c_str());
    }
    host_.ReportModel(place);
  }
  // No rank ends as completed before the model is there.
  const Progress::Waiting for_first_rank;
  return world_.Barrier();
}

void Attempt::WarnOfPlan(std::string_view problem) const {
  if (!is_first()) return;
  std::printf("refused a plan: %.*s\n", static_cast<int>(problem.size()), problem.data());
  std::fflush(stdout);
}

void Attempt::PrintSettings() const {
  const model::ModelConfig& config = engine_->config();
  const auto row = [](const std::string& key, const std::string& value) {
    std::printf("| %-20s | %-56s |\n", key.c_str(), value.c_str());
  };
  row("job", absl::StrFormat("%s, attempt %d", job_.name, job_.attempt));
  row("model", absl::StrFormat("%d layers, hidden %d, %d heads over %d, %d parameters",
                               config.layers, config.hidden_size, config.heads, config.kv_heads,
                               engine_->layout().ParameterCount()));
  row(job_.batching.samples ? "micro-batch" : "sequence",
      job_.batching.samples ? absl::StrFormat("up to %d tokens", job_.sequence_length)
                            : absl::StrFormat("%d tokens", job_.sequence_length));
  row("a step",
      absl::StrFormat("%d %s", job_.global_batch, job_.batching.samples ? "samples" : "sequences"));
  row("packed documents", job_.batching.samples ? "none: a document is a sample"
                          : job_.document_mask  ? "kept apart"
                                                : "not kept apart (data.document_mask: false)");
  row("a query may see", std::string(patterns::MaskName(job_.attention.mask)));
  row("predicted", job_.batching.hidden_share > 0
                       ? absl::StrFormat("%g of the tokens, hidden", job_.batching.hidden_share)
                       : "the next token");
  row("ranks",
      absl::StrFormat("%d = %d context x %d data", world_.size(), job_.context, job_.data));
  row("ring", absl::StrFormat("%d inner x %d outer, stripe %d", job_.plan.ring.inner,
                              job_.plan.ring.outer, job_.plan.stripe));
  if (job_.attention.head_ranks > 1) {
    row("heads",
        absl::StrFormat("%d ranks of the ring's, each with %d of them", job_.attention.head_ranks,
                        config.heads / job_.attention.head_ranks));
  }
  row("steps", absl::StrFormat("%d, learning rate %g, warm-up %d", job_.steps, job_.schedule.peak,
                               job_.schedule.warmup_steps));
  for (const auto& [key, value] : engine_->Settings()) row(key, value);
  std::fflush(stdout);
}

void Attempt::PrintStep(const StepRecord& record) const {
  const PhaseSeconds& phases = record.phases;
  const std::string copies = phases.exposed_offload > 0
                                 ? absl::StrFormat(", host copies %.3f", phases.exposed_offload)
                                 : "";
  std::printf(
      "step %5" PRIu64 "/%" PRIu64
      "  loss %.4f  norm %.3f  lr %.2e  %.2f s  %.0f tok/s  (index %.2f, attention %.2f + %.2f, "
      "linear %.2f, waiting %.2f, optimizer %.2f%s)%s\n",
      record.step, job_.steps, record.loss, record.gradient_norm, record.learning_rate,
      record.step_seconds, static_cast<double>(record.tokens) / record.step_seconds, phases.index,
      phases.attention_forward, phases.attention_backward, phases.linear,
      phases.exposed_communication, phases.optimizer, copies.c_str(),
      !record.has_labels ? "  SKIPPED: no token to predict"
      : record.skipped   ? "  SKIPPED: not finite"
                         : "");
  std::fflush(stdout);
}

std::string FirstLine(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

absl::StatusOr<Outcome> Run(const TrainingJob& job, comm::Communicator& world, Host& host) {
  absl::StatusOr<Outcome> outcome;
  auto attempt = std::make_unique<Attempt>(job, world, host);
  try {
    outcome = attempt->Run();
  } catch (const c10::OutOfMemoryError& error) {
    // LibTorch's sentence has the numbers: asked for, free, held.
    outcome = absl::ResourceExhaustedError(absl::StrFormat(
        "rank %d: %s; set resources.recompute: full and resources.offload: host, use more "
        "GPUs (resources.trainers) or a shorter data.sequence_length",
        job.rank, FirstLine(error.what_without_backtrace())));
  } catch (const c10::Error& error) {
    outcome = absl::InternalError(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    outcome = absl::ResourceExhaustedError(absl::StrFormat(
        "out of memory with %s in use; use more trainers on more nodes or a shorter sequence",
        FormatBytes(PeakMemoryBytes())));
  } catch (const std::exception& error) {
    outcome = absl::InternalError(error.what());
  }
  if (outcome.ok()) return outcome;
  // The process ends now: to take a broken device down may hang, or crash before the worker knows
  // the reason.
  static_cast<void>(attempt.release());
  // An error that passes through LibTorch loses its code: the communicator knows whether it was a
  // peer's failure. What this rank found wrong by itself stays its own, whoever was first.
  const bool may_be_a_peers = absl::IsAborted(outcome.status()) ||
                              absl::IsInternal(outcome.status()) ||
                              absl::IsUnavailable(outcome.status());
  if (may_be_a_peers && world.aborted_by_peer()) return world.status();
  // Releases the peers, and this rank's checkpoint writer.
  world.Abort(std::string(outcome.status().message()));
  return outcome;
}

}  // namespace ringleader::trainer
