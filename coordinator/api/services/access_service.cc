#include "coordinator/api/services/access_service.h"

#include <openssl/sha.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/api/services/listing.h"
#include "coordinator/api/services/requests.h"
#include "proto/timestamps.h"

namespace ringleader::api {
namespace {

constexpr char kService[] = "AccessService";
constexpr uint64_t kMaxLifetimeSeconds = uint64_t{366} * 24 * 3600;
constexpr size_t kIdBytes = 6;  // of the token's hash

absl::Status CheckToken(const v1::CreateTokenRequest& request) {
  if (request.sha256().size() != SHA256_DIGEST_LENGTH) {
    return absl::InvalidArgumentError("sha256: the 32 bytes of the token's SHA-256 are expected");
  }
  if (request.role() != v1::ADMIN && request.role() != v1::USER && request.role() != v1::VIEWER) {
    return absl::InvalidArgumentError(
        "role: give admin, user or viewer; a node has a certificate instead of a token");
  }
  if (!access::IsCallerName(request.user())) {
    return absl::InvalidArgumentError("user: give 1 to 128 letters, digits and -_.@+");
  }
  if (!request.project().empty() && !access::IsCallerName(request.project())) {
    return absl::InvalidArgumentError("project: give 1 to 128 letters, digits and -_.@+");
  }
  if (request.lifetime_seconds() < 1 || request.lifetime_seconds() > kMaxLifetimeSeconds) {
    return absl::InvalidArgumentError("lifetime_seconds: give 1 s to 366 days");
  }
  return absl::OkStatus();
}

std::string ArgumentsOf(v1::ListAuditRecordsRequest request) {
  request.clear_page_size();
  request.clear_page_token();
  return absl::StrCat("ListAuditRecords\n", request.SerializeAsString());
}

}  // namespace

absl::StatusOr<v1::Token> AccessService::Write(
    const store::RequestKey& key, store::Need need,
    absl::FunctionRef<absl::StatusOr<v1::Token>(store::WriteTransaction&)> body) {
  v1::Token token;
  const absl::Status written = store_.Write(
      [&](store::WriteTransaction& t) -> absl::Status {
        const auto once = [&]() -> absl::StatusOr<v1::Token> {
          ASSIGN_OR_RETURN(v1::Token made, body(t));
          RETURN_IF_ERROR(t.AppendAudit(*key.audit));
          return made;
        };
        ASSIGN_OR_RETURN(token, key.id.empty() ? once() : store::Once<v1::Token>(t, key, once));
        return absl::OkStatus();
      },
      need);
  // Also where nothing was written: an earlier try may have been, and could not be loaded then.
  RETURN_IF_ERROR(gate_.LoadTokens());
  RETURN_IF_ERROR(written);
  return token;
}

grpc::ServerUnaryReactor* AccessService::CreateToken(grpc::CallbackServerContext* context,
                                                     const v1::CreateTokenRequest* request,
                                                     v1::Token* reply) {
  const std::string resource =
      absl::StrCat("tokens/", absl::BytesToHexString(request->sha256().substr(0, kIdBytes)));
  return unary_.RunChange(
      context, kService, "CreateToken", resource, *request, *reply,
      [this, request, reply](const Change& change) { return Create(change, *request, reply); });
}

absl::Status AccessService::Create(const Change& change, const v1::CreateTokenRequest& request,
                                   v1::Token* reply) {
  RETURN_IF_ERROR(CheckToken(request));
  ASSIGN_OR_RETURN(store::RequestKey key, KeyOf(change, request));
  key.audit->set_message(absl::StrCat(
      "for ", std::string(access::RoleText(request.role())), " ", request.user(),
      request.project().empty() ? "" : absl::StrCat(" of project ", request.project())));
  store::StoredToken stored;
  stored.sha256 = request.sha256();
  v1::Token& token = stored.token;
  token.set_name(change.record.resource());
  token.set_role(request.role());
  token.set_user(request.user());
  token.set_project(request.project());
  token.set_creator(change.caller.name);
  const absl::Time now = absl::Now();
  token.mutable_create_time()->set_seconds(absl::ToUnixSeconds(now));
  // Rounded up, so that no token is good for less than was asked for.
  token.mutable_expire_time()->set_seconds(
      absl::ToUnixSeconds(now + absl::Seconds(1) - absl::Nanoseconds(1)) +
      static_cast<int64_t>(request.lifetime_seconds()));
  ASSIGN_OR_RETURN(*reply, Write(key, store::Need::kOrdinary,
                                 [&](store::WriteTransaction& t) -> absl::StatusOr<v1::Token> {
                                   RETURN_IF_ERROR(t.CreateToken(stored));
                                   return token;
                                 }));
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* AccessService::ListTokens(grpc::CallbackServerContext* context,
                                                    const v1::ListTokensRequest* request,
                                                    v1::ListTokensResponse* reply) {
  return unary_.Run(context, kService, "ListTokens", "", *reply,
                    [this, request, reply] { return List(*request, reply); });
}

absl::Status AccessService::List(const v1::ListTokensRequest& request,
                                 v1::ListTokensResponse* reply) {
  ASSIGN_OR_RETURN(const int page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::string after, ParsePageToken(request.page_token(), "ListTokens"));
  std::vector<store::StoredToken> tokens;
  RETURN_IF_ERROR(store_.Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(tokens, t.ListTokens());
    return absl::OkStatus();
  }));
  std::vector<v1::Token> all;
  for (store::StoredToken& stored : tokens) all.push_back(std::move(stored.token));
  if (FillPage(std::move(all), after, page_size, reply->mutable_tokens())) {
    reply->set_next_page_token(MakePageToken(reply->tokens().rbegin()->name(), "ListTokens"));
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* AccessService::RevokeToken(grpc::CallbackServerContext* context,
                                                     const v1::RevokeTokenRequest* request,
                                                     v1::Token* reply) {
  return unary_.RunChange(
      context, kService, "RevokeToken", request->name(), *request, *reply,
      [this, request, reply](const Change& change) { return Revoke(change, *request, reply); });
}

absl::Status AccessService::Revoke(const Change& change, const v1::RevokeTokenRequest& request,
                                   v1::Token* reply) {
  ASSIGN_OR_RETURN(const store::RequestKey key, KeyOf(change, request));
  // A token that has leaked cannot wait until somebody has made room on the disk.
  ASSIGN_OR_RETURN(*reply, Write(key, store::Need::kVital, [&](store::WriteTransaction& t) {
    return t.DeleteToken(request.name());
  }));
  on_revoke_();
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* AccessService::ListAuditRecords(
    grpc::CallbackServerContext* context, const v1::ListAuditRecordsRequest* request,
    v1::ListAuditRecordsResponse* reply) {
  return unary_.Run(context, kService, "ListAuditRecords", "", *reply,
                    [this, request, reply] { return ListAudit(*request, reply); });
}

absl::Status AccessService::ListAudit(const v1::ListAuditRecordsRequest& request,
                                      v1::ListAuditRecordsResponse* reply) {
  const std::string arguments = ArgumentsOf(request);
  store::AuditQuery query = {.caller = request.caller(),
                             .method = request.method(),
                             .resource = request.resource(),
                             .outcome = request.outcome()};
  if (request.has_after_time()) query.after = ToTime(request.after_time());
  if (request.has_before_time()) query.before = ToTime(request.before_time());
  ASSIGN_OR_RETURN(query.limit, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::string place, ParsePageToken(request.page_token(), arguments));
  if (!place.empty() && !absl::SimpleAtoi(place, &query.before_sequence)) {
    return absl::InvalidArgumentError("page_token: not one that this method gave out");
  }
  store::AuditPage page;
  RETURN_IF_ERROR(store_.Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(page, t.ListAudit(query));
    return absl::OkStatus();
  }));
  for (v1::AuditRecord& record : page.records) *reply->add_records() = std::move(record);
  if (page.last_sequence != 0) {
    reply->set_next_page_token(MakePageToken(absl::StrCat(page.last_sequence), arguments));
  }
  return absl::OkStatus();
}

}  // namespace ringleader::api
