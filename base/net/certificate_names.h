// The names in the certificate that a peer has shown.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"

namespace grpc {
class AuthContext;
}

namespace ringleader {

// Longer files are no certificates and keys.
inline constexpr size_t kMaxPemBytes = size_t{1} << 20;

// The names in a certificate that was verified. It may have several of a kind.
struct CertificateNames {
  std::vector<std::string> uris = {};
  std::vector<std::string> dns = {};
  std::vector<std::string> emails = {};
  std::string common_name = {};  // the first; empty: none
  // When it expires. A connection outlives that.
  absl::Time expires = absl::InfiniteFuture();

  bool empty() const {
    return uris.empty() && dns.empty() && emails.empty() && common_name.empty();
  }
  // All of them as "{kind} {name}": "uri ringleader://node/a", "dns …", "email …", "common_name …".
  // Host names and addresses have no case: these two in lower case.
  std::vector<std::string> Texts() const;
  // Whether `text`, so written, is one of them. The same name of another kind is another name.
  bool Hold(std::string_view text) const;
};

// Empty in plain text, and where the peer has shown no certificate.
CertificateNames NamesOf(const grpc::AuthContext& context);
// The same of a certificate as DER, e.g. of a browser. Empty, and expired, where it is none.
CertificateNames NamesOfDer(const std::string& der);

// Between which times a certificate holds.
struct Validity {
  absl::Time not_before, not_after;
};
// Of the certificates of a PEM text, in their order, up to the first that cannot be read.
std::vector<Validity> ValiditiesOfPem(const std::string& pem);

}  // namespace ringleader
