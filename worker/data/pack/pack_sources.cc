#include "worker/data/pack/pack_sources.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace ringleader::data {
namespace {

namespace fs = std::filesystem;

// FILE.marks beside FILE are read with tasks only: without, they would be lost, or be a document.
absl::Status RefuseMarks(const Source& source) {
  const std::string file(absl::StripSuffix(source.file.string(), kMarksSuffix));
  const std::string marks = file + kMarksSuffix;
  std::error_code error;
  if (!fs::is_regular_file(file, error) || !fs::is_regular_file(marks, error)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s lies beside %s: give --tasks, which reads such marks of token ids, or move them away",
      marks, file));
}

// Of a link: to nothing, or in a circle.
bool LeadsNowhere(const std::error_code& error) {
  return error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory ||
         error == std::errc::too_many_symbolic_link_levels;
}

absl::Status CannotTell(const std::string& path, const std::error_code& error) {
  return absl::UnavailableError(
      absl::StrFormat("cannot tell where %s leads: %s", path, error.message()));
}

// What the user's paths lead to, each file once. `result` counts what does not become a source.
class SourceFinder {
 public:
  SourceFinder(const PackOptions& options, PackResult* result)
      : options_(options), result_(*result) {}

  // In the order of their names.
  absl::StatusOr<std::vector<Source>> Find() {
    for (; input_ < options_.paths.size(); ++input_) {
      const std::string& path = options_.paths[input_];
      std::error_code error;
      const bool is_file = fs::is_regular_file(path, error);
      const std::string name = fs::path(path).filename().string();
      RETURN_IF_ERROR(is_file ? Add({name, path, /*is_named=*/true}) : Walk(path));
    }
    KeepEachOnce();
    for (const Source& source : sources_) {
      if (options_.tasks.empty()) RETURN_IF_ERROR(RefuseMarks(source));
    }
    return std::move(sources_);
  }

 private:
  bool IsWanted(const std::string& name) const {
    if (!options_.tasks.empty() && absl::EndsWith(name, kMarksSuffix)) return false;
    return options_.suffixes.empty() ||
           std::any_of(options_.suffixes.begin(), options_.suffixes.end(),
                       [&](const std::string& suffix) { return absl::EndsWith(name, suffix); });
  }

  absl::Status Add(Source source) {
    std::error_code error;
    source.input = input_;
    source.target = fs::canonical(source.file, error).string();
    if (error) return CannotTell(source.file.string(), error);
    sources_.push_back(std::move(source));
    return absl::OkStatus();
  }

  absl::Status Walk(const std::string& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (fs::exists(status) && !fs::is_directory(status)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s is neither a file nor a folder: give one that can be read twice, "
                          "not a pipe or a device",
                          path));
    }
    fs::recursive_directory_iterator walk(path, error);
    if (error) {
      const std::string text = absl::StrFormat("cannot read %s: %s", path, error.message());
      return status.type() == fs::file_type::not_found ? absl::NotFoundError(text)
                                                       : absl::InvalidArgumentError(text);
    }
    for (; walk != fs::recursive_directory_iterator(); walk.increment(error)) {
      RETURN_IF_ERROR(AddEntry(*walk, path));
    }
    if (!error) return absl::OkStatus();
    // A step that fails ends the walk: what was found so far is not all that is there.
    return absl::UnavailableError(absl::StrFormat(
        "reading %s broke off: %s; pack again once it can be read", path, error.message()));
  }

  // Links are followed to files only: those to folders lead in circles.
  absl::Status AddEntry(const fs::directory_entry& entry, const std::string& path) {
    const std::string name = entry.path().lexically_relative(path).string();
    std::error_code error;
    const bool is_link = entry.is_symlink(error);
    const bool is_file = entry.is_regular_file(error);
    if (is_file && IsWanted(name)) return Add({name, entry.path(), /*is_named=*/false, is_link});
    if (is_file || !is_link || (error && !IsWanted(name))) return absl::OkStatus();
    const std::string link = entry.path().string();
    if (error && !LeadsNowhere(error)) return CannotTell(link, error);
    std::string& first = result_.first_skipped_link;
    if (++result_.skipped_links == 1 || link < first) first = link;
    ++result_.skipped_files;
    return absl::OkStatus();
  }

  // The first input that reaches a file counts, and within it the file before links to it.
  void KeepEachOnce() {
    std::sort(sources_.begin(), sources_.end(), [](const Source& a, const Source& b) {
      return std::tie(a.target, a.input, a.is_link, a.name) <
             std::tie(b.target, b.input, b.is_link, b.name);
    });
    std::vector<Source> once;
    for (const Source& source : sources_) {
      const bool is_new = once.empty() || once.back().target != source.target;
      if (is_new) once.push_back(source);
      once.back().is_named |= source.is_named;
      if (!is_new && ++result_.repeated_paths == 1) result_.first_repeated = source.file.string();
    }
    std::sort(once.begin(), once.end());
    sources_ = std::move(once);
  }

  const PackOptions& options_;
  PackResult& result_;
  size_t input_ = 0;
  std::vector<Source> sources_;
};

}  // namespace

absl::StatusOr<std::vector<Source>> FindSources(const PackOptions& options, PackResult* result) {
  return SourceFinder(options, result).Find();
}

}  // namespace ringleader::data
