// The page that shows jobs and nodes in a browser, and the JSON that it is made from: read-only, on
// a port of its own.
//
// What it shows comes from the coordinator's own gRPC services, called inside of the process with
// the certificate or token that the browser showed: roles, limits and the audit log are theirs
// (coordinator/access).
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/net/address.h"
#include "base/net/tls.h"

namespace ringleader::page {

struct PageOptions {
  Address listen;
  // Those of the gRPC port. Where they name a certificate, the page speaks HTTPS and asks everybody
  // for a certificate or a token; otherwise it speaks HTTP, on loopback alone, and to everybody
  // there.
  TlsOptions tls = {};
  bool has_roles = false;    // something says who may do what
  std::string voucher = {};  // api::Server::voucher()
};

// Thread-safe.
class PageServer {
 public:
  // Serves until this object ends. `coordinator`: a channel whose calls are local calls of this
  // process. FAILED_PRECONDITION, with what to do, where the page would be open to whoever reaches
  // the address; ALREADY_EXISTS when the port is in use; INVALID_ARGUMENT for a certificate or key
  // that cannot be used.
  static absl::StatusOr<std::unique_ptr<PageServer>> Start(
      const PageOptions& options, std::shared_ptr<grpc::Channel> coordinator);
  virtual ~PageServer() = default;

  // The port that is served; what was asked for unless that was 0.
  virtual int port() const = 0;
};

}  // namespace ringleader::page
