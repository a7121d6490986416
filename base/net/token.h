// Bearer tokens: what clients show in place of a certificate.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ringleader {

// 256 random bits as text that is known for a token where it turns up, e.g. "rlt_…".
std::string NewToken();

// The 32 bytes of the SHA-256 of a token's text, which are all that a coordinator keeps. (No salt
// and no slow hash: nobody guesses 256 bits.)
std::string TokenHash(const std::string& text);

// The token in a file, without white space around it. FAILED_PRECONDITION names a file that cannot
// be read, INVALID_ARGUMENT one that holds something else than one word of printable ASCII.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

// INVALID_ARGUMENT unless it is one word of printable ASCII, at most 512 bytes. `source`: for
// people.
absl::Status CheckTokenText(const std::string& text, const std::string& source);

}  // namespace ringleader
