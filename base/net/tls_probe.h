// Why two processes cannot speak TLS with each other, for people: gRPC says only that a connection
// was closed.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "base/net/address.h"
#include "base/net/tls.h"

namespace ringleader {

// Connects to `address` as gRPC would with `options`, and says in a clause what is wrong with TLS:
// one side speaks plain text, or does not accept the other's certificate, and why. Empty: nothing
// is wrong with it, or nobody answers. Sends no request. Blocks for some `patience`.
std::string FindTlsMismatch(const TlsOptions& options, const Address& address,
                            absl::Duration patience = absl::Seconds(2));

}  // namespace ringleader
