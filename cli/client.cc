#include "cli/client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <limits>
#include <ostream>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/back_off.h"
#include "base/net/channel.h"
#include "base/net/notice.h"
#include "base/net/tls_probe.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "jobspec/fields/text.h"
#include "ringleader/v1/access_service.grpc.pb.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/node_service.grpc.pb.h"

namespace ringleader::cli {
namespace {

// An answer that takes longer is treated like a coordinator that is away.
constexpr int kCallSeconds = 20;
constexpr int kPageSize = 1000;  // of listings, the most that the coordinator gives

bool IsAway(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
}

class GrpcClient : public Client {
 public:
  GrpcClient(const Context& context, const std::shared_ptr<grpc::Channel>& channel)
      : context_(context),
        access_(v1::AccessService::NewStub(channel)),
        jobs_(v1::JobService::NewStub(channel)),
        logs_(v1::LogService::NewStub(channel)),
        nodes_(v1::NodeService::NewStub(channel)) {}

  absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request) override {
    return Write(jobs_.get(), &v1::JobService::Stub::CreateJob, request);
  }
  absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) override {
    return Read(jobs_.get(), &v1::JobService::Stub::GetJob, request);
  }
  absl::Status DeleteJob(const v1::DeleteJobRequest& request) override {
    return Write(jobs_.get(), &v1::JobService::Stub::DeleteJob, request).status();
  }
  absl::StatusOr<v1::Job> CancelJob(const v1::CancelJobRequest& request) override {
    return Write(jobs_.get(), &v1::JobService::Stub::CancelJob, request);
  }
  absl::StatusOr<v1::Job> PauseJob(const v1::PauseJobRequest& request) override {
    return Write(jobs_.get(), &v1::JobService::Stub::PauseJob, request);
  }
  absl::StatusOr<v1::Job> ResumeJob(const v1::ResumeJobRequest& request) override {
    return Write(jobs_.get(), &v1::JobService::Stub::ResumeJob, request);
  }
  absl::StatusOr<v1::ProfileJobResponse> ProfileJob(const v1::ProfileJobRequest& request) override {
    return Write(jobs_.get(), &v1::JobService::Stub::ProfileJob, request);
  }
  absl::StatusOr<v1::ValidateJobResponse> ValidateJob(
      const v1::ValidateJobRequest& request) override {
    return Read(jobs_.get(), &v1::JobService::Stub::ValidateJob, request);
  }
  absl::StatusOr<v1::Node> DrainNode(const v1::DrainNodeRequest& request) override {
    return Write(nodes_.get(), &v1::NodeService::Stub::DrainNode, request);
  }
  absl::StatusOr<v1::Node> UndrainNode(const v1::UndrainNodeRequest& request) override {
    return Write(nodes_.get(), &v1::NodeService::Stub::UndrainNode, request);
  }
  absl::StatusOr<v1::Token> CreateToken(const v1::CreateTokenRequest& request) override {
    return Write(access_.get(), &v1::AccessService::Stub::CreateToken, request);
  }
  absl::StatusOr<v1::Token> RevokeToken(const v1::RevokeTokenRequest& request) override {
    return Write(access_.get(), &v1::AccessService::Stub::RevokeToken, request);
  }

  absl::StatusOr<v1::ListJobsResponse> ListJobs(const std::string& filter, int limit) override {
    v1::ListJobsRequest request;
    request.set_filter(filter);
    return List(jobs_.get(), &v1::JobService::Stub::ListJobs, request,
                &v1::ListJobsResponse::mutable_jobs, limit);
  }
  absl::StatusOr<v1::ListNodesResponse> ListNodes() override {
    return List(nodes_.get(), &v1::NodeService::Stub::ListNodes, v1::ListNodesRequest(),
                &v1::ListNodesResponse::mutable_nodes);
  }
  absl::StatusOr<v1::ListLatencyResponse> ListLatency() override {
    return Read(nodes_.get(), &v1::NodeService::Stub::ListLatency, v1::ListLatencyRequest());
  }
  absl::StatusOr<v1::ListTokensResponse> ListTokens() override {
    return List(access_.get(), &v1::AccessService::Stub::ListTokens, v1::ListTokensRequest(),
                &v1::ListTokensResponse::mutable_tokens);
  }
  absl::StatusOr<v1::ListAuditRecordsResponse> ListAuditRecords(v1::ListAuditRecordsRequest request,
                                                                int limit) override {
    return List(access_.get(), &v1::AccessService::Stub::ListAuditRecords, request,
                &v1::ListAuditRecordsResponse::mutable_records, limit);
  }

  absl::Status WatchJob(
      v1::WatchJobRequest request,
      const std::function<bool(const v1::WatchJobResponse&)>& on_response) override {
    std::string uid;  // of the job that was asked about
    bool wants_more = true;
    const absl::Status status = Follow<v1::WatchJobResponse>(
        [&](grpc::ClientContext* context) { return jobs_->WatchJob(context, request); },
        [&](v1::WatchJobResponse& response) {
          if (response.has_job()) {
            if (uid.empty()) uid = response.job().uid();
            if (response.job().uid() != uid) {
              return absl::NotFoundError(
                  absl::StrCat(request.name(), " was deleted, and another job has its name now (",
                               response.job().uid(), ", not ", uid, ")"));
            }
            request.set_after_revision(response.job().revision());
          }
          if (response.has_reports()) *request.mutable_after_reports() = response.reports();
          if (response.has_all_reports()) request.set_after_step(0);
          wants_more = on_response(response);
          return wants_more ? absl::OkStatus() : absl::CancelledError();
        });
    return wants_more ? status : absl::OkStatus();
  }

  absl::Status TailLogs(
      v1::TailLogsRequest request,
      const std::function<bool(const v1::TailLogsResponse&)>& on_response) override {
    bool wants_more = true;
    const absl::Status status = Follow<v1::TailLogsResponse>(
        [&](grpc::ClientContext* context) { return logs_->TailLogs(context, request); },
        [&](v1::TailLogsResponse& response) {
          if (!response.job_uid().empty()) request.set_job_uid(response.job_uid());
          if (response.lines_size() > 0) {
            // The rest of the log from here on, not its last lines again.
            request.set_after_offset(response.lines(response.lines_size() - 1).offset());
            request.set_attempt(response.lines(0).attempt());
            request.set_last_lines(0);
          }
          if (response.lines_size() > 0 || response.dropped() > 0) {
            wants_more = on_response(response);
          }
          return wants_more ? absl::OkStatus() : absl::CancelledError();
        });
    return wants_more ? status : absl::OkStatus();
  }

 private:
  template <typename Stub, typename Request, typename Response>
  using Method = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Response*);

  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Write(Stub* stub, Method<Stub, Request, Response> method,
                                 const Request& request) {
    return Call(stub, method, request, context_.retry.write_patience);
  }
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Read(Stub* stub, Method<Stub, Request, Response> method,
                                const Request& request) {
    return Call(stub, method, request, context_.retry.read_patience);
  }

  // All pages up to `limit` entries: the last page, with the entries of those before it at its
  // front.
  template <typename Stub, typename Request, typename Response, typename Entry>
  absl::StatusOr<Response> List(Stub* stub, Method<Stub, Request, Response> method, Request request,
                                google::protobuf::RepeatedPtrField<Entry>* (Response::*entries)(),
                                int limit = std::numeric_limits<int>::max()) {
    google::protobuf::RepeatedPtrField<Entry> all;
    while (true) {
      request.set_page_size(std::min(limit - all.size(), kPageSize));
      ASSIGN_OR_RETURN(Response page, Read(stub, method, request));
      std::move((page.*entries)()->begin(), (page.*entries)()->end(),
                google::protobuf::RepeatedFieldBackInserter(&all));
      if (page.next_page_token().empty() || all.size() >= limit) {
        (page.*entries)()->Swap(&all);
        return page;
      }
      request.set_page_token(page.next_page_token());
    }
  }

  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(Stub* stub, Method<Stub, Request, Response> method,
                                const Request& request, absl::Duration patience) {
    const absl::Time give_up = absl::Now() + patience;
    for (uint32_t tries = 1;; ++tries) {
      grpc::ClientContext call;
      const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(kCallSeconds);
      call.set_deadline(deadline);
      Response response;
      const grpc::Status status = (stub->*method)(&call, request, &response);
      SayNotice(call);
      if (status.ok()) {
        SayIsBack();
        return response;
      }
      // Before this side's time is up the coordinator says that something else has taken too long.
      if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED &&
          std::chrono::system_clock::now() < deadline) {
        return absl::DeadlineExceededError(status.error_message());
      }
      RETURN_IF_ERROR(WaitToTryAgain(status, tries, give_up));
    }
  }

  template <typename Response, typename Open, typename OnResponse>
  absl::Status Follow(const Open& open, const OnResponse& on_response) {
    absl::Time give_up = absl::Now() + context_.retry.read_patience;
    for (uint32_t tries = 1;; ++tries) {
      grpc::ClientContext call;
      const auto reader = open(&call);
      Response response;
      while (reader->Read(&response)) {
        SayIsBack();
        give_up = absl::InfiniteFuture();
        tries = 1;
        if (absl::Status wanted = on_response(response); !wanted.ok()) {
          call.TryCancel();
          reader->Finish();
          return wanted;
        }
      }
      const grpc::Status status = reader->Finish();
      if (status.ok()) return absl::OkStatus();
      RETURN_IF_ERROR(WaitToTryAgain(status, tries, give_up));
    }
  }

  // Waits after the `tries`-th failure in a row; returns `status` itself if trying again is no use
  // or too late.
  absl::Status WaitToTryAgain(const grpc::Status& status, uint32_t tries, absl::Time give_up) {
    if (!IsAway(status)) {
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                          status.error_message());
    }
    // Who has answered takes this side's certificate; it is being restarted, or its network is.
    if (tries == 1 && !has_answered_) RETURN_IF_ERROR(CheckTls(context_));
    const absl::Duration delay =
        BackOff(context_.retry.first_delay, context_.retry.longest_delay, tries);
    if (absl::Now() + delay > give_up) return NobodyAnswers(status);
    SayIsAway(status);
    absl::SleepFor(delay);
    return absl::OkStatus();
  }

  absl::Status NobodyAnswers(const grpc::Status& status) const {
    return absl::UnavailableError(
        absl::StrCat("no coordinator answers at ", context_.address, " (",
                     ExplainConnection(status.error_message()),
                     "); start one, or name another with --address or RINGLEADER_ADDRESS"));
  }

  void SayIsAway(const grpc::Status& status) {
    if (said_away_) return;
    said_away_ = true;
    context_.err << "ringctl: the coordinator at " << context_.address << " is away ("
                 << ExplainConnection(status.error_message()) << "); trying again\n"
                 << std::flush;
  }
  // What the coordinator wants people to know, once each.
  void SayNotice(const grpc::ClientContext& call) {
    const auto& metadata = call.GetServerTrailingMetadata();
    const auto found = metadata.find(kNoticeKey);
    if (found == metadata.end()) return;
    std::string notice(found->second.data(), found->second.size());
    if (notice == notice_) return;
    notice_ = std::move(notice);
    context_.err << "ringctl: the coordinator at " << context_.address
                 << " says: " << EscapeControls(notice_) << "\n"
                 << std::flush;
  }
  void SayIsBack() {
    has_answered_ = true;
    if (!said_away_) return;
    said_away_ = false;
    context_.err << "ringctl: the coordinator is back\n" << std::flush;
  }

  const Context& context_;
  std::unique_ptr<v1::AccessService::Stub> access_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::LogService::Stub> logs_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
  bool has_answered_ = false;
  bool said_away_ = false;
  std::string notice_;
};

std::string WithPrefix(const char* prefix, const std::string& id) {
  return absl::StartsWith(id, prefix) ? id : absl::StrCat(prefix, id);
}

}  // namespace

std::string NewRequestId() {
  std::random_device random;
  const auto word = [&] { return static_cast<uint32_t>(random()); };
  const uint32_t a = word(), b = word(), c = word(), d = word();
  // Version 4, variant 1 (RFC 4122).
  return absl::StrFormat("%08x-%04x-4%03x-%04x-%04x%08x", a, b >> 16, b & 0xfff,
                         0x8000 | (c >> 16 & 0x3fff), c & 0xffff, d);
}

absl::Status CheckTls(const Context& context) {
  ASSIGN_OR_RETURN(const Address address, ParseAddress(context.address));
  const std::string mismatch = FindTlsMismatch(context.tls, address);
  if (mismatch.empty()) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("TLS mismatch with the coordinator at ", context.address, ": ", mismatch));
}

std::string JobName(const std::string& id) {
  return WithPrefix("jobs/", id);
}
std::string NodeName(const std::string& id) {
  return WithPrefix("nodes/", id);
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const Context& context) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(context.keepalive.interval)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(context.keepalive.patience)));
  ASSIGN_OR_RETURN(const auto channel,
                   OpenChannel(context.address, context.tls, context.token, arguments));
  return std::make_unique<GrpcClient>(context, channel);
}

}  // namespace ringleader::cli
