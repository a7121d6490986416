// Copies of a database that is in use.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace ringleader::store {

// Writes the database as it is now to the file `copy`, which only its owner may read, and which is
// there whole or not at all; an older one is replaced. A coordinator may be using the database, in
// this process or another: it is not held up, and what it writes meanwhile is not in the copy. The
// copy has been read for damage, and says that it is one: a store that is opened on it uses no
// number again that may have been used since. Errors name the file.
absl::Status BackUp(const std::string& database, const std::string& copy);

}  // namespace ringleader::store
