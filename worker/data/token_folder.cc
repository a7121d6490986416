#include "worker/data/token_folder.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/json.h"
#include "base/process/progress.h"
#include "base/status_macros.h"

namespace ringleader::data {
namespace {

constexpr char kFormat[] = "ringleader-tokens";
constexpr size_t kMaxManifestBytes = size_t{64} << 20;
// Of which a search tells once that it goes on: what is read within a second or so.
constexpr uint64_t kTokensATick = uint64_t{4} << 20;

std::string ManifestPath(const std::string& folder) {
  return folder + "/" + kManifestName;
}

absl::Status Damaged(const std::string& path, absl::string_view what) {
  return absl::DataLossError(absl::StrFormat("%s is damaged: %s; pack the data again", path, what));
}

// Checks that shards of so many tokens and documents are what the manifest says.
absl::Status CheckTotals(const std::string& folder, const Manifest& manifest, uint64_t tokens,
                         uint64_t documents) {
  const auto check = [&](const char* what, uint64_t held, uint64_t said) {
    if (held == said) return absl::OkStatus();
    return Damaged(ManifestPath(folder),
                   absl::StrFormat("its shards hold %d %s, it says %d", held, what, said));
  };
  RETURN_IF_ERROR(check("tokens", tokens, manifest.tokens));
  return check("documents", documents, manifest.documents);
}

// Checks that a shard of so many tokens has marks where the manifest speaks of some.
absl::Status CheckMarked(const std::string& path, const Manifest& manifest, uint64_t tokens,
                         bool has_marks) {
  if (has_marks == (manifest.has_marks() && tokens > 0)) return absl::OkStatus();
  return Damaged(path, has_marks ? "it has marks, the manifest names no task"
                                 : "it has no marks, the manifest speaks of some");
}

}  // namespace

absl::Status CheckTasks(const std::vector<std::string>& tasks) {
  if (tasks.size() > kMaxTasks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d tasks; at most %d are possible", tasks.size(), kMaxTasks));
  }
  for (auto task = tasks.begin(); task != tasks.end(); ++task) {
    if (task->empty() || task->size() > kMaxTaskBytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("task \"%s\": a name has 1 to %d bytes", *task, kMaxTaskBytes));
    }
    if (std::find(tasks.begin(), task, *task) != task) {
      return absl::InvalidArgumentError(absl::StrFormat("task \"%s\" is there twice", *task));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMarks(std::span<const uint8_t> marks, size_t tasks) {
  const auto unknown = std::find_if(
      marks.begin(), marks.end(), [&](uint8_t mark) { return mark > tasks && mark != kGivenMark; });
  if (unknown == marks.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "mark %d at %d is none of %d tasks (1 is the first), nor %d (plain) or %d (given)", *unknown,
      unknown - marks.begin(), tasks, kPlainMark, kGivenMark));
}

absl::StatusOr<Manifest> ReadManifest(const std::string& folder) {
  const std::string path = ManifestPath(folder);
  const absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxManifestBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrFormat(
        "no %s: %s is not a folder of token shards; make one with `ringctl data pack`", path,
        folder));
  }
  RETURN_IF_ERROR(text.status());
  Manifest manifest;
  const nlohmann::json json = ParseJson(*text);
  if (json.is_discarded()) {
    return Damaged(path, "it is not JSON");
  }
  try {
    for (const char* number : {"tokens", "documents"}) {
      if (json.at(number).is_number_unsigned()) continue;
      return Damaged(path, absl::StrFormat("its %s is no whole number", number));
    }
    for (const char* number : {"vocabulary", "separator"}) {
      const nlohmann::json& value = json.at(number);
      if (!value.is_number_unsigned() ||
          value.get<uint64_t>() > std::numeric_limits<uint32_t>::max()) {
        return Damaged(path, absl::StrFormat("its %s is no number of 32 bits", number));
      }
    }
    if (json.at("format") != kFormat) {
      return absl::InvalidArgumentError(absl::StrFormat("%s is not a %s manifest", path, kFormat));
    }
    if (json.at("version") != kShardVersion) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s has another format version than %d, which this build reads", path, kShardVersion));
    }
    json.at("vocabulary").get_to(manifest.vocabulary);
    json.at("separator").get_to(manifest.separator);
    json.at("tokenizer").get_to(manifest.tokenizer);
    json.at("tokens").get_to(manifest.tokens);
    json.at("documents").get_to(manifest.documents);
    json.at("shards").get_to(manifest.shards);
    if (json.contains("tasks")) json.at("tasks").get_to(manifest.tasks);
    if (json.contains("prefixes")) json.at("prefixes").get_to(manifest.prefixes);
  } catch (const nlohmann::json::exception& error) {
    return Damaged(path, error.what());
  }
  for (const std::string& shard : manifest.shards) {
    if (!shard.empty() && shard == std::filesystem::path(shard).filename() && shard != "..")
      continue;
    return Damaged(path, absl::StrFormat("a shard is a file of the same folder, not '%s'",
                                         absl::CHexEscape(shard)));
  }
  if (manifest.separator >= manifest.vocabulary) {
    return Damaged(path, absl::StrFormat("separator %d, vocabulary %d", manifest.separator,
                                         manifest.vocabulary));
  }
  if (const absl::Status names = CheckTasks(manifest.tasks); !names.ok()) {
    return Damaged(path, names.message());
  }
  return manifest;
}

absl::Status WriteManifest(const std::string& folder, const Manifest& manifest) {
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"version", kShardVersion},
                                 {"tokenizer", manifest.tokenizer},
                                 {"vocabulary", manifest.vocabulary},
                                 {"separator", manifest.separator},
                                 {"tokens", manifest.tokens},
                                 {"documents", manifest.documents},
                                 {"shards", manifest.shards}};
  if (!manifest.tasks.empty()) json["tasks"] = manifest.tasks;
  if (manifest.prefixes) json["prefixes"] = true;
  return WriteFileAtomically(ManifestPath(folder), json.dump(2) + "\n");
}

absl::Status CheckShards(const std::string& folder, const Manifest& manifest) {
  uint64_t tokens = 0, documents = 0;
  for (const std::string& name : manifest.shards) {
    const std::string path = absl::StrCat(folder, "/", name);
    ASSIGN_OR_RETURN(const ShardHeader header, ReadShardHeader(path));
    RETURN_IF_ERROR(CheckMarked(path, manifest, header.tokens, header.mark_bytes() > 0));
    tokens += header.tokens;
    documents += header.documents;
  }
  return CheckTotals(folder, manifest, tokens, documents);
}

absl::StatusOr<TokenFolder> TokenFolder::Open(const std::string& folder) {
  TokenFolder result;
  ASSIGN_OR_RETURN(result.manifest_, ReadManifest(folder));
  const size_t tasks = result.manifest_.tasks.size();
  uint64_t end = 0, documents = 0;
  for (const std::string& name : result.manifest_.shards) {
    const std::string path = absl::StrCat(folder, "/", name);
    ASSIGN_OR_RETURN(auto shard, TokenShard::Open(path));
    Progress::Tick();
    RETURN_IF_ERROR(CheckMarked(path, result.manifest_, shard->tokens(), !shard->marks().empty()));
    if (const absl::Status marks = CheckMarks(shard->marks(), tasks); !marks.ok()) {
      return Damaged(path, marks.message());
    }
    for (uint64_t i = 0; i < shard->tokens(); ++i) {
      if ((i + 1) % kTokensATick == 0) Progress::Tick();
      if (shard->token(i) < result.manifest_.vocabulary) continue;
      return Damaged(path, absl::StrFormat("its token %d is %d, of a vocabulary of %d", i,
                                           shard->token(i), result.manifest_.vocabulary));
    }
    end += shard->tokens();
    documents += shard->document_starts().size();
    result.ends_.push_back(end);
    result.shards_.push_back(std::move(shard));
  }
  RETURN_IF_ERROR(CheckTotals(folder, result.manifest_, end, documents));
  return result;
}

absl::Status TokenFolder::CheckUnchanged() const {
  for (const auto& shard : shards_) RETURN_IF_ERROR(shard->CheckUnchanged());
  return absl::OkStatus();
}

uint64_t TokenFolder::checksum() const {
  std::string identity = absl::StrCat(manifest_.prefixes ? "prefixes" : "tasks");
  for (const std::string& task : manifest_.tasks) absl::StrAppend(&identity, "\n", task);
  for (const auto& shard : shards_) absl::StrAppend(&identity, "\n", shard->checksum());
  return Checksum(identity.data(), identity.size());
}

std::pair<const TokenShard*, uint64_t> TokenFolder::Find(uint64_t i) const {
  const auto shard = std::upper_bound(ends_.begin(), ends_.end(), i) - ends_.begin();
  return {shards_[shard].get(), i - (shard == 0 ? 0 : ends_[shard - 1])};
}

uint32_t TokenFolder::token(uint64_t i) const {
  const auto [shard, within] = Find(i);
  return shard->token(within);
}

uint8_t TokenFolder::mark(uint64_t i) const {
  if (!manifest_.has_marks()) return kPlainMark;
  const auto [shard, within] = Find(i);
  return shard->marks()[within];
}

std::vector<uint64_t> TokenFolder::DocumentStarts(uint64_t begin, uint64_t end) const {
  std::vector<uint64_t> result;
  for (size_t s = 0; s < shards_.size(); ++s) {
    const TokenShard& shard = *shards_[s];
    const uint64_t first = ends_[s] - shard.tokens();
    if (ends_[s] <= begin || first >= end) continue;
    const uint64_t from = std::max(begin, first) - first, to = std::min(end, ends_[s]) - first;
    const std::span<const uint64_t> named = shard.document_starts();
    auto next = std::lower_bound(named.begin(), named.end(), from);
    bool behind_separator = from + first > 0 && token(from + first - 1) == manifest_.separator;
    for (uint64_t i = from; i < to; ++i) {
      const bool is_named = next != named.end() && *next == i;
      if (is_named) ++next;
      if ((first + i + 1) % kTokensATick == 0) Progress::Tick();
      if (is_named || behind_separator) result.push_back(first + i);
      behind_separator = shard.token(i) == manifest_.separator;
    }
  }
  return result;
}

uint64_t TokenFolder::PrefixEnd(uint64_t begin, uint64_t end) const {
  // No part of it where something before it in the document is not given.
  for (uint64_t i = begin; i > 0 && DocumentStarts(i, i + 1).empty(); --i) {
    if (mark(i - 1) != kGivenMark) return begin;
  }
  while (begin < end && mark(begin) == kGivenMark) ++begin;
  return begin;
}

}  // namespace ringleader::data
