#include "base/net/token.h"

#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader {
namespace {

constexpr char kPrefix[] = "rlt_";
constexpr size_t kRandomBytes = 32;
constexpr size_t kMaxTokenBytes = 512;

}  // namespace

std::string NewToken() {
  std::string bytes(kRandomBytes, '\0');
  // Fails only where the machine has no source of randomness: then no secret can be made.
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), kRandomBytes) != 1) std::abort();
  return absl::StrCat(kPrefix, absl::WebSafeBase64Escape(bytes));
}

std::string TokenHash(const std::string& text) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

absl::Status CheckTokenText(const std::string& text, const std::string& source) {
  const bool printable =
      std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7f; });
  if (!text.empty() && text.size() <= kMaxTokenBytes && printable) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(source, " holds no token: one word that begins with ", kPrefix, " is expected"));
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  // A little more than a token and white space: what is longer is none.
  const absl::StatusOr<std::string> text =
      ReadFlagFile("--token-file", path, 2 * kMaxTokenBytes, Pipe::kRead);
  if (absl::IsInvalidArgument(text.status())) return text.status();
  if (!text.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(text.status().message(), "; check the path and its permissions"));
  }
  const std::string token(absl::StripAsciiWhitespace(*text));
  RETURN_IF_ERROR(CheckTokenText(token, absl::StrCat("--token-file: ", path)));
  return token;
}

}  // namespace ringleader
