#include "base/net/certificate_names.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <algorithm>

namespace ringleader {
namespace {

std::vector<std::string> Properties(const grpc::AuthContext& context, const char* name) {
  std::vector<std::string> values;
  for (const grpc::string_ref& value : context.FindPropertyValues(name)) {
    values.emplace_back(value.data(), value.size());
  }
  return values;
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
  return {.uris = Properties(context, GRPC_PEER_URI_PROPERTY_NAME),
          .dns = Properties(context, GRPC_PEER_DNS_PROPERTY_NAME),
          .emails = Properties(context, GRPC_PEER_EMAIL_PROPERTY_NAME),
          .common_name = common.empty() ? "" : common.front()};
}

}  // namespace ringleader
