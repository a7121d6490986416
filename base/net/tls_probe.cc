#include "base/net/tls_probe.h"

#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace ringleader {
namespace {

using ContextPtr = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;
using ConnectionPtr = std::unique_ptr<SSL, decltype(&SSL_free)>;

// A connected socket whose every call ends within `patience`; -1: nobody answers.
int Dial(const Address& address, absl::Duration patience) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = absl::StrCat(address.port);
  if (getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  const timeval limit = absl::ToTimeval(patience);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const int fd = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
    if (fd < 0) continue;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // connect() keeps to it, too
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (connect(fd, one->ai_addr, one->ai_addrlen) == 0) return fd;
    close(fd);
  }
  return -1;
}

// Keeps SIGPIPE from this thread: OpenSSL writes into sockets that may be closed.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec now{};
    sigtimedwait(&pipe_, nullptr, &now);  // one that came meanwhile
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t pipe_{}, before_{};
};

// What `options` say, as far as the files can be read: whoever opens a channel checks them first.
ContextPtr MakeContext(const TlsOptions& options) {
  ContextPtr context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  if (!options.ca_path.empty()) {
    SSL_CTX_load_verify_locations(context.get(), options.ca_path.c_str(), nullptr);
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  }
  if (options.enabled()) {
    SSL_CTX_use_certificate_chain_file(context.get(), options.cert_path.c_str());
    SSL_CTX_use_PrivateKey_file(context.get(), options.key_path.c_str(), SSL_FILETYPE_PEM);
  }
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context.get(), kHttp2, sizeof(kHttp2));
  return context;
}

void ExpectName(SSL* connection, const std::string& host) {
  if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(connection), host.c_str()) != 1) {
    SSL_set1_host(connection, host.c_str());
    SSL_set_tlsext_host_name(connection, host.c_str());
  }
}

// What the other side's TLS refused this side with; empty: it did not.
std::string Alert() {
  const unsigned long error = ERR_peek_error();
  const bool is_alert =
      ERR_GET_LIB(error) == ERR_LIB_SSL && ERR_GET_REASON(error) >= SSL_AD_REASON_OFFSET;
  const char* const text = is_alert ? ERR_reason_error_string(error) : nullptr;
  return is_alert ? (text == nullptr ? "TLS alert" : text) : "";
}

std::string Refused(const TlsOptions& options, const std::string& alert) {
  return options.enabled()
             ? absl::StrCat("it does not accept the certificate in ", options.cert_path, " (",
                            alert,
                            "), which must come from an authority in its --tls-ca and must not "
                            "have expired")
             : absl::StrCat("it asks for a certificate (", alert,
                            "): give --tls-cert and --tls-key");
}

}  // namespace

std::string FindTlsMismatch(const TlsOptions& options, const Address& address,
                            absl::Duration patience) {
  if (!address.path.empty()) return "";
  const int fd = Dial(address, patience);
  if (fd < 0) return "";
  const absl::Cleanup close_it = [fd] { close(fd); };
  const WithoutSigpipe no_signal;
  const bool is_plain = !options.enabled() && options.ca_path.empty();
  const ContextPtr context = MakeContext(options);
  const ConnectionPtr connection(SSL_new(context.get()), SSL_free);
  if (!is_plain) ExpectName(connection.get(), address.host);
  SSL_set_fd(connection.get(), fd);
  ERR_clear_error();
  const bool connected = SSL_connect(connection.get()) == 1;
  const std::string alert = Alert();
  if (is_plain) {
    if (!connected && alert.empty()) return "";
    return "it speaks TLS, and this side plain text: give --tls-ca, and --tls-cert and --tls-key "
           "or "
           "a token";
  }
  if (const long verdict = SSL_get_verify_result(connection.get());
      !connected && verdict != X509_V_OK) {
    return absl::StrCat("its certificate is not accepted here (",
                        X509_verify_cert_error_string(verdict),
                        "): it must come from an authority in ", options.ca_path,
                        ", be for the name ", address.host, " and must not have expired");
  }
  if (!connected && !alert.empty()) return Refused(options, alert);
  if (!connected) {
    const bool is_other = ERR_GET_REASON(ERR_peek_error()) == SSL_R_WRONG_VERSION_NUMBER;
    return is_other
               ? "it speaks plain text, and this side TLS: leave out --tls-cert, --tls-key and "
                 "--tls-ca, or give them to it, too"
               : "";
  }
  // With TLS 1.3 the other side looks at the certificate last. gRPC then hangs up without a word,
  // and otherwise begins to speak HTTP/2 at once.
  ERR_clear_error();
  char first = 0;
  const int got = SSL_read(connection.get(), &first, 1);
  if (got == 1) return "";
  const int error = SSL_get_error(connection.get(), got);
  const bool took_too_long = error == SSL_ERROR_WANT_READ;
  const std::string late = Alert();
  if (took_too_long && late.empty()) return "";
  return Refused(options, late.empty() ? "it hangs up" : late);
}

}  // namespace ringleader
