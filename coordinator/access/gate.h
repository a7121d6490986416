// The gate that every call passes, twice on a port with TLS.
//
// gRPC asks Process() first, for every method of every service, also for those that nobody serves,
// and before the request is read. It turns away callers that are nobody and methods that no handler
// of the coordinator serves. It does not know the peer's address then.
//
// The handler asks Admit() next: who calls, and whether the table lets this role call the method.
// Admit() finds the caller out anew instead of taking what Process() found, because gRPC 1.51 has
// no place for it: properties that are added to the AuthContext stay with the connection, where the
// next call, of somebody else or under changed roles, would find those of the first.
#pragma once

#include <grpcpp/security/auth_metadata_processor.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "base/net/address.h"
#include "base/net/certificate_names.h"
#include "base/net/tls.h"
#include "coordinator/access/access_file.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/access/caller.h"
#include "coordinator/store/store.h"

namespace grpc {
class CallbackServerContext;
}

namespace ringleader::access {

struct GateOptions {
  Address listen;
  TlsOptions tls = {};
  // YAML file of roles; empty: none, so that whoever may connect is the local caller.
  std::string access_path = {};
};

// Thread-safe.
class Gate : public grpc::AuthMetadataProcessor {
 public:
  // Metadata by which the coordinator's own page hands on whom it speaks for: the certificate that
  // a browser has shown, verified, as DER, and voucher(), which nobody outside of this process
  // knows.
  static constexpr char kVoucherKey[] = "ringleader-voucher";
  static constexpr char kCertificateKey[] = "ringleader-certificate-bin";

  // `store`, `audit` and `clock` must outlive the gate. Load() comes first.
  Gate(GateOptions options, store::Store* store, AuditLog* audit, const Clock* clock);
  ~Gate() override;

  // FAILED_PRECONDITION, with what to do, where the address can be reached from elsewhere and
  // nothing says who may do what there, and where a file says it but nobody can show who they are;
  // INVALID_ARGUMENT for a file that says it wrongly.
  absl::Status Load() ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on a thread looks at the file every second and takes over what has changed in it; a
  // file that is wrong changes nothing, and the log says so. The thread calls `on_change` when the
  // file has changed, or the certificate of a caller that was admitted has expired, and
  // `on_token_expired` when a token has: callers that were admitted before may not be admitted any
  // more.
  void Watch(std::function<void()> on_change, std::function<void()> on_token_expired);
  // Neither function is being called when it returns. Idempotent.
  void StopWatching();
  // To be called after a token was created or revoked: the tokens in the store count from now on.
  absl::Status LoadTokens() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string& voucher() const { return voucher_; }

  // Who calls this method of "ringleader.v1.{service}". PERMISSION_DENIED says which roles may, and
  // UNAUTHENTICATED why the caller is nobody; both are noted in the audit log. `resource`: as the
  // request names it, such as "jobs/x"; empty where it names none.
  absl::StatusOr<Caller> Admit(const grpc::CallbackServerContext& context,
                               const std::string& service, const std::string& method,
                               const std::string& resource) ABSL_LOCKS_EXCLUDED(mutex_);
  // Notes in the audit log that a caller was refused `resource`, which nobody need have checked.
  // `address`: of the peer.
  void NoteRefused(const Caller& caller, const std::string& address, const std::string& method_path,
                   const std::string& resource, const absl::Status& status);

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  absl::Status LoadFile() ABSL_LOCKS_EXCLUDED(mutex_);
  // Those of the connection's certificate or, vouched for, of the one that goes with the call.
  CertificateNames NamesOfCaller(const InputMetadata& metadata,
                                 const grpc::AuthContext& context) const;
  // A caller without role if the call shows neither token nor certificate. UNAUTHENTICATED if it
  // shows one that is wrong, or comes over a connection whose certificate has expired since.
  absl::StatusOr<Caller> Identify(const InputMetadata& metadata,
                                  const grpc::AuthContext& context) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // UNAUTHENTICATED for a text that is no token of the store, and for one that has expired.
  absl::StatusOr<Caller> CallerOfToken(const std::string& text) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The body of the thread that watches.
  void Look();
  // Reads the file; true if its text has changed. `complaint`: what was logged last.
  bool TakeUpFile(std::string* complaint);
  bool ATokenExpired(absl::Time after, absl::Time until) const ABSL_LOCKS_EXCLUDED(mutex_);
  bool ACertificateExpired(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  const GateOptions options_;
  const std::string voucher_;
  store::Store& store_;
  AuditLog& audit_;
  const Clock& clock_;

  absl::Mutex loading_;  // one load of tokens at a time: the newest wins
  mutable absl::Mutex mutex_;
  std::string file_text_ ABSL_GUARDED_BY(mutex_);
  AccessFile file_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::Token> tokens_ ABSL_GUARDED_BY(mutex_);  // by SHA-256
  // When certificates of callers that were admitted expire.
  std::set<absl::Time> expiries_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::function<void()> on_change_;
  std::function<void()> on_token_expired_;
  std::thread watcher_;
};

}  // namespace ringleader::access
