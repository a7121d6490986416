// A record that changes on the disk.
#pragma once

#include <SQLiteCpp/SQLiteCpp.h>
#include <gtest/gtest.h>

#include <string>

namespace ringleader::store::testing {

// Turns one bit round in the only record of `table` that fits `where`. The store may be open.
inline void DamageRecord(const std::string& database, const std::string& table,
                         const std::string& where = "1") {
  SQLite::Database file(database, SQLite::OPEN_READWRITE, /*aBusyTimeoutMs=*/60'000);
  std::string data = file.execAndGet("SELECT data FROM " + table + " WHERE " + where).getString();
  data.back() ^= 1;
  SQLite::Statement update(file, "UPDATE " + table + " SET data = ? WHERE " + where);
  update.bind(1, data.data(), static_cast<int>(data.size()));
  ASSERT_EQ(update.exec(), 1);
}

}  // namespace ringleader::store::testing
