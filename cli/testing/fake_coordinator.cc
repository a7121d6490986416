#include "cli/testing/fake_coordinator.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/program.h"

namespace ringleader::cli {
namespace {

grpc::Status NotFound(const std::string& name) {
  return {grpc::StatusCode::NOT_FOUND, "there is no " + name};
}
grpc::Status Away() {
  return {grpc::StatusCode::UNAVAILABLE, "connection reset"};
}

}  // namespace

void FakeCoordinator::Start() {
  if (port_ == 0) port_ = testing::FreePort();
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:" + std::to_string(port_), grpc::InsecureServerCredentials());
  builder.RegisterService(static_cast<v1::AccessService::Service*>(this));
  builder.RegisterService(static_cast<v1::JobService::Service*>(this));
  builder.RegisterService(static_cast<v1::LogService::Service*>(this));
  builder.RegisterService(static_cast<v1::NodeService::Service*>(this));
  server_ = builder.BuildAndStart();
  ASSERT_NE(server_, nullptr) << "port " << port_;
}

void FakeCoordinator::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_ = nullptr;
}

grpc::Status FakeCoordinator::Reply(grpc::Status status) {
  if (!refusal.ok()) return refusal;
  if (lose_replies == 0) return status;
  --lose_replies;
  return Away();
}

int FakeCoordinator::NextBreak() {
  if (break_streams_after.empty()) return -1;
  const int after = break_streams_after.front();
  break_streams_after.erase(break_streams_after.begin());
  return after;
}

grpc::Status FakeCoordinator::CreateJob(Context*, const v1::CreateJobRequest* request,
                                        v1::Job* reply) {
  absl::MutexLock lock(&mutex_);
  const std::string name = "jobs/" + request->spec().name();
  const bool is_repeated =
      std::find(request_ids.begin(), request_ids.end(), request->request_id()) != request_ids.end();
  request_ids.push_back(request->request_id());
  if (!is_repeated) {
    if (jobs.contains(name)) {
      return {grpc::StatusCode::ALREADY_EXISTS, name + " exists; choose another name"};
    }
    ++created;
    v1::Job& job = jobs[name];
    job.set_name(name);
    job.set_state(v1::Job::PENDING);
    *job.mutable_spec() = request->spec();
  }
  *reply = jobs[name];
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::GetJob(Context*, const v1::GetJobRequest* request, v1::Job* reply) {
  absl::MutexLock lock(&mutex_);
  if (!jobs.contains(request->name())) return NotFound(request->name());
  *reply = jobs[request->name()];
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::ListJobs(Context*, const v1::ListJobsRequest* request,
                                       v1::ListJobsResponse* reply) {
  absl::MutexLock lock(&mutex_);
  filters.push_back(request->filter());
  // Page tokens are the name to go on with.
  const int page_size = std::min(request->page_size(), 2);
  for (auto at = jobs.lower_bound(request->page_token()); at != jobs.end(); ++at) {
    if (reply->jobs_size() == page_size) {
      reply->set_next_page_token(at->first);
      break;
    }
    *reply->add_jobs() = at->second;
  }
  reply->set_total_size(static_cast<int>(jobs.size()));
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::DeleteJob(Context*, const v1::DeleteJobRequest* request,
                                        google::protobuf::Empty*) {
  absl::MutexLock lock(&mutex_);
  if (jobs.erase(request->name()) == 0) return NotFound(request->name());
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::Move(const std::string& name, const std::string& request_id,
                                   v1::Job::State to, v1::Job* reply) {
  absl::MutexLock lock(&mutex_);
  request_ids.push_back(request_id);
  if (!jobs.contains(name)) return NotFound(name);
  if (jobs[name].state() == v1::Job::SUCCEEDED) {
    return {grpc::StatusCode::FAILED_PRECONDITION, name + " has SUCCEEDED"};
  }
  jobs[name].set_state(to);
  *reply = jobs[name];
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::CancelJob(Context*, const v1::CancelJobRequest* request,
                                        v1::Job* reply) {
  {
    absl::MutexLock lock(&mutex_);
    cancel_requests.push_back(*request);
  }
  return Move(request->name(), request->request_id(), v1::Job::CANCELLING, reply);
}
grpc::Status FakeCoordinator::PauseJob(Context*, const v1::PauseJobRequest* request,
                                       v1::Job* reply) {
  return Move(request->name(), request->request_id(), v1::Job::PAUSING, reply);
}
grpc::Status FakeCoordinator::ResumeJob(Context*, const v1::ResumeJobRequest* request,
                                        v1::Job* reply) {
  return Move(request->name(), request->request_id(), v1::Job::PENDING, reply);
}

grpc::Status FakeCoordinator::ProfileJob(Context*, const v1::ProfileJobRequest* request,
                                         v1::ProfileJobResponse* reply) {
  absl::MutexLock lock(&mutex_);
  request_ids.push_back(request->request_id());
  if (!jobs.contains(request->name())) return NotFound(request->name());
  reply->set_directory("/checkpoints/" + std::to_string(request->steps()));
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::ValidateJob(Context*, const v1::ValidateJobRequest* request,
                                          v1::ValidateJobResponse* reply) {
  absl::MutexLock lock(&mutex_);
  *reply = validation;
  *reply->mutable_spec() = request->spec();
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::WatchJob(Context*, const v1::WatchJobRequest* request,
                                       grpc::ServerWriter<v1::WatchJobResponse>* writer) {
  if (on_watch) on_watch();
  absl::MutexLock lock(&mutex_);
  watch_requests.push_back(*request);
  if (!jobs.contains(request->name())) return NotFound(request->name());
  const int break_after = NextBreak();
  int sent = 0;
  uint64_t step_sequence = 0, eval_sequence = 0;
  for (const v1::WatchJobResponse& scripted : watch) {
    v1::WatchJobResponse response;
    if (scripted.has_job() && scripted.job().revision() > request->after_revision()) {
      *response.mutable_job() = scripted.job();
    }
    for (const v1::StepReport& step : scripted.steps()) {
      if (++step_sequence <= request->after_reports().step_sequence()) continue;
      if (step.step() > request->after_step()) *response.add_steps() = step;
    }
    for (const v1::EvalReport& eval : scripted.evals()) {
      if (++eval_sequence > request->after_reports().eval_sequence()) *response.add_evals() = eval;
    }
    response.mutable_reports()->set_step_sequence(step_sequence);
    response.mutable_reports()->set_eval_sequence(eval_sequence);
    response.set_has_all_reports(&scripted == &watch.back());
    if (!response.has_job() && response.steps().empty() && response.evals().empty()) continue;
    if (sent == break_after) return Away();
    writer->Write(response);
    ++sent;
  }
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::TailLogs(Context*, const v1::TailLogsRequest* request,
                                       grpc::ServerWriter<v1::TailLogsResponse>* writer) {
  absl::MutexLock lock(&mutex_);
  log_requests.push_back(*request);
  const int break_after = NextBreak();
  int sent = 0;
  for (const v1::LogLine& line : log) {
    if (line.offset() <= request->after_offset()) continue;
    if (request->rank() >= 0 && line.rank() != request->rank()) continue;
    if (sent == break_after) return Away();
    v1::TailLogsResponse response;
    response.set_job_uid(log_uid);
    *response.add_lines() = line;
    writer->Write(response);
    ++sent;
  }
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::ListNodes(Context*, const v1::ListNodesRequest*,
                                        v1::ListNodesResponse* reply) {
  absl::MutexLock lock(&mutex_);
  for (const v1::Node& node : nodes) *reply->add_nodes() = node;
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::ListLatency(Context*, const v1::ListLatencyRequest*,
                                          v1::ListLatencyResponse* reply) {
  absl::MutexLock lock(&mutex_);
  *reply = measured;
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::CreateToken(Context*, const v1::CreateTokenRequest* request,
                                          v1::Token* reply) {
  absl::MutexLock lock(&mutex_);
  token_requests.push_back(*request);
  reply->set_name("tokens/" + std::to_string(token_requests.size()));
  reply->set_user(request->user());
  reply->set_role(request->role());
  tokens[reply->name()] = *reply;
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::ListTokens(Context*, const v1::ListTokensRequest*,
                                         v1::ListTokensResponse* reply) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, token] : tokens) *reply->add_tokens() = token;
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::RevokeToken(Context*, const v1::RevokeTokenRequest* request,
                                          v1::Token* reply) {
  absl::MutexLock lock(&mutex_);
  if (!tokens.contains(request->name())) return NotFound(request->name());
  *reply = tokens[request->name()];
  tokens.erase(request->name());
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::ListAuditRecords(Context*, const v1::ListAuditRecordsRequest* request,
                                               v1::ListAuditRecordsResponse* reply) {
  absl::MutexLock lock(&mutex_);
  audit_requests.push_back(*request);
  // Page tokens are the index to go on with.
  size_t next = request->page_token().empty() ? 0 : std::stoul(request->page_token());
  const size_t end = std::min(audit.size(), next + std::min(request->page_size(), 2));
  for (; next < end; ++next) *reply->add_records() = audit[next];
  if (next < audit.size()) reply->set_next_page_token(std::to_string(next));
  return Reply(grpc::Status::OK);
}

grpc::Status FakeCoordinator::SetNode(const std::string& name, v1::Node::State to,
                                      v1::Node* reply) {
  absl::MutexLock lock(&mutex_);
  for (v1::Node& node : nodes) {
    if (node.name() != name) continue;
    node.set_state(to);
    *reply = node;
    return grpc::Status::OK;
  }
  return NotFound(name);
}

grpc::Status FakeCoordinator::DrainNode(Context*, const v1::DrainNodeRequest* request,
                                        v1::Node* reply) {
  return SetNode(request->name(), v1::Node::DRAINING, reply);
}
grpc::Status FakeCoordinator::UndrainNode(Context*, const v1::UndrainNodeRequest* request,
                                          v1::Node* reply) {
  return SetNode(request->name(), v1::Node::READY, reply);
}

}  // namespace ringleader::cli
