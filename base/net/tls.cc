#include "base/net/tls.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

struct Pem {
  std::string cert;
  std::string key;
  std::string ca;
};

absl::StatusOr<std::string> ReadPem(const std::string& flag, const std::string& path) {
  if (path.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--%s is missing: TLS needs --tls-cert, --tls-key and --tls-ca together", flag));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--%s: cannot read %s: %s", flag, path, std::strerror(errno)));
  }
  return text.str();
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

// gRPC takes anything here and then fails each handshake without a word: check what it will be
// given.
absl::StatusOr<Pem> LoadPem(const TlsOptions& options) {
  Pem pem;
  ASSIGN_OR_RETURN(pem.cert, ReadPem("tls-cert", options.cert_path));
  ASSIGN_OR_RETURN(pem.key, ReadPem("tls-key", options.key_path));
  ASSIGN_OR_RETURN(pem.ca, ReadPem("tls-ca", options.ca_path));
  ASSIGN_OR_RETURN(const X509Ptr certificate,
                   ParseCertificate("tls-cert", options.cert_path, pem.cert));
  RETURN_IF_ERROR(ParseCertificate("tls-ca", options.ca_path, pem.ca).status());
  const KeyPtr key(PEM_read_bio_PrivateKey(Memory(pem.key).get(), nullptr, nullptr, nullptr),
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
  return pem;
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
    const TlsOptions& options, const Address& address) {
  if (!options.enabled()) {
    RETURN_IF_ERROR(CheckPlainText(options, address));
    return grpc::InsecureServerCredentials();
  }
  ASSIGN_OR_RETURN(const Pem pem, LoadPem(options));
  grpc::SslServerCredentialsOptions ssl(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  ssl.pem_root_certs = pem.ca;
  ssl.pem_key_cert_pairs.push_back({.private_key = pem.key, .cert_chain = pem.cert});
  return grpc::SslServerCredentials(ssl);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& options, const Address& address) {
  if (!options.enabled()) {
    RETURN_IF_ERROR(CheckPlainText(options, address));
    return grpc::InsecureChannelCredentials();
  }
  ASSIGN_OR_RETURN(const Pem pem, LoadPem(options));
  return grpc::SslCredentials(
      {.pem_root_certs = pem.ca, .pem_private_key = pem.key, .pem_cert_chain = pem.cert});
}

}  // namespace ringleader
