#include "base/protocol_version.h"

#include "absl/strings/str_cat.h"

namespace ringleader {
namespace {

absl::string_view View(std::string_view text) {
  return {text.data(), text.size()};
}

}  // namespace

absl::Status CheckProtocolVersion(std::string_view peer, uint32_t peer_version,
                                  std::string_view self) {
  if (peer_version == kProtocolVersion) return absl::OkStatus();
  const bool peer_is_older = peer_version < kProtocolVersion;
  const absl::string_view older = View(peer_is_older ? peer : self);
  const absl::string_view newer = View(peer_is_older ? self : peer);
  return absl::FailedPreconditionError(
      absl::StrCat(View(peer), " speaks protocol version ", peer_version, " and ", View(self), " ",
                   kProtocolVersion, "; ", older, " is older: install the release of ", newer,
                   " there, and restart it"));
}

}  // namespace ringleader
