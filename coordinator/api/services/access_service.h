// AccessService: tokens and the audit log.
#pragma once

#include <functional>

#include "coordinator/access/gate.h"
#include "coordinator/api/calls/unary.h"
#include "coordinator/store/store.h"
#include "ringleader/v1/access_service.grpc.pb.h"

namespace ringleader::api {

class AccessService : public v1::AccessService::CallbackService {
 public:
  // `on_revoke` is called after a token was revoked: what it opened must end. All must outlive the
  // service.
  AccessService(store::Store* store, access::Gate* gate, Unary* unary,
                std::function<void()> on_revoke)
      : store_(*store), gate_(*gate), unary_(*unary), on_revoke_(std::move(on_revoke)) {}

  grpc::ServerUnaryReactor* CreateToken(grpc::CallbackServerContext* context,
                                        const v1::CreateTokenRequest* request,
                                        v1::Token* reply) override;
  grpc::ServerUnaryReactor* ListTokens(grpc::CallbackServerContext* context,
                                       const v1::ListTokensRequest* request,
                                       v1::ListTokensResponse* reply) override;
  grpc::ServerUnaryReactor* RevokeToken(grpc::CallbackServerContext* context,
                                        const v1::RevokeTokenRequest* request,
                                        v1::Token* reply) override;
  grpc::ServerUnaryReactor* ListAuditRecords(grpc::CallbackServerContext* context,
                                             const v1::ListAuditRecordsRequest* request,
                                             v1::ListAuditRecordsResponse* reply) override;

 private:
  absl::Status Create(const Change& change, const v1::CreateTokenRequest& request,
                      v1::Token* reply);
  absl::Status List(const v1::ListTokensRequest& request, v1::ListTokensResponse* reply);
  absl::Status Revoke(const Change& change, const v1::RevokeTokenRequest& request,
                      v1::Token* reply);
  absl::Status ListAudit(const v1::ListAuditRecordsRequest& request,
                         v1::ListAuditRecordsResponse* reply);
  // Applies `body` once per request, with its line in the audit log.
  absl::StatusOr<v1::Token> Write(
      const store::RequestKey& key, store::Need need,
      absl::FunctionRef<absl::StatusOr<v1::Token>(store::WriteTransaction&)> body);

  store::Store& store_;
  access::Gate& gate_;
  Unary& unary_;
  const std::function<void()> on_revoke_;
};

}  // namespace ringleader::api
