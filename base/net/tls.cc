#include "base/net/tls.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <CLI/CLI.hpp>
#include <map>
#include <tuple>

#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "base/files.h"
#include "base/net/certificate_names.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

using Provider = grpc::experimental::CertificateProviderInterface;
using FileProvider = grpc::experimental::FileWatcherCertificateProvider;

absl::StatusOr<std::string> ReadPem(const std::string& flag, const std::string& path) {
  if (path.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--%s is missing: TLS needs --tls-cert, --tls-key and --tls-ca together", flag));
  }
  absl::StatusOr<std::string> text = ReadFlagFile("--" + flag, path, kMaxPemBytes);
  if (!text.ok()) return absl::InvalidArgumentError(text.status().message());
  return text;
}

using BioPtr = std::unique_ptr<BIO, decltype(&BIO_free)>;
using X509Ptr = std::unique_ptr<X509, decltype(&X509_free)>;
using KeyPtr = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

BioPtr Memory(const std::string& text) {
  return BioPtr(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), BIO_free);
}

absl::StatusOr<X509Ptr> ParseCertificate(const std::string& flag, const std::string& path,
                                         const std::string& text) {
  X509Ptr certificate(PEM_read_bio_X509(Memory(text).get(), nullptr, nullptr, nullptr), X509_free);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--%s: %s holds no PEM certificate; give a file that begins with "
                        "\"-----BEGIN CERTIFICATE-----\"",
                        flag, path));
  }
  return certificate;
}

// gRPC takes anything here and then fails each handshake without saying why: check what it will be
// given.
absl::Status CheckAuthority(const TlsOptions& options) {
  ASSIGN_OR_RETURN(const std::string ca, ReadPem("tls-ca", options.ca_path));
  return ParseCertificate("tls-ca", options.ca_path, ca).status();
}

absl::Status CheckFiles(const TlsOptions& options) {
  ASSIGN_OR_RETURN(const std::string cert, ReadPem("tls-cert", options.cert_path));
  ASSIGN_OR_RETURN(const std::string key_text, ReadPem("tls-key", options.key_path));
  ASSIGN_OR_RETURN(const X509Ptr certificate,
                   ParseCertificate("tls-cert", options.cert_path, cert));
  RETURN_IF_ERROR(CheckAuthority(options));
  if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--tls-cert: the certificate in %s has expired; replace it", options.cert_path));
  }
  const KeyPtr key(PEM_read_bio_PrivateKey(Memory(key_text).get(), nullptr, nullptr, nullptr),
                   EVP_PKEY_free);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--tls-key: %s holds no unencrypted PEM private key", options.key_path));
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--tls-key: %s is not the key of the certificate in %s", options.key_path,
                        options.cert_path));
  }
  return absl::OkStatus();
}

// One for all that use the same files: each has a thread that looks at them, and a trainer has a
// connection to each of its peers.
std::shared_ptr<Provider> WatchFiles(const TlsOptions& options) {
  using Paths = std::tuple<std::string, std::string, std::string>;
  static absl::Mutex* const mutex = new absl::Mutex;
  static auto* const providers = new std::map<Paths, std::weak_ptr<Provider>>;
  absl::MutexLock lock(mutex);
  std::weak_ptr<Provider>& known =
      (*providers)[{options.cert_path, options.key_path, options.ca_path}];
  std::shared_ptr<Provider> provider = known.lock();
  if (provider != nullptr) return provider;
  if (options.enabled()) {
    provider = std::make_shared<FileProvider>(options.key_path, options.cert_path, options.ca_path,
                                              kTlsReloadSeconds);
  } else {
    provider = std::make_shared<FileProvider>(options.ca_path, kTlsReloadSeconds);
  }
  known = provider;
  return provider;
}

absl::Status CheckPlainText(const TlsOptions& options, const Address& address) {
  if (!options.key_path.empty() || !options.ca_path.empty()) {
    return absl::InvalidArgumentError(
        "--tls-cert is missing: TLS needs --tls-cert, --tls-key and --tls-ca together");
  }
  if (!options.insecure && !IsLoopback(address)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s is not a loopback address: give --tls-cert, --tls-key and --tls-ca, or "
                        "--insecure to speak "
                        "plain text to whoever can reach it",
                        FormatAddress(address)));
  }
  return absl::OkStatus();
}

}  // namespace

void AddTlsFlags(CLI::App& app, TlsOptions* options) {
  app.add_option("--tls-cert", options->cert_path, "PEM file: certificate chain of this process");
  app.add_option("--tls-key", options->key_path, "PEM file: private key of --tls-cert");
  app.add_option("--tls-ca", options->ca_path,
                 "PEM file: authorities that peers' certificates must come from");
  app.add_flag("--insecure", options->insecure,
               "speak plain text on other addresses than loopback, too");
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ServerCredentials(
    const TlsOptions& options, const Address& address, ClientCertificate client) {
  if (!options.enabled()) {
    RETURN_IF_ERROR(CheckPlainText(options, address));
    return grpc::InsecureServerCredentials();
  }
  RETURN_IF_ERROR(CheckFiles(options));
  grpc::experimental::TlsServerCredentialsOptions tls(WatchFiles(options));
  tls.watch_root_certs();
  tls.watch_identity_key_cert_pairs();
  tls.set_cert_request_type(client == ClientCertificate::kRequired
                                ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                : GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(tls);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& options, const Address& address, std::string_view token) {
  const bool authority_alone = (options.authority_alone || !token.empty()) && !options.enabled() &&
                               options.key_path.empty() && !options.ca_path.empty();
  if (!options.enabled() && !authority_alone) {
    RETURN_IF_ERROR(CheckPlainText(options, address));
    if (token.empty()) return grpc::InsecureChannelCredentials();
    return absl::FailedPreconditionError(absl::StrFormat(
        "a token is not sent to %s in plain text, where others may read it: give --tls-ca, or no "
        "token",
        FormatAddress(address)));
  }
  RETURN_IF_ERROR(authority_alone ? CheckAuthority(options) : CheckFiles(options));
  grpc::experimental::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(WatchFiles(options));
  tls.watch_root_certs();
  if (options.enabled()) tls.watch_identity_key_cert_pairs();
  std::shared_ptr<grpc::ChannelCredentials> channel = grpc::experimental::TlsCredentials(tls);
  if (token.empty()) return channel;
  return grpc::CompositeChannelCredentials(channel,
                                           grpc::AccessTokenCredentials(std::string(token)));
}

}  // namespace ringleader
