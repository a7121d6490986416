// Certificates for tests, made by the openssl program: an authority, a server and a client that it
// signed, and a stranger that another one signed; and more where a test asks for them.
#pragma once

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/net/tls.h"
#include "base/testing/temp_dir.h"

namespace ringleader {

class TestCertificates {
 public:
  // False from ok() when openssl cannot be run.
  TestCertificates() {
    ok_ = MakeAuthority("ca") && Sign("ca", "server", {}) && Sign("ca", "client", {}) &&
          MakeAuthority("other") && Sign("other", "stranger", {});
  }
  bool ok() const { return ok_; }

  // `name`: "server", "client" or "stranger"; trusts `authority`: "ca" or "other".
  TlsOptions Options(const std::string& name, const std::string& authority = "ca") const {
    return {.cert_path = File(name + ".crt"),
            .key_path = File(name + ".key"),
            .ca_path = File(authority + ".crt")};
  }
  std::string File(const std::string& name) const { return dir_.File(name); }

  struct Subject {
    std::string common_name = "localhost";
    std::string more_names = {};  // e.g. ",URI:ringleader://node/a", besides this machine's
    int days = 2;                 // negative: expired
    int seconds = 0;              // if set, in place of days: how long it is valid from now
  };
  // Signs `name`'s certificate, in place of the one that it has.
  bool Sign(const std::string& authority, const std::string& name, const Subject& subject) const {
    return Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj ",
                            "/CN=", subject.common_name, " -keyout ", File(name + ".key"), " -out ",
                            File(name + ".csr"))) &&
           Run(absl::StrCat("printf 'subjectAltName=DNS:localhost,IP:127.0.0.1", subject.more_names,
                            "' > ", File("ext"))) &&
           (subject.seconds > 0
                ? SignBriefly(authority, name, subject.seconds)
                : Run(absl::StrCat("openssl x509 -req -days ", subject.days,
                                   " -CAcreateserial -in ", File(name + ".csr"), " -CA ",
                                   File(authority + ".crt"), " -CAkey ", File(authority + ".key"),
                                   " -extfile ", File("ext"), " -out ", File(name + ".crt"))));
  }

 private:
  bool MakeAuthority(const std::string& name) {
    return Run(absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=",
        name, " -keyout ", File(name + ".key"), " -out ", File(name + ".crt")));
  }
  // `openssl x509` counts in days.
  bool SignBriefly(const std::string& authority, const std::string& name, int seconds) const {
    return Run(absl::StrCat("printf '[ca]\\ndefault_ca=d\\n[d]\\ndatabase=", File("index"),
                            "\\nserial=", File("serial"), "\\nnew_certs_dir=", File(""),
                            "\\ndefault_md=sha256\\npolicy=p\\n",
                            "[p]\\ncommonName=supplied\\n' > ", File("config"), " && : > ",
                            File("index"), " && echo 01 > ", File("serial"))) &&
           Run(absl::StrCat("openssl ca -batch -notext -config ", File("config"), " -cert ",
                            File(authority + ".crt"), " -keyfile ", File(authority + ".key"),
                            " -extfile ", File("ext"), " -in ", File(name + ".csr"), " -out ",
                            File(name + ".crt"), " -enddate $(date -u -d '+", seconds,
                            " seconds' +%Y%m%d%H%M%SZ)"));
  }
  static bool Run(const std::string& command) {
    return std::system(absl::StrCat(command, " 2>/dev/null").c_str()) == 0;
  }

  TempDir dir_;
  bool ok_ = false;
};

}  // namespace ringleader
