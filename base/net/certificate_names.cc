#include "base/net/certificate_names.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <optional>

#include "absl/strings/ascii.h"

namespace ringleader {
namespace {

std::vector<std::string> Properties(const grpc::AuthContext& context, const char* name) {
  std::vector<std::string> values;
  for (const grpc::string_ref& value : context.FindPropertyValues(name)) {
    values.emplace_back(value.data(), value.size());
  }
  return values;
}

using X509Ptr = std::unique_ptr<X509, decltype(&X509_free)>;

std::optional<absl::Time> TimeOf(const ASN1_TIME* text) {
  std::tm time = {};
  if (ASN1_TIME_to_tm(text, &time) != 1) return std::nullopt;
  return absl::FromTM(time, absl::UTCTimeZone());
}

// `unknown`: where there is no certificate that can be read.
absl::Time ExpiryOf(const X509* certificate, absl::Time unknown) {
  if (certificate == nullptr) return unknown;
  return TimeOf(X509_get0_notAfter(certificate)).value_or(unknown);
}

std::unique_ptr<BIO, decltype(&BIO_free)> Open(const std::string& pem) {
  return {BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free};
}

// The next certificate of a PEM text; null: there is none.
X509Ptr NextOf(BIO* text) {
  return X509Ptr(PEM_read_bio_X509(text, nullptr, nullptr, nullptr), X509_free);
}

// Empty where it cannot be written as UTF-8.
std::string Utf8(const ASN1_STRING* text) {
  unsigned char* bytes = nullptr;
  const int size = ASN1_STRING_to_UTF8(&bytes, text);
  if (size < 0) return "";
  std::string utf8(reinterpret_cast<const char*>(bytes), static_cast<size_t>(size));
  OPENSSL_free(bytes);
  return utf8;
}

std::string CommonName(const X509* certificate) {
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  const int first = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (first < 0) return "";
  return Utf8(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, first)));
}

}  // namespace

std::vector<std::string> CertificateNames::Texts() const {
  std::vector<std::string> texts;
  for (const std::string& uri : uris) texts.push_back("uri " + uri);
  for (const std::string& name : dns) texts.push_back("dns " + absl::AsciiStrToLower(name));
  for (const std::string& email : emails) texts.push_back("email " + absl::AsciiStrToLower(email));
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
          .expires = pem.empty()
                         ? absl::InfiniteFuture()
                         : ExpiryOf(NextOf(Open(pem.front()).get()).get(), absl::InfiniteFuture())};
}

CertificateNames NamesOfDer(const std::string& der) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(der.data());
  const X509Ptr certificate(d2i_X509(nullptr, &bytes, static_cast<long>(der.size())), X509_free);
  CertificateNames names;
  names.expires = ExpiryOf(certificate.get(), absl::InfinitePast());
  if (certificate == nullptr) return names;
  names.common_name = CommonName(certificate.get());
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> others(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate.get(), NID_subject_alt_name, nullptr, nullptr)),
      GENERAL_NAMES_free);
  for (int i = 0; others != nullptr && i < sk_GENERAL_NAME_num(others.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(others.get(), i);
    if (name->type == GEN_URI) names.uris.push_back(Utf8(name->d.uniformResourceIdentifier));
    if (name->type == GEN_DNS) names.dns.push_back(Utf8(name->d.dNSName));
    if (name->type == GEN_EMAIL) names.emails.push_back(Utf8(name->d.rfc822Name));
  }
  return names;
}

std::vector<Validity> ValiditiesOfPem(const std::string& pem) {
  std::vector<Validity> validities;
  const auto text = Open(pem);
  while (const X509Ptr certificate = NextOf(text.get())) {
    const auto not_before = TimeOf(X509_get0_notBefore(certificate.get()));
    const auto not_after = TimeOf(X509_get0_notAfter(certificate.get()));
    if (!not_before.has_value() || !not_after.has_value()) break;
    validities.push_back({*not_before, *not_after});
  }
  ERR_clear_error();  // that there is no other
  return validities;
}

}  // namespace ringleader
