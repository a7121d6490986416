#include "base/net/certificate_names.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <memory>

namespace ringleader {
namespace {

std::vector<std::string> Properties(const grpc::AuthContext& context, const char* name) {
  std::vector<std::string> values;
  for (const grpc::string_ref& value : context.FindPropertyValues(name)) {
    values.emplace_back(value.data(), value.size());
  }
  return values;
}

// Infinitely far, where there is no certificate that can be read.
absl::Time ExpiryOf(const std::string& pem) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> text(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr), X509_free);
  std::tm time = {};
  if (certificate == nullptr ||
      ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &time) != 1) {
    return absl::InfiniteFuture();
  }
  return absl::FromTM(time, absl::UTCTimeZone());
}

}  // namespace

std::vector<std::string> CertificateNames::Texts() const {
  std::vector<std::string> texts;
  for (const std::string& uri : uris) texts.push_back("uri " + uri);
  for (const std::string& name : dns) texts.push_back("dns " + name);
  for (const std::string& email : emails) texts.push_back("email " + email);
  if (!common_name.empty()) texts.push_back("common_name " + common_name);
  return texts;
}

bool CertificateNames::Hold(std::string_view text) const {
  const std::vector<std::string> texts = Texts();
  return std::find(texts.begin(), texts.end(), text) != texts.end();
}

CertificateNames NamesOf(const grpc::AuthContext& context) {
  const std::vector<std::string> common = Properties(context, GRPC_X509_CN_PROPERTY_NAME);
  const std::vector<std::string> pem = Properties(context, GRPC_X509_PEM_CERT_PROPERTY_NAME);
  return {.uris = Properties(context, GRPC_PEER_URI_PROPERTY_NAME),
          .dns = Properties(context, GRPC_PEER_DNS_PROPERTY_NAME),
          .emails = Properties(context, GRPC_PEER_EMAIL_PROPERTY_NAME),
          .common_name = common.empty() ? "" : common.front(),
          .expires = pem.empty() ? absl::InfiniteFuture() : ExpiryOf(pem.front())};
}

}  // namespace ringleader
