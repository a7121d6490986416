// The operator's file that says which certificate has which role (--access). docs/security.md shows
// one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/net/certificate_names.h"
#include "coordinator/access/caller.h"

namespace ringleader::access {

class AccessFile {
 public:
  // A file in which nobody has a role.
  AccessFile() = default;
  // INVALID_ARGUMENT names the file, the line and what is expected there.
  static absl::StatusOr<AccessFile> Parse(const std::string& text, const std::string& path);
  // The file's text, at most 1 MiB. FAILED_PRECONDITION where it cannot be read.
  static absl::StatusOr<std::string> Read(const std::string& path);

  // The first entry whose name is among these decides, whatever other names the certificate has,
  // then a URI "ringleader://ROLE/[PROJECT/]NAME", which must be the only one of this scheme, where
  // the file trusts those. Caller::certificate is the name that decided. UNAUTHENTICATED names the
  // certificate.
  absl::StatusOr<Caller> Find(const CertificateNames& names) const;
  // UNAUTHENTICATED where the entry that decides says "role: none": whatever else the caller shows,
  // that counts.
  absl::Status CheckNotShutOut(const CertificateNames& names) const;

  // Whether callers on a port in plain text, who cannot show who they are, are admins.
  bool plain_text_is_admin() const { return plain_text_is_admin_; }

 private:
  // A certificate with the name Caller::certificate stands for this caller. Where the role is
  // unspecified, whoever shows the certificate is shut out.
  std::vector<Caller> entries_;
  bool roles_in_certificates_ = false;
  bool plain_text_is_admin_ = false;
};

}  // namespace ringleader::access
