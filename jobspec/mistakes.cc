#include "jobspec/mistakes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ringleader::jobspec {

void Mistakes::Add(std::string_view path, std::string_view line) {
  if (!full()) found_.push_back({std::string(path), std::string(line)});
}

void Mistakes::Add(std::string_view path, const absl::Status& outcome) {
  if (!outcome.ok()) Add(path, std::string(outcome.message()));
}

bool Mistakes::Has(std::string_view path) const {
  return std::ranges::any_of(found_, [&](const Mistake& one) { return one.path == path; });
}

bool Mistakes::Touch(std::initializer_list<std::string_view> paths) const {
  return std::ranges::any_of(paths, [&](std::string_view path) {
    const std::string below = std::string(path) + ".";
    return Has(path) || std::ranges::any_of(found_, [&](const Mistake& one) {
             return one.path.starts_with(below);
           });
  });
}

absl::Status Mistakes::status() const {
  if (found_.empty()) return absl::OkStatus();
  if (found_.size() == 1) return absl::InvalidArgumentError(found_[0].line);
  std::string text = absl::StrCat(found_.size(), full() ? " mistakes or more:" : " mistakes:");
  for (const Mistake& one : found_) absl::StrAppend(&text, "\n  ", one.line);
  return absl::InvalidArgumentError(text);
}

std::vector<std::string> Mistakes::lines() const {
  std::vector<std::string> lines;
  for (const Mistake& one : found_) lines.push_back(one.line);
  return lines;
}

}  // namespace ringleader::jobspec
