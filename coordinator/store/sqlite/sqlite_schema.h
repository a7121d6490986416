// The database's tables, as numbered migrations. docs/formats.md describes them to people.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/store/sqlite/sqlite_connection.h"

namespace ringleader::store {

struct Migration {
  int number = 0;  // 1, 2, … without gaps
  const char* sql = nullptr;
};

// A migration that was released never changes: a new one follows it.
const std::vector<Migration>& Migrations();

// Brings the database to the newest schema, in one transaction. Checks first that it is one of
// Ringleader's, not newer than this program, and made by the very migrations that this program
// knows (FAILED_PRECONDITION otherwise).
absl::Status Migrate(Connection& connection,
                     const std::vector<Migration>& migrations = Migrations());

}  // namespace ringleader::store
