#include "worker/trainer/steps/job_digest.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"

namespace ringleader::trainer {

std::string JobDigest(const TrainingJob& job, const model::ModelConfig& model,
                      const data::TokenFolder& data, DataKnownBy by) {
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
  if (by != DataKnownBy::kPath) {
    const data::Manifest& manifest = data.manifest();
    absl::StrAppend(&identity, "\ndata ", manifest.tokens, " ", manifest.documents, " ",
                    manifest.vocabulary, " ", manifest.separator);
  }
  if (by == DataKnownBy::kContent) absl::StrAppend(&identity, "\ncontent ", data.checksum());
  return absl::StrFormat("%016x", Checksum(identity.data(), identity.size()));
}

}  // namespace ringleader::trainer
