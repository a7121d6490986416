#include "cli/jobs/job_check.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "jobspec/jobspec.h"
#include "jobspec/mistakes.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/companion_files.h"
#include "worker/data/loader.h"

namespace ringleader::cli {
namespace {

namespace fs = std::filesystem;

// What is wrong, in the order in which it was found.
class Problems {
 public:
  void Add(const char* field, const absl::Status& status) {
    if (status.ok()) return;
    const std::string text(status.message());
    // Some name the field by themselves.
    lines_.push_back(text.starts_with(field) ? text : absl::StrCat(field, ": ", text));
    // A damaged file is what the job asks for, and no fault of these programs.
    const bool is_damage = absl::IsDataLoss(status);
    if (lines_.size() == 1) code_ = is_damage ? absl::StatusCode::kInvalidArgument : status.code();
  }
  absl::Status status() const {
    if (lines_.empty()) return absl::OkStatus();
    if (lines_.size() == 1) return absl::Status(code_, lines_[0]);
    std::string text = absl::StrCat(lines_.size(), " mistakes:");
    for (const std::string& line : lines_) absl::StrAppend(&text, "\n  ", line);
    return absl::Status(code_, text);
  }

 private:
  std::vector<std::string> lines_;
  absl::StatusCode code_ = absl::StatusCode::kOk;
};

// Of shards that are not here, or not to be opened here.
absl::Status WithAdvice(const absl::Status& status) {
  constexpr char kLeave[] = "or leave it to the trainers with --no-check-files";
  if (absl::IsNotFound(status)) {
    return absl::NotFoundError(
        absl::StrCat(status.message(), "; its manifest names it: pack the text again, ", kLeave));
  }
  if (!absl::IsUnavailable(status)) return status;
  return absl::PermissionDeniedError(
      absl::StrCat(status.message(), "; check its permissions, ", kLeave));
}

// Only the manifest and its shards' headers: trainers read them whole.
absl::Status CheckTokens(const std::string& folder, const v1::JobSpec& spec,
                         const model::ModelConfig& model) {
  ASSIGN_OR_RETURN(const data::Manifest manifest, data::ReadManifest(folder));
  RETURN_IF_ERROR(WithAdvice(data::CheckShards(folder, manifest)));
  const data::Batching batching = {
      .prefixes = spec.attention().mask() == v1::AttentionSpec::MASK_PREFIX_LM,
      .hidden_share = spec.data().has_hidden_token() ? 1.0 : 0.0,
      .hidden_token = spec.data().hidden_token()};
  RETURN_IF_ERROR(
      data::CheckFits(folder, manifest, model.known() ? model.vocab_size : 0, batching));
  RETURN_IF_ERROR(data::CheckTokenizer(folder, manifest, spec.model().init()));
  const bool is_packed = spec.data().batching() != v1::DataSpec::SAMPLES;
  if (is_packed && manifest.tokens < spec.data().sequence_length() + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " holds ", manifest.tokens, " tokens; one sequence of ",
                     spec.data().sequence_length(), " needs ", spec.data().sequence_length() + 1,
                     ": pack more text or lower data.sequence_length"));
  }
  return absl::OkStatus();
}

absl::Status CheckPackedAlike(const v1::DataSpec& data) {
  const auto train = data::ReadManifest(data.train()), eval = data::ReadManifest(data.eval());
  if (!train.ok() || !eval.ok()) return absl::OkStatus();  // a mistake of its own
  return data::CheckPackedAlike(data.train(), *train, data.eval(), *eval);
}

// Checks that it can be made. Whether trainers may write into it depends on whose user they run as.
absl::Status CheckFolder(const fs::path& folder) {
  fs::path existing = folder;
  std::error_code error;
  while (!fs::exists(existing, error) && existing.has_relative_path()) {
    existing = existing.parent_path();
  }
  if (fs::is_directory(existing, error)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(existing.string(), " is a file, not a folder"));
}

// Of a file with mistakes it says what does not go with the model, too: else it might advise, say,
// another data.sequence_length for a parallelism.heads that the model does not have.
absl::Status CheckSpec(const JobFile& file, const v1::JobSpec& spec) {
  absl::Status valid = jobspec::Validate(spec);
  if (valid.ok()) return valid;
  if (file.check_files) {
    const auto model = model::LoadModelConfig(jobspec::ModelConfigPath(spec.model()));
    if (model.ok()) valid = jobspec::Validate(spec, *model);
  }
  return absl::Status(valid.code(), absl::StrCat(file.path, ": ", valid.message()));
}

}  // namespace

absl::StatusOr<CheckedJob> CheckJob(const JobFile& file) {
  CheckedJob job;
  ASSIGN_OR_RETURN(job.spec, jobspec::LoadJobFile(file.path, file.overrides));
  RETURN_IF_ERROR(CheckSpec(file, job.spec));
  if (!file.check_files) return job;
  if (const absl::Status files = jobspec::CheckFiles(job.spec); absl::IsNotFound(files)) {
    return absl::NotFoundError(
        absl::StrCat(files.message(),
                     " on this machine; --no-check-files leaves it to the coordinator to look"));
  } else if (!files.ok()) {
    return files;
  }
  const v1::JobSpec& spec = job.spec;
  Problems problems;
  const bool has_folder = !spec.model().config().empty();
  const char* const model_field = has_folder ? "model.config" : "model.init";
  if (auto model = model::LoadModelConfig(jobspec::ModelConfigPath(spec.model())); model.ok()) {
    job.model = *std::move(model);
    jobspec::Mistakes mistakes;
    jobspec::FindModelMistakes(spec, job.model, &mistakes);
    for (const std::string& line : mistakes.lines()) {
      problems.Add("", absl::InvalidArgumentError(line));
    }
  } else {
    problems.Add(model_field, model.status());
  }
  problems.Add(model_field, model::ReadCompanionFiles(
                                model::CompanionFolder(spec.model().config(), spec.model().init()))
                                .status());
  problems.Add("data.train", CheckTokens(spec.data().train(), spec, job.model));
  if (!spec.data().eval().empty()) {
    problems.Add("data.eval", CheckTokens(spec.data().eval(), spec, job.model));
    problems.Add("data.eval", CheckPackedAlike(spec.data()));
  }
  problems.Add("checkpoint.directory", CheckFolder(spec.checkpoint().directory()));
  RETURN_IF_ERROR(problems.status());
  return job;
}

}  // namespace ringleader::cli
