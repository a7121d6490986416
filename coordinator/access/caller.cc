#include "coordinator/access/caller.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace ringleader::access {
namespace {

constexpr size_t kMaxNameBytes = 128;

}  // namespace

Caller LocalCaller() {
  return {.role = v1::ADMIN, .name = "local", .credential = "local", .local = true};
}

absl::Status Caller::MaySpeakFor(std::string_view node) const {
  if (local || (role == v1::NODE && name == node)) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrFormat(
      "%s %s may not speak for nodes/%s: give the worker the certificate of that node, or the "
      "--name that its certificate has",
      std::string(RoleText(role)), name, std::string(node)));
}

absl::Status Caller::MayChange(const v1::Job& job) const {
  if (role == v1::ADMIN) return absl::OkStatus();
  // People of one name in two projects are two.
  if (role == v1::USER && !job.owner().empty() && job.owner() == name &&
      (job.project().empty() || project.empty() || job.project() == project)) {
    return absl::OkStatus();
  }
  if (role == v1::USER && !project.empty() && job.project() == project) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrFormat("%s belongs to %s%s: %s %s may look at it, and leave it alone", job.name(),
                      job.owner().empty() ? "nobody" : job.owner(),
                      job.project().empty() ? "" : absl::StrCat(" (project ", job.project(), ")"),
                      std::string(RoleText(role)), name));
}

absl::Status Caller::MaySubmit(const v1::JobSpec& spec) const {
  if (local || role == v1::ADMIN || spec.scheduling().priority() <= 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrFormat(
      "scheduling.priority: %d is above 0, so that the job would run before other people's, which "
      "is an admin's to give; leave it out, or ask an admin to submit the job",
      spec.scheduling().priority()));
}

bool IsCallerName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' ||
                  c == '.' || c == '@' || c == '+';
         });
}

v1::Role ParseRole(std::string_view text) {
  for (const v1::Role role : {v1::VIEWER, v1::USER, v1::NODE, v1::ADMIN}) {
    if (text == RoleText(role)) return role;
  }
  return v1::ROLE_UNSPECIFIED;
}

std::string_view RoleText(v1::Role role) {
  switch (role) {
    case v1::VIEWER:
      return "viewer";
    case v1::USER:
      return "user";
    case v1::NODE:
      return "node";
    case v1::ADMIN:
      return "admin";
    default:
      return "nobody";
  }
}

v1::AuditRecord RecordOf(const Caller& caller, std::string_view address) {
  v1::AuditRecord record;
  record.set_caller(caller.name);
  record.set_role(caller.role);
  record.set_credential(caller.credential);
  // gRPC writes ipv6:%5B::1%5D:7070 for [::1]:7070.
  for (const std::string_view scheme : {"ipv4:", "ipv6:"}) {
    if (address.starts_with(scheme)) address.remove_prefix(scheme.size());
  }
  record.set_address(
      absl::StrReplaceAll(std::string(address), {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}}));
  return record;
}

}  // namespace ringleader::access
