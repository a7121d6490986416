// The gate that every call passes on a port with TLS: finds out who calls, asks the table of
// methods, and turns the call away before its request is read, or hands the caller on to the
// handler.
//
// gRPC runs it for every method of every service, also for those that nobody serves. It is told
// neither the connection's address nor anything of the request.
#pragma once

#include <grpcpp/security/auth_metadata_processor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "base/net/address.h"
#include "base/net/tls.h"
#include "coordinator/access/access_file.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/access/caller.h"
#include "coordinator/store/store.h"

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
  // `store`, `audit` and `clock` must outlive the gate. FAILED_PRECONDITION, with what to do, where
  // the address can be reached from elsewhere and nothing says who may do what there;
  // INVALID_ARGUMENT for a file that says it wrongly.
  static absl::StatusOr<std::shared_ptr<Gate>> Create(const GateOptions& options,
                                                      store::Store* store, AuditLog* audit,
                                                      const Clock* clock);
  ~Gate() override;

  // From now on looks at the file every second and takes over what changed in it; a file that is
  // wrong changes nothing and is logged. `on_change` is called then, from the gate's thread: who
  // was admitted before may not be any more.
  void Watch(std::function<void()> on_change);
  // No call of `on_change` is under way when it returns. Idempotent.
  void StopWatching();
  // To be called after a token was created or revoked: what the store holds counts from now on.
  absl::Status LoadTokens() ABSL_LOCKS_EXCLUDED(mutex_);

  // UNAUTHENTICATED for a token that is none, or no more.
  absl::StatusOr<Caller> CallerOfToken(const std::string& text) const ABSL_LOCKS_EXCLUDED(mutex_);

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  Gate(GateOptions options, store::Store* store, AuditLog* audit, const Clock* clock);
  absl::Status LoadFile() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<Caller> Identify(const InputMetadata& metadata,
                                  const grpc::AuthContext& context) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  void WatchFile();

  const GateOptions options_;
  store::Store& store_;
  AuditLog& audit_;
  const Clock& clock_;

  absl::Mutex loading_;  // one load of tokens at a time: the newest wins
  mutable absl::Mutex mutex_;
  std::string file_text_ ABSL_GUARDED_BY(mutex_);
  AccessFile file_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::Token> tokens_ ABSL_GUARDED_BY(mutex_);  // by SHA-256
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::function<void()> on_change_;
  std::thread watcher_;
};

}  // namespace ringleader::access
