#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "jobspec/jobspec.h"

namespace ringleader::jobspec {
namespace {

namespace fs = std::filesystem;

bool IsFile(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool IsFolder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

absl::Status CheckReadable(const char* field, const fs::path& path) {
  if (!IsFile(path)) {
    return absl::NotFoundError(absl::StrCat(field, ": no file ", path.string()));
  }
  if (!std::ifstream(path)) {
    return absl::FailedPreconditionError(
        absl::StrCat(field, ": ", path.string(), " cannot be read; check its permissions"));
  }
  return absl::OkStatus();
}

absl::Status CheckModelFolder(const fs::path& folder) {
  if (!IsFolder(folder)) {
    return absl::NotFoundError(absl::StrCat("model.init: no folder ", folder.string(),
                                            "; give `random` or a Hugging Face model folder"));
  }
  RETURN_IF_ERROR(CheckReadable("model.init", folder / "config.json"));
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("model.init: no *.safetensors in ", folder.string()));
}

absl::Status CheckShards(const char* field, const fs::path& folder) {
  if (!IsFolder(folder)) {
    return absl::NotFoundError(
        absl::StrCat(field, ": no folder ", folder.string(), "; make it with `ringctl data pack`"));
  }
  if (!IsFile(folder / "manifest.json")) {
    // What `ringctl data pack` was told to write to has folders of its own for both.
    const fs::path part = folder / (std::string_view(field) == "data.eval" ? "eval" : "train");
    if (IsFile(part / "manifest.json")) {
      return absl::NotFoundError(absl::StrCat(
          field, ": ", folder.string(), " holds folders of token shards; give ", part.string()));
    }
    return absl::NotFoundError(absl::StrCat(field, ": ", folder.string(),
                                            " holds no manifest.json, so it is no folder of token "
                                            "shards; make one with `ringctl data pack`"));
  }
  return CheckReadable(field, folder / "manifest.json");
}

// What a job reads may not lie where it exports its model, which takes the place of what is there.
absl::Status CheckApart(const char* field, const std::string& path, const fs::path& exported) {
  if (path.empty() || path == "random") return absl::OkStatus();
  const fs::path relative = fs::path(path).lexically_normal().lexically_relative(exported);
  if (relative.empty() || *relative.begin() == "..") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": ", path, " is where the job exports its model (checkpoint.directory/model), ",
      "which takes the place of what is there; choose another checkpoint.directory"));
}

}  // namespace

absl::Status CheckFiles(const v1::JobSpec& spec) {
  const fs::path exported = (fs::path(spec.checkpoint().directory()) / "model").lexically_normal();
  RETURN_IF_ERROR(CheckApart("model.init", spec.model().init(), exported));
  RETURN_IF_ERROR(CheckApart("model.config", spec.model().config(), exported));
  RETURN_IF_ERROR(CheckApart("data.train", spec.data().train(), exported));
  RETURN_IF_ERROR(CheckApart("data.eval", spec.data().eval(), exported));
  const std::string& init = spec.model().init();
  if (init.empty() || init == "random") {
    RETURN_IF_ERROR(CheckReadable("model.config", spec.model().config()));
  } else {
    RETURN_IF_ERROR(CheckModelFolder(init));
  }
  RETURN_IF_ERROR(CheckShards("data.train", spec.data().train()));
  if (!spec.data().eval().empty()) {
    RETURN_IF_ERROR(CheckShards("data.eval", spec.data().eval()));
  }
  std::error_code error;
  const fs::path checkpoints = spec.checkpoint().directory();
  if (fs::exists(checkpoints, error) && !IsFolder(checkpoints)) {
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint.directory: ", checkpoints.string(), " is a file, not a folder"));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::jobspec
