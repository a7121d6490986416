#include "coordinator/limits/quota.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::limits {
namespace {

constexpr const char* kOneClient = "client";
constexpr const char* kAll = "all";

// Clients whose accounts are remembered; those that have everything back are forgotten then.
constexpr size_t kAccountsRemembered = 10'000;

}  // namespace

LimitMetrics::LimitMetrics(prometheus::Registry* registry)
    : reached_(prometheus::BuildCounter()
                   .Name("ringleader_coordinator_limit_reached_total")
                   .Help("Requests that were refused because a limit was reached, by limit, and "
                         "whether it was one client's share or that of all.")
                   .Register(*registry)) {}

void LimitMetrics::Reached(const std::string& limit, const char* scope) {
  reached_.Add({{"limit", limit}, {"scope", scope}}).Increment();
}

absl::Status Quota::CheckShareLocked(const std::string& client) {
  const auto own = by_client_.find(client);
  if (own == by_client_.end() || own->second < per_client_) return absl::OkStatus();
  metrics_.Reached(name_.label, kOneClient);
  return absl::ResourceExhaustedError(
      absl::StrFormat("%s: %s has %d already, the most that one client may have "
                      "(%s-per-client of the coordinator); %s",
                      name_.what, client, per_client_, name_.flag, name_.remedy));
}

absl::Status Quota::CheckShare(const std::string& client) {
  absl::MutexLock lock(&mutex_);
  return CheckShareLocked(client);
}

Quota::Hold Quota::TakeAnyway(const std::string& client, int64_t amount) {
  absl::MutexLock lock(&mutex_);
  taken_ += amount;
  by_client_[client] += amount;
  return Hold(this, client, amount);
}

absl::StatusOr<Quota::Hold> Quota::Take(const std::string& client, int64_t amount) {
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(CheckShareLocked(client));
  if (taken_ >= in_all_) {
    metrics_.Reached(name_.label, kAll);
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: all clients together have %d already, the most that the coordinator takes (%s); %s",
        name_.what, in_all_, name_.flag, name_.remedy));
  }
  taken_ += amount;
  by_client_[client] += amount;
  return Hold(this, client, amount);
}

void Quota::GiveBack(const std::string& client, int64_t amount) {
  absl::MutexLock lock(&mutex_);
  taken_ -= amount;
  const auto own = by_client_.find(client);
  own->second -= amount;
  if (own->second == 0) by_client_.erase(own);
}

int64_t Quota::taken() const {
  absl::MutexLock lock(&mutex_);
  return taken_;
}

double ByteRate::Spent(const Account& account, const Allowance& allowance, absl::Time now) {
  const double back =
      absl::ToDoubleSeconds(now - account.time) * static_cast<double>(allowance.bytes_per_second);
  return std::max(0.0, account.spent - std::max(0.0, back));
}

absl::Status ByteRate::Refuse(const std::string& who, const char* scope, const std::string& flag,
                              int64_t bytes, double missing, const Allowance& allowance) const {
  metrics_.Reached(name_.label, scope);
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: these %d bytes are more than %s may send now (%s of the coordinator: %d at once, %d a "
      "second); %s %.0f s",
      name_.what, bytes, who, flag, allowance.bytes, allowance.bytes_per_second, name_.remedy,
      std::ceil(missing / static_cast<double>(allowance.bytes_per_second))));
}

absl::Status ByteRate::Spend(const std::string& client, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  if (by_client_.size() >= kAccountsRemembered) {
    std::erase_if(by_client_,
                  [&](const auto& entry) { return Spent(entry.second, per_client_, now) <= 0; });
  }
  const auto after = static_cast<double>(bytes);
  const auto own = by_client_.find(client);
  const double own_spent =
      after + (own == by_client_.end() ? 0.0 : Spent(own->second, per_client_, now));
  const double all_spent = after + Spent(all_, in_all_, now);
  if (const double missing = own_spent - static_cast<double>(per_client_.bytes); missing > 0) {
    return Refuse(client, kOneClient, name_.flag + "-per-client", bytes, missing, per_client_);
  }
  if (const double missing = all_spent - static_cast<double>(in_all_.bytes); missing > 0) {
    return Refuse("all clients together", kAll, name_.flag, bytes, missing, in_all_);
  }
  by_client_[client] = {.spent = own_spent, .time = now};
  all_ = {.spent = all_spent, .time = now};
  return absl::OkStatus();
}

size_t ByteRate::accounts() const {
  absl::MutexLock lock(&mutex_);
  return by_client_.size();
}

}  // namespace ringleader::limits
