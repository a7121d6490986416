// Where a job's export goes.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ringleader::model {

// Puts the export `fresh`, a folder in `directory`, in the place of `directory`/model, and returns
// where it is. What is called `model` there is replaced only if it is an export, too: files that
// `fresh` has and files of weights alone. Another job's checkpoints, or what somebody put there,
// stay, and the export is `directory`/`otherwise`.
absl::StatusOr<std::string> PlaceExport(const std::string& fresh, const std::string& directory,
                                        const std::string& otherwise);

}  // namespace ringleader::model
