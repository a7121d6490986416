#include "model_shape/companion_files.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader::model {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNames[] = {"tokenizer.json",
                                       "tokenizer_config.json",
                                       "tokenizer.model",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "vocab.txt",
                                       "merges.txt",
                                       "spiece.model",
                                       "sentencepiece.bpe.model",
                                       "generation_config.json",
                                       "chat_template.jinja",
                                       "chat_template.json"};
// Where transformers keeps the chat templates besides the first.
constexpr char kTemplates[] = "additional_chat_templates";

bool IsThere(const fs::path& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found && !error;
}

}  // namespace

std::vector<std::string> FindCompanionFiles(const std::string& folder) {
  std::vector<std::string> found;
  for (const std::string_view name : kNames) {
    if (IsThere(fs::path(folder) / name)) found.emplace_back(name);
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(folder) / kTemplates, error)) {
    if (entry.path().extension() != ".jinja") continue;
    found.push_back((fs::path(kTemplates) / entry.path().filename()).string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

absl::StatusOr<std::map<std::string, std::string>> ReadCompanionFiles(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const std::string& name : FindCompanionFiles(folder)) {
    ASSIGN_OR_RETURN(files[name], ReadRegularFile(fs::path(folder) / name, kMaxCompanionBytes));
  }
  return files;
}

std::string CompanionFolder(const std::string& config_path, const std::string& init) {
  return init.empty() || init == "random" ? fs::path(config_path).parent_path().string() : init;
}

}  // namespace ringleader::model
