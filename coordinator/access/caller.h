// Who makes a call, as the gate found it out, and what that lets them touch.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ringleader/v1/access.pb.h"
#include "ringleader/v1/job.pb.h"

namespace ringleader::access {

struct Caller {
  v1::Role role = v1::ROLE_UNSPECIFIED;  // unspecified: nobody
  std::string name = {};
  std::string project = {};
  std::string credential = {};  // for people: "certificate CN=a", "token 0123456789ab", "local"
  // The caller came through a port without roles, which is on loopback or was declared open. It may
  // do everything, and speak for any node.
  bool local = false;
  // The name by which a certificate is known, as CertificateNames::Texts() writes it; empty for a
  // token.
  std::string certificate = {};

  // PERMISSION_DENIED unless the caller is the node with this id.
  absl::Status MaySpeakFor(std::string_view node) const;
  // PERMISSION_DENIED unless the caller is the job's owner (of its project, where both have one),
  // of its project, or an admin.
  absl::Status MayChange(const v1::Job& job) const;
  // PERMISSION_DENIED where the job would run before other people's (scheduling.priority above 0),
  // which is an admin's to say.
  absl::Status MaySubmit(const v1::JobSpec& spec) const;
};

Caller LocalCaller();

// Whether this may be the name of a person, a node or a project: 1 to 128 letters, digits and
// "-_.@+".
bool IsCallerName(std::string_view name);

// Roles as text: "viewer", "user", "node" and "admin". Any other text is ROLE_UNSPECIFIED, whose
// own text is "nobody".
v1::Role ParseRole(std::string_view text);
std::string_view RoleText(v1::Role role);

// A record of the audit log that says who called from where; what was done and what became of it is
// for the caller of this function to add. `address`: of the peer, as gRPC writes it.
v1::AuditRecord RecordOf(const Caller& caller, std::string_view address);

}  // namespace ringleader::access
