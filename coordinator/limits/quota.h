// What one client, and all together, may have of something at the same time, or spend of it over
// time. Who asks for more is refused by name of the limit, with what to do about it.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace ringleader::limits {

// How often each limit was reached, for /metrics. Thread-safe; outlives the quotas.
class LimitMetrics {
 public:
  explicit LimitMetrics(prometheus::Registry* registry);
  // `limit`: the quota's label; `scope`: "client" or "all".
  void Reached(const std::string& limit, const char* scope);

 private:
  prometheus::Family<prometheus::Counter>& reached_;
};

// Who set a limit, and how it reads to those who reach it.
struct LimitName {
  std::string label = {};   // at /metrics, e.g. "calls"
  std::string what = {};    // e.g. "calls at the same time"
  std::string flag = {};    // for all together; that for one client is flag + "-per-client"
  std::string remedy = {};  // e.g. "wait until some have ended"
};

// Things that are held for a while: calls under way, open streams, sessions, bytes. Thread-safe;
// outlives every Hold.
class Quota {
 public:
  Quota(LimitName name, int64_t per_client, int64_t in_all, LimitMetrics* metrics)
      : name_(std::move(name)), per_client_(per_client), in_all_(in_all), metrics_(*metrics) {}

  // Some of these things. Given back when it goes.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept
        : quota_(std::exchange(other.quota_, nullptr)),
          client_(std::move(other.client_)),
          amount_(other.amount_) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(quota_, other.quota_);
      std::swap(client_, other.client_);
      std::swap(amount_, other.amount_);
      return *this;
    }
    ~Hold() {
      if (quota_ != nullptr) quota_->GiveBack(client_, amount_);
    }

   private:
    friend class Quota;
    Hold(Quota* quota, std::string client, int64_t amount)
        : quota_(quota), client_(std::move(client)), amount_(amount) {}
    Quota* quota_ = nullptr;
    std::string client_;
    int64_t amount_ = 0;
  };

  // RESOURCE_EXHAUSTED when the client has its share already, or all together have all there is.
  // The last that is taken may go beyond a share: who has none is never refused for the amount.
  absl::StatusOr<Hold> Take(const std::string& client, int64_t amount = 1)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // RESOURCE_EXHAUSTED when the client has its share already, whatever the others have.
  absl::Status CheckShare(const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of what cannot be refused any more. It counts.
  Hold TakeAnyway(const std::string& client, int64_t amount) ABSL_LOCKS_EXCLUDED(mutex_);
  // By all together, now.
  int64_t taken() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status CheckShareLocked(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(const std::string& client, int64_t amount) ABSL_LOCKS_EXCLUDED(mutex_);

  const LimitName name_;
  const int64_t per_client_;
  const int64_t in_all_;
  LimitMetrics& metrics_;

  mutable absl::Mutex mutex_;
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::string, int64_t> by_client_ ABSL_GUARDED_BY(mutex_);  // none is 0
};

// Bytes that come in over time: each client, and all together, have an allowance that fills up
// again. Thread-safe.
class ByteRate {
 public:
  // What may be spent at once, and how much of it comes back in a second.
  struct Allowance {
    int64_t bytes = 0;
    int64_t bytes_per_second = 0;
  };
  ByteRate(LimitName name, Allowance per_client, Allowance in_all, const Clock* clock,
           LimitMetrics* metrics)
      : name_(std::move(name)),
        per_client_(per_client),
        in_all_(in_all),
        clock_(*clock),
        metrics_(*metrics) {}

  // RESOURCE_EXHAUSTED, with how long to wait, when `bytes` are not there; then none are spent.
  absl::Status Spend(const std::string& client, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  // Clients of whom something is remembered.
  size_t accounts() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Account {
    double spent = 0;  // of the allowance, as of `time`
    absl::Time time;
  };
  // What is spent by now, after what has come back.
  static double Spent(const Account& account, const Allowance& allowance, absl::Time now);
  absl::Status Refuse(const std::string& who, const char* scope, const std::string& flag,
                      int64_t bytes, double missing, const Allowance& allowance) const;

  const LimitName name_;
  const Allowance per_client_;
  const Allowance in_all_;
  const Clock& clock_;
  LimitMetrics& metrics_;

  mutable absl::Mutex mutex_;
  Account all_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Account> by_client_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringleader::limits
