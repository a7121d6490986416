#include "coordinator/access/method_table.h"

#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ringleader::access {
namespace {

// A set of roles, as bits.
using Roles = unsigned;
constexpr Roles Bit(v1::Role role) {
  return 1u << static_cast<unsigned>(role);
}
constexpr Roles kAdmin = Bit(v1::ADMIN);
constexpr Roles kUsers = kAdmin | Bit(v1::USER);
constexpr Roles kPeople = kUsers | Bit(v1::VIEWER);
constexpr Roles kNode = Bit(v1::NODE);
constexpr Roles kAnyone = ~0u;  // also who shows nothing
// Trainers serve these to each other and to their worker; a coordinator does not.
constexpr Roles kNobody = 0;

using Table = std::map<std::string_view, Roles>;

const Table& Rows() {
  static const auto* const kRows = new Table{
      {"/ringleader.v1.JobService/CreateJob", kUsers},
      {"/ringleader.v1.JobService/GetJob", kPeople},
      {"/ringleader.v1.JobService/GetJobHistory", kPeople},
      {"/ringleader.v1.JobService/ListJobs", kPeople},
      {"/ringleader.v1.JobService/WatchJob", kPeople},
      {"/ringleader.v1.JobService/ValidateJob", kUsers},
      // Users call these four and ProfileJob for jobs of their own and of their project alone
      // (Caller::MayChange).
      {"/ringleader.v1.JobService/DeleteJob", kUsers},
      {"/ringleader.v1.JobService/CancelJob", kUsers},
      {"/ringleader.v1.JobService/PauseJob", kUsers},
      {"/ringleader.v1.JobService/ResumeJob", kUsers},
      {"/ringleader.v1.JobService/ProfileJob", kUsers},
      {"/ringleader.v1.LogService/TailLogs", kPeople},
      {"/ringleader.v1.NodeService/ListNodes", kPeople},
      {"/ringleader.v1.NodeService/ListLatency", kPeople},
      {"/ringleader.v1.NodeService/DrainNode", kAdmin},
      {"/ringleader.v1.NodeService/UndrainNode", kAdmin},
      {"/ringleader.v1.AccessService/CreateToken", kAdmin},
      {"/ringleader.v1.AccessService/ListTokens", kAdmin},
      {"/ringleader.v1.AccessService/RevokeToken", kAdmin},
      {"/ringleader.v1.AccessService/ListAuditRecords", kAdmin},
      // A node calls these for itself alone (Caller::MaySpeakFor).
      {"/ringleader.v1.WorkerControl/Session", kNode},
      {"/ringleader.v1.WorkerControl/ReportDeath", kNode},
      {"/ringleader.v1.PeerExchange/Stream", kNobody},
      {"/ringleader.v1.TrainerLink/Attach", kNobody},
      {"/grpc.health.v1.Health/Check", kAnyone},
      // Callers that are nobody could open any number of these streams.
      {"/grpc.health.v1.Health/Watch", kPeople | kNode},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kPeople},
  };
  return *kRows;
}

std::string Names(Roles roles) {
  std::vector<std::string> names;
  for (const v1::Role role : {v1::VIEWER, v1::USER, v1::NODE, v1::ADMIN}) {
    if ((roles & Bit(role)) != 0) names.emplace_back(RoleText(role));
  }
  return names.empty() ? "nobody" : absl::StrJoin(names, ", ");
}

// gRPC serves these itself, so that no handler of the coordinator asks again who calls.
constexpr std::string_view kServedByGrpc = "/grpc.";

}  // namespace

std::string ShortMethod(std::string_view path) {
  constexpr size_t kMaxPart = 100;  // anybody may call a method of any name
  const size_t slash = path.rfind('/');
  const size_t dot = path.rfind('.', slash);
  if (slash == std::string_view::npos || dot == std::string_view::npos) {
    return absl::CHexEscape(std::string(path.substr(0, kMaxPart)));
  }
  const std::string_view service = path.substr(dot + 1, slash - dot - 1);
  return absl::CHexEscape(absl::StrCat(std::string(service.substr(0, kMaxPart)), ".",
                                       std::string(path.substr(slash + 1, kMaxPart))));
}

absl::Status CheckBeforeHandler(std::string_view path, const Caller& caller) {
  const auto row = Rows().find(path);
  const bool handled = row != Rows().end() && row->second != kNobody &&
                       !path.starts_with(kServedByGrpc) && caller.role != v1::ROLE_UNSPECIFIED;
  return handled ? absl::OkStatus() : CheckMethod(path, caller);
}

absl::Status CheckMethod(std::string_view path, const Caller& caller) {
  const auto row = Rows().find(path);
  if (row == Rows().end()) {
    return absl::PermissionDeniedError(
        absl::StrCat(ShortMethod(path), ": nobody may call it, for no rule says who may"));
  }
  const bool everybody = row->second == kAnyone;
  if (everybody || (caller.local && row->second != kNobody)) return absl::OkStatus();
  if (caller.role == v1::ROLE_UNSPECIFIED) {
    return absl::UnauthenticatedError(
        absl::StrCat(ShortMethod(path), ": show a certificate or a token (see docs/security.md)"));
  }
  if ((row->second & Bit(caller.role)) != 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrFormat("%s: %s %s may not call it; it is for the roles %s", ShortMethod(path),
                      std::string(RoleText(caller.role)), caller.name, Names(row->second)));
}

}  // namespace ringleader::access
