#include "coordinator/store/sqlite/integrity_check.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_format.h"

namespace ringleader::store {

absl::Status CheckIntegrity(Connection& connection) {
  return connection.Try([&]() -> absl::Status {
    Cursor check = connection.Query("PRAGMA quick_check(1)");
    if (check.Next() && check.Bytes(0) == "ok") return absl::OkStatus();
    return absl::DataLossError(absl::StrFormat(
        "database %s: it is damaged (%s); restore it from a backup (see docs/operations.md)",
        connection.path(), std::string(check.Bytes(0))));
  });
}

IntegrityCheck::IntegrityCheck(std::string path, std::function<void(const absl::Status&)> on_damage)
    : path_(std::move(path)),
      thread_([this, on_damage = std::move(on_damage)] { Run(on_damage); }) {}

IntegrityCheck::~IntegrityCheck() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (connection_ != nullptr) sqlite3_interrupt(connection_->database().getHandle());
  }
  thread_.join();
}

void IntegrityCheck::Run(const std::function<void(const absl::Status&)>& on_damage) {
  Connection* connection = nullptr;
  std::unique_ptr<Connection> done;
  std::optional<Cursor> under_way;  // ends before its connection
  try {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    connection_ = std::make_unique<Connection>(path_, Connection::Mode::kReadOnly);
    connection = connection_.get();
    // What breaks a connection off is lost while it runs no statement: this one outlasts the check.
    under_way.emplace(connection->Query("SELECT 1"));
    under_way->Next();
  } catch (const SQLite::Exception& error) {
    spdlog::warn("{}", std::string(Connection::Explain(path_, error).message()));
    return;
  }
  const absl::Status status = CheckIntegrity(*connection);
  bool broken_off = false;
  {
    absl::MutexLock lock(&mutex_);
    done = std::move(connection_);
    broken_off = stopping_;
  }
  if (broken_off || status.ok()) return;
  if (absl::IsDataLoss(status)) {
    on_damage(status);
  } else {
    spdlog::warn("looking for damage: {}", std::string(status.message()));
  }
}

}  // namespace ringleader::store
