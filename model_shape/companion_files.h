// The files of a Hugging Face model folder that lie beside its weights and are as much part of the
// model: how text becomes tokens, how conversations become text, how tokens are drawn. Training
// neither reads nor changes them.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::model {

// No tokenizer comes near it.
inline constexpr size_t kMaxCompanionBytes = size_t{64} << 20;

// Paths within `folder` of those that are there, links that lead nowhere among them.
std::vector<std::string> FindCompanionFiles(const std::string& folder);

// Their contents by path within the folder. INVALID_ARGUMENT, NOT_FOUND or PERMISSION_DENIED name
// one that is no regular file of at most kMaxCompanionBytes, leads nowhere, or cannot be read.
absl::StatusOr<std::map<std::string, std::string>> ReadCompanionFiles(const std::string& folder);

// The folder that a model's companions lie in: `init`, or the one of its config.json.
std::string CompanionFolder(const std::string& config_path, const std::string& init);

}  // namespace ringleader::model
