#include "coordinator/api/calls/pulled_stream.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <vector>

#include "base/status_macros.h"

namespace ringleader::api {

StreamHub::StreamHub(store::Store* store, Executor* executor, RpcMetrics* metrics,
                     access::Gate* gate, limits::Limits* limits)
    : store_(*store),
      executor_(*executor),
      metrics_(*metrics),
      gate_(*gate),
      limits_(*limits),
      subscription_(store->Subscribe([this](const store::Change& change) { OnChange(change); })) {}

StreamHub::~StreamHub() {
  absl::MutexLock lock(&mu_);
  assert(streams_.empty());
}

absl::StatusOr<limits::Quota::Hold> StreamHub::Add(const std::string& client,
                                                   const std::string& job, Wakeable* stream) {
  absl::MutexLock lock(&mu_);
  if (!ended_.ok()) return ended_;
  ASSIGN_OR_RETURN(limits::Quota::Hold hold, limits_.watches.Take(client));
  streams_.emplace(job, stream);
  return hold;
}

void StreamHub::Remove(const std::string& job, Wakeable* stream) {
  absl::MutexLock lock(&mu_);
  const auto [begin, end] = streams_.equal_range(job);
  const auto found =
      std::find_if(begin, end, [&](const auto& entry) { return entry.second == stream; });
  if (found != end) streams_.erase(found);
}

// The streams' own locks are taken inside the hub's; a stream never calls the hub with its lock
// held.
void StreamHub::EndAll(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  ended_ = status;
  for (const auto& [job, stream] : streams_) stream->End(status);
}

void StreamHub::EndOpen(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  for (const auto& [job, stream] : streams_) stream->End(status);
}

void StreamHub::OnChange(const store::Change& change) {
  absl::MutexLock lock(&mu_);
  if (streams_.empty()) return;
  for (const std::vector<std::string>* jobs : {&change.jobs, &change.logs}) {
    for (const std::string& job : *jobs) {
      const auto [begin, end] = streams_.equal_range(job);
      for (auto entry = begin; entry != end; ++entry) entry->second->Wake();
    }
  }
}

}  // namespace ringleader::api
