#include "jobspec/roots.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "jobspec/fields/fields.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/fields/text.h"
#include "model_shape/companion_files.h"

namespace ringleader::jobspec {
namespace {

namespace fs = std::filesystem;

// Component by component: /data2 is not below /data.
bool IsBelow(const fs::path& path, const fs::path& root) {
  const auto [rest, ignored] = std::mismatch(root.begin(), root.end(), path.begin(), path.end());
  // A root that is written with a slash at its end has an empty last component.
  return rest == root.end() || (rest->empty() && std::next(rest) == root.end());
}

bool ClimbsUp(const fs::path& path) {
  return std::find(path.begin(), path.end(), "..") != path.end();
}

// Where the path leads, past links, is below a root. A link to what is not there yet leads nowhere
// that could be checked.
bool LeadsBelow(const fs::path& path, const std::vector<std::string>& roots) {
  std::error_code error;
  const fs::path leads_to = fs::weakly_canonical(path, error);
  if (error) return false;
  fs::path part;
  for (const fs::path& component : leads_to) {
    part /= component;
    if (fs::is_symlink(fs::symlink_status(part, error))) return false;
  }
  return std::any_of(roots.begin(), roots.end(), [&](const std::string& root) {
    const fs::path real_root = fs::weakly_canonical(root, error);
    return !error && IsBelow(leads_to, real_root);
  });
}

// The first thing in the folder, or in a folder of it (a checkpoint, profiles), that is a link out
// of the roots; empty: none, or no folder.
fs::path LinkOut(const fs::path& folder, const std::vector<std::string>& roots) {
  std::error_code error;
  for (fs::recursive_directory_iterator
           entry(folder, fs::directory_options::skip_permission_denied, error),
       end;
       !error && entry != end; entry.increment(error)) {
    if (entry.depth() > 0) entry.disable_recursion_pending();
    if (entry->is_symlink(error) && !LeadsBelow(entry->path(), roots)) return entry->path();
  }
  return {};
}

// The first file that goes with the exported model (companion_files.h) beside this config.json and
// is a link out of the roots; empty: none.
fs::path CompanionOut(const fs::path& config, const std::vector<std::string>& roots) {
  const fs::path folder = config.parent_path();
  for (const std::string& name : model::FindCompanionFiles(folder.string())) {
    if (!LeadsBelow(folder / name, roots)) return folder / name;
  }
  return {};
}

bool IsAllowed(const fs::path& path, const std::vector<std::string>& roots, RootCheck check) {
  if (ClimbsUp(path)) return false;
  const bool below = std::any_of(roots.begin(), roots.end(), [&](const std::string& root) {
    return IsBelow(path.lexically_normal(), fs::path(root).lexically_normal());
  });
  return below && (check == RootCheck::kText || LeadsBelow(path, roots));
}

}  // namespace

void AddRootFlag(CLI::App& app, std::vector<std::string>* roots) {
  app.add_option("--allow-path", *roots,
                 "folder that jobs may read and write below, e.g. /data; may be given more than "
                 "once; none: anywhere")
      ->allow_extra_args(false);
}

absl::Status CheckRoots(const std::vector<std::string>& roots) {
  for (const std::string& root : roots) {
    if (root.starts_with("/") && !ClimbsUp(root) && !HasControls(root)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--allow-path: '", Printable(root),
                     "' is no absolute path without .. and control characters"));
  }
  return absl::OkStatus();
}

absl::Status CheckRootsGiven(const std::vector<std::string>& roots, const Address& address) {
  if (!roots.empty() || IsLoopback(address)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--allow-path is missing: other machines reach the coordinator at ", FormatAddress(address),
      ", so say below which folders jobs may read and write here, or --allow-path / for anywhere "
      "(docs/security.md)"));
}

absl::Status CheckPaths(const v1::JobSpec& spec, const std::vector<std::string>& roots,
                        RootCheck check) {
  if (roots.empty()) return absl::OkStatus();
  for (const Field& field : Fields()) {
    if (!field.is_path || !IsSet(spec, field.path)) continue;
    const ConstSlot slot = FindSlot(spec, field.path);
    const std::string path =
        slot.message->GetReflection()->GetString(*slot.message, slot.descriptor);
    if (path.empty() || path == field.default_value) continue;
    const bool allowed = IsAllowed(path, roots, check);
    fs::path link;
    if (allowed && check == RootCheck::kFiles) {
      link = field.path == "model.config" ? CompanionOut(path, roots) : LinkOut(path, roots);
    }
    if (allowed && link.empty()) continue;
    return absl::PermissionDeniedError(
        absl::StrCat(std::string(field.path), ": '", Printable(link.empty() ? path : link.string()),
                     "' is not, or does not lead, below ", absl::StrJoin(roots, " or "),
                     ", where jobs may read and write (--allow-path)"));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::jobspec
