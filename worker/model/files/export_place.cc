#include "worker/model/files/export_place.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader::model {
namespace {

namespace fs = std::filesystem;

bool IsWeights(std::string_view name) {
  return name.starts_with("model") &&
         (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
}

// Whether nothing lies in `folder` but what an export writes, in folders as the `fresh` one has
// them. What cannot be read is none.
bool IsExport(const fs::path& folder, const fs::path& fresh) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; it != end; it.increment(error)) {
    const fs::path name = it->path().lexically_relative(folder);
    std::error_code ignored;
    const fs::file_status status = it->symlink_status(ignored);
    const bool is_exported =
        fs::is_regular_file(status)
            ? IsWeights(name.string()) || fs::is_regular_file(fresh / name, ignored)
            : fs::is_directory(status) && fs::is_directory(fresh / name, ignored);
    if (!is_exported) return false;
  }
  return !error;
}

}  // namespace

absl::StatusOr<std::string> PlaceExport(const std::string& fresh, const std::string& directory,
                                        const std::string& otherwise) {
  const std::string model = fs::path(directory) / "model";
  std::error_code ignored;
  const bool is_free = !fs::exists(fs::symlink_status(model, ignored));
  const std::string place =
      is_free || IsExport(model, fresh) ? model : (fs::path(directory) / otherwise).string();
  RETURN_IF_ERROR(ReplaceFolder(fresh, place));
  return place;
}

}  // namespace ringleader::model
