#include "coordinator/page/page_server.h"

#include <httplib.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/net/connections.h"
#include "base/status_macros.h"
#include "coordinator/page/assets.h"
#include "coordinator/page/page_api.h"
#include "coordinator/page/page_http.h"

namespace ringleader::page {
namespace {

constexpr size_t kMaxPathBytes = 256;

// Texts of jobs and nodes are anybody's: nothing but the files of this server is run or shown, and
// no other site may ask, frame or guess.
const httplib::Headers& SafeHeaders() {
  static const auto* const kHeaders = new httplib::Headers{
      {"Content-Security-Policy",
       "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
       "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
      {"X-Content-Type-Options", "nosniff"},
      {"X-Frame-Options", "DENY"},
      {"Referrer-Policy", "no-referrer"},
      {"Cross-Origin-Resource-Policy", "same-origin"},
      {"Cross-Origin-Opener-Policy", "same-origin"},
      {"Cache-Control", "no-store"},
  };
  return *kHeaders;
}

int HttpStatus(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

void Refuse(const absl::Status& status, httplib::Response* response) {
  response->status = HttpStatus(status.code());
  if (response->status == 401) response->set_header("WWW-Authenticate", "Bearer");
  const nlohmann::json body = {{"error", std::string(status.message())}};
  response->set_content(body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                        "application/json");
}

// The certificate of a browser that has shown one, as DER. The handshake has verified it.
std::string CertificateOf(const httplib::Request& request) {
  if (request.ssl == nullptr || SSL_get_verify_result(request.ssl) != X509_V_OK) return "";
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      SSL_get1_peer_certificate(request.ssl), X509_free);
  if (certificate == nullptr) return "";
  std::string der(static_cast<size_t>(std::max(i2d_X509(certificate.get(), nullptr), 0)), '\0');
  auto* end = reinterpret_cast<unsigned char*>(der.data());
  i2d_X509(certificate.get(), &end);
  return der;
}

// A value may hold '=', as filters do: the library would cut it there.
std::multimap<std::string, std::string> ArgumentsOf(const std::string& target) {
  std::multimap<std::string, std::string> arguments;
  const size_t query = target.find('?');
  if (query == std::string::npos) return arguments;
  for (const absl::string_view part :
       absl::StrSplit(absl::string_view(target).substr(query + 1), '&', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    arguments.emplace(httplib::detail::decode_url(pair.first, /*convert_plus_to_space=*/true),
                      httplib::detail::decode_url(pair.second, /*convert_plus_to_space=*/true));
  }
  return arguments;
}

PageRequest RequestOf(const httplib::Request& request) {
  return {.arguments = ArgumentsOf(request.target),
          .authorization = request.get_header_value("Authorization"),
          .certificate = CertificateOf(request)};
}

// Browsers show a certificate to whichever site has them ask for this one, and say which it was.
bool AnotherSiteAsks(const httplib::Request& request) {
  const std::string site = request.get_header_value("Sec-Fetch-Site");
  return !site.empty() && site != "same-origin" && site != "none";
}

// Whether a browser meant this machine when it sent the request. A name that an attacker made to
// point here is not loopback by its text.
bool NamesLoopback(const std::string& host) {
  const size_t end = host.rfind(':');
  const bool has_port = end != std::string::npos && host.find(']', end) == std::string::npos &&
                        (host.front() == '[' || host.find(':') == end);
  std::string name = has_port ? host.substr(0, end) : host;
  if (name.size() > 2 && name.front() == '[') name = name.substr(1, name.size() - 2);
  return IsLoopback({.host = name, .port = 0, .path = ""});
}

absl::Status CheckOptions(const PageOptions& options) {
  const std::string address = FormatAddress(options.listen);
  if (!options.listen.path.empty()) {
    return absl::InvalidArgumentError("--page-listen: the page is served over TCP: give host:port");
  }
  if (options.tls.enabled() && !options.has_roles) {
    return absl::FailedPreconditionError(
        "--page-listen: a browser shows a certificate or a token, and nothing says what those may "
        "do: give --access FILE (docs/security.md shows one)");
  }
  if (options.tls.enabled() || IsLoopback(options.listen)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("--page-listen ", address,
                   " can be reached from other machines, and without TLS whoever reaches it would "
                   "see everything: give --tls-cert, --tls-key, --tls-ca and --access, or listen "
                   "on loopback"));
}

// Certificate, key and authorities are read anew for each connection, so that one that was replaced
// counts. 1: done.
int UseCertificates(SSL* ssl, void* tls) {
  const auto& options = *static_cast<const TlsOptions*>(tls);
  if (SSL_use_certificate_chain_file(ssl, options.cert_path.c_str()) != 1 ||
      SSL_use_PrivateKey_file(ssl, options.key_path.c_str(), SSL_FILETYPE_PEM) != 1) {
    return 0;
  }
  X509_STORE* const authorities = X509_STORE_new();
  STACK_OF(X509_NAME)* const names = SSL_load_client_CA_file(options.ca_path.c_str());
  if (authorities == nullptr || names == nullptr ||
      X509_STORE_load_file(authorities, options.ca_path.c_str()) != 1) {
    X509_STORE_free(authorities);
    sk_X509_NAME_pop_free(names, X509_NAME_free);
    return 0;
  }
  SSL_set0_verify_cert_store(ssl, authorities);
  SSL_set_client_CA_list(ssl, names);  // who has none of these is not asked to choose one
  SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);
  return 1;
}

using TlsContext = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;

// `tls` outlives it.
TlsContext NewTlsContext(TlsOptions* tls) {
  TlsContext context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  // Each connection shows its certificate anew: one that has expired resumes nothing.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context.get(),
                      SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_cert_cb(context.get(), &UseCertificates, tls);
  return context;
}

class PageServerImpl : public PageServer {
 public:
  PageServerImpl(const PageOptions& options, const std::shared_ptr<grpc::Channel>& coordinator)
      : options_(options), api_(coordinator, options.voucher) {}

  absl::Status Listen() {
    http_ = std::make_unique<PageHttp>(HttpLimits(), options_.tls.enabled()
                                                         ? NewTlsContext(&options_.tls)
                                                         : TlsContext(nullptr, &SSL_CTX_free));
    Configure();
    AddAssets();
    AddApi();
    Connections::Bounds bounds = Connections::OfThisProcess();
    bounds.per_client = HttpLimits().of_one_client;
    if (options_.listen.port != 0) RETURN_IF_ERROR(CheckCanListen(options_.listen));
    ASSIGN_OR_RETURN(connections_, Connections::Open(options_.listen, bounds));
    connections_->Serve([this](int connection) { http_->Take(connection); });
    return absl::OkStatus();
  }

  int port() const override { return connections_->port(); }

 private:
  void Configure() {
    http_->set_default_headers(SafeHeaders());
    http_->set_payload_max_length(0);
    http_->set_pre_routing_handler(
        [this](const httplib::Request& request, httplib::Response& response) {
          // Parts of an answer are not served: two thousand that overlap would make many MB of one.
          const_cast<httplib::Request&>(request).ranges.clear();
          const absl::Status fit = Check(request);
          if (fit.ok()) return httplib::Server::HandlerResponse::Unhandled;
          Refuse(fit, &response);
          return httplib::Server::HandlerResponse::Handled;
        });
    http_->set_exception_handler(
        [](const httplib::Request& request, httplib::Response& response, std::exception_ptr) {
          Refuse(absl::InternalError("the page has failed"), &response);
        });
  }

  absl::Status Check(const httplib::Request& request) const {
    if (request.method != "GET" && request.method != "HEAD") {
      return absl::PermissionDeniedError("the page is read-only; use ringctl");
    }
    if (!options_.tls.enabled() && !NamesLoopback(request.get_header_value("Host"))) {
      return absl::PermissionDeniedError(
          "this page is for browsers of its own machine: open it as localhost or 127.0.0.1");
    }
    if (request.path.size() > kMaxPathBytes) return absl::NotFoundError("there is no such address");
    const bool asks_for_data = request.path.rfind("/api/", 0) == 0;
    if (asks_for_data && AnotherSiteAsks(request)) {
      return absl::PermissionDeniedError("this is for the page itself: open it in a tab");
    }
    if (asks_for_data && options_.tls.enabled() && !request.has_header("Authorization") &&
        CertificateOf(request).empty()) {
      return absl::UnauthenticatedError(
          "show a certificate, or a token: \"Authorization: Bearer TOKEN\"");
    }
    return absl::OkStatus();
  }

  void AddAssets() {
    for (const Asset& asset : Assets()) {
      http_->Get(asset.path, [&asset](const httplib::Request&, httplib::Response& response) {
        response.set_content(asset.text.data(), asset.text.size(), asset.type);
      });
    }
  }

  template <typename Answer>
  void Add(const char* pattern, Answer answer) {
    http_->Get(pattern, [answer](const httplib::Request& request, httplib::Response& response) {
      const absl::StatusOr<std::string> json = answer(request);
      if (!json.ok()) return Refuse(json.status(), &response);
      response.set_content(*json, "application/json");
    });
  }

  void AddApi() {
    Add("/api/jobs", [this](const auto& request) { return api_.Jobs(RequestOf(request)); });
    Add("/api/nodes", [this](const auto& request) { return api_.Nodes(RequestOf(request)); });
    Add("/api/jobs/([A-Za-z0-9._-]+)",
        [this](const auto& request) { return api_.Job(request.matches[1], RequestOf(request)); });
    Add("/api/jobs/([A-Za-z0-9._-]+)/history", [this](const auto& request) {
      return api_.History(request.matches[1], RequestOf(request));
    });
    Add("/api/jobs/([A-Za-z0-9._-]+)/logs",
        [this](const auto& request) { return api_.Logs(request.matches[1], RequestOf(request)); });
    Add("/api/.*", [](const auto& request) {
      return absl::StatusOr<std::string>(absl::NotFoundError(
          absl::StrCat("there is no ", request.path, "; docs/page.md lists what there is")));
    });
  }

  PageOptions options_;
  const PageApi api_;
  std::unique_ptr<PageHttp> http_;
  std::unique_ptr<Connections> connections_;  // they go to http_
};

}  // namespace

absl::StatusOr<std::unique_ptr<PageServer>> PageServer::Start(
    const PageOptions& options, std::shared_ptr<grpc::Channel> coordinator) {
  RETURN_IF_ERROR(CheckOptions(options));
  // Says what is wrong with the files, by the names of their flags.
  RETURN_IF_ERROR(
      ServerCredentials(options.tls, options.listen, ClientCertificate::kOptional).status());
  auto server = std::make_unique<PageServerImpl>(options, coordinator);
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace ringleader::page
