// The operator's file that says which certificate has which role (--access). docs/security.md shows
// one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/access/caller.h"

namespace ringleader::access {

// The names in a certificate that was verified.
struct CertificateNames {
  std::vector<std::string> uris = {};
  std::vector<std::string> dns = {};
  std::vector<std::string> emails = {};
  std::string common_name = {};

  bool empty() const {
    return uris.empty() && dns.empty() && emails.empty() && common_name.empty();
  }
};

class AccessFile {
 public:
  // Nobody has a role.
  AccessFile() = default;
  // INVALID_ARGUMENT names the file, the line and what is expected there.
  static absl::StatusOr<AccessFile> Parse(const std::string& text, const std::string& path);
  // Also for what cannot be read: FAILED_PRECONDITION.
  static absl::StatusOr<std::string> Read(const std::string& path);

  // The first entry that one of the names is in decides, then a URI
  // "ringleader://ROLE/[PROJECT/]NAME" where the file trusts those. UNAUTHENTICATED names the
  // certificate.
  absl::StatusOr<Caller> Find(const CertificateNames& names) const;

  // Whoever reaches a port in plain text is an admin.
  bool plain_text_is_admin() const { return plain_text_is_admin_; }

  // What a certificate with this name may do.
  struct Entry {
    enum class Kind { kUri, kDns, kEmail, kCommonName };
    Kind kind = Kind::kUri;
    std::string match = {};
    Caller caller = {};  // role unspecified: shut out
  };

 private:
  std::vector<Entry> entries_;
  bool roles_in_certificates_ = false;
  bool plain_text_is_admin_ = false;
};

}  // namespace ringleader::access
