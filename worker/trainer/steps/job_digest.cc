#include "worker/trainer/steps/job_digest.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"

namespace ringleader::trainer {

std::string JobDigest(const TrainingJob& job, const model::ModelConfig& model,
                      const data::TokenFolder& data, DigestOf of) {
  std::string identity =
      absl::StrCat(job.name, "\n", model::ModelConfigJson(model), "\n", job.train_data, "\n",
                   job.sequence_length, "\n", job.global_batch, "\n", job.seed);
  if (job.batching.samples) {
    absl::StrAppend(&identity, "\nsamples ", static_cast<int>(job.batching.overlong));
  }
  if (job.attention.mask != patterns::Mask::kCausal) {
    absl::StrAppend(&identity, "\nmask ", std::string(patterns::MaskName(job.attention.mask)), " ",
                    job.attention.mask_block, " ", job.batching.hidden_share, " ",
                    job.batching.hidden_token);
  }
  if (of != DigestOf::kPath) {
    const data::Manifest& manifest = data.manifest();
    absl::StrAppend(&identity, "\ndata ", manifest.tokens, " ", manifest.documents, " ",
                    manifest.vocabulary, " ", manifest.separator);
  }
  if (of == DigestOf::kDataAndInit || of == DigestOf::kContent) {
    absl::StrAppend(&identity, "\ncontent ", data.checksum());
  }
  if (of == DigestOf::kDataAndInit) absl::StrAppend(&identity, "\ninit ", job.model_init);
  return absl::StrFormat("%016x", Checksum(identity.data(), identity.size()));
}

absl::Status CheckIsOf(const TrainingJob& job, const model::ModelConfig& model,
                       const data::TokenFolder& data, const checkpoint::CheckpointInfo& found) {
  const checkpoint::TrainingState& state = found.state;
  if (state.step > job.steps) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is of step %d, training.steps is %d; give more steps, or another checkpoint.directory",
        found.path, state.step, job.steps));
  }
  const auto is_ours = [&](DigestOf of) {
    return state.job_digest == JobDigest(job, model, data, of);
  };
  if (!is_ours(DigestOf::kDataAndInit) && !is_ours(DigestOf::kContent) &&
      !is_ours(DigestOf::kCounts) && !is_ours(DigestOf::kPath)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is of another job (name, model or model.init, data.train or what lies there, sequence "
        "length, batch or seed differ); set checkpoint.directory to another folder, or remove this "
        "one",
        found.path));
  }
  // A job that has saved nothing yet did not train this: one of its name did, before.
  const bool is_of_earlier_job = job.attempt == 1 && job.checkpoint_step == 0;
  if (!is_of_earlier_job || state.step < job.steps) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s is of an earlier job of this name, and of step %d, where training.steps ends: nothing is "
      "left to train; give more steps, or another checkpoint.directory",
      found.path, state.step));
}

}  // namespace ringleader::trainer
