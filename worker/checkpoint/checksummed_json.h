// JSON that carries a checksum of itself.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_format.h"
#include "base/checksum.h"

namespace ringleader::checkpoint {

inline constexpr char kChecksumKey[] = "xxh3_64";

// Over everything but the checksum itself, in nlohmann's compact form: keys sorted, no blanks.
inline std::string ChecksumOf(nlohmann::json root) {
  root.erase(kChecksumKey);
  const std::string canonical = root.dump();
  return absl::StrFormat("%016x", Checksum(canonical.data(), canonical.size()));
}

}  // namespace ringleader::checkpoint
