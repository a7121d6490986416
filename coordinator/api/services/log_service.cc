#include "coordinator/api/services/log_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "proto/states.h"

namespace ringleader::api {
namespace {

constexpr int kLinesPerMessage = 1000;
constexpr uint32_t kMostLastLines = 100000;

absl::Status Validate(const v1::TailLogsRequest& request) {
  if (request.rank() < -1) return absl::InvalidArgumentError("rank: must be a rank, or -1 for all");
  if (request.last_lines() > kMostLastLines) {
    return absl::InvalidArgumentError(
        absl::StrFormat("last_lines: at most %d; use 0 for the whole log", kMostLastLines));
  }
  return absl::OkStatus();
}

class LogTail : public PulledStream<v1::TailLogsResponse> {
 public:
  LogTail(StreamHub* hub, const grpc::CallbackServerContext& context,
          const v1::TailLogsRequest& request)
      : PulledStream(hub, context, "LogService", "TailLogs", request.job()),
        follow_(request.follow()) {
    absl::StatusOr<std::string> id = store::JobIdFromName(request.job());
    absl::Status valid = id.ok() ? Validate(request) : id.status();
    if (id.ok()) query_.job = *id;
    uid_ = request.job_uid();
    query_.attempt = request.attempt();
    query_.rank = request.rank();
    query_.after_offset = request.after_offset();
    query_.limit = kLinesPerMessage;
    query_.last_lines = static_cast<int>(request.last_lines());
    Start(context, query_.job, std::move(valid));
  }

 private:
  absl::StatusOr<Next> Produce(v1::TailLogsResponse* response) override {
    v1::Job job;
    store::LogPage page;
    RETURN_IF_ERROR(store().Read([&](store::ReadTransaction& t) -> absl::Status {
      ASSIGN_OR_RETURN(job, t.GetJob(query_.job));
      if (query_.attempt == 0 && job.attempts_size() > 0) {
        query_.attempt = job.attempts(job.attempts_size() - 1).number();
      }
      if (query_.attempt == 0) return absl::OkStatus();  // none yet
      uint64_t dropped = 0;
      do {  // a page may be full of what the query leaves out
        ASSIGN_OR_RETURN(page, t.ReadLogs(query_));
        dropped += page.dropped;
        query_.after_offset = page.next_offset;
        query_.last_lines = 0;
      } while (page.lines.empty() && page.more);
      page.dropped = dropped;
      return absl::OkStatus();
    }));
    if (uid_.empty()) uid_ = job.uid();
    if (uid_ != job.uid()) return absl::NotFoundError(job.name() + " was deleted");
    // Said once, before there is a line, so that a call that is made again finds the same job.
    const bool says_uid = !std::exchange(said_uid_, true);
    if (says_uid) response->set_job_uid(uid_);
    if (query_.attempt == 0) {
      if (!follow_ || IsTerminal(job.state())) return Next::kEnd;
      return says_uid ? Next::kWrite : Next::kWait;
    }
    const auto attempt =
        std::find_if(job.attempts().begin(), job.attempts().end(),
                     [&](const v1::Attempt& a) { return a.number() == query_.attempt; });
    if (attempt == job.attempts().end()) {
      const uint32_t newest = job.attempts().empty() ? 0 : job.attempts().rbegin()->number();
      return absl::NotFoundError(
          absl::StrFormat("%s has no attempt %d; its newest is %d, and the "
                          "record keeps the last few",
                          job.name(), query_.attempt, newest));
    }
    if (attempt->ranks_size() > 0 && query_.rank >= attempt->ranks_size()) {
      return absl::NotFoundError(
          absl::StrFormat("attempt %d of %s has no rank %d; its ranks are 0 "
                          "to %d",
                          query_.attempt, job.name(), query_.rank, attempt->ranks_size() - 1));
    }
    response->set_dropped(page.dropped);
    for (v1::LogLine& line : page.lines) *response->add_lines() = std::move(line);
    if (response->lines_size() > 0 || response->dropped() > 0) return Next::kWrite;
    if (!follow_ || !IsLive(attempt->state())) return Next::kEnd;
    return says_uid ? Next::kWrite : Next::kWait;
  }

  const bool follow_;
  store::LogQuery query_;
  std::string uid_;
  bool said_uid_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::TailLogsResponse>* LogService::TailLogs(
    grpc::CallbackServerContext* context, const v1::TailLogsRequest* request) {
  return new LogTail(hub_, *context, *request);
}

}  // namespace ringleader::api
