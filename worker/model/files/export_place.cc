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

// Whether nothing lies in `folder` but what an export writes. What cannot be read is none.
bool IsExport(const fs::path& folder, const fs::path& fresh) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    if (!it->is_regular_file(ignored)) return false;
    if (!IsWeights(name) && !fs::exists(fresh / name, ignored)) return false;
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
