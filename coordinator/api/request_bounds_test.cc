// What a request may take of the coordinator's memory, over real gRPC.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/api/testing/heap.h"
#include "coordinator/api/testing/raw_call.h"
#include "coordinator/api/testing/server_fixture.h"
#include "ringleader/v1/access_service.pb.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::api {
namespace {

using ::testing::AllOf;
using testing::BytesInUse;
using testing::CallRaw;
using ::testing::HasSubstr;
using testing::ServedMethods;

// At least so many bytes of fields that no message has, each of which takes ten times as much once
// it is parsed.
std::string UnknownFields(size_t bytes) {
  std::string fields;
  while (fields.size() < bytes) fields += "\xf8\x07\x01";
  return fields;
}

class RequestBoundsTest : public testing::ServerTest {};

TEST_F(RequestBoundsTest, HoldForEveryMethod) {
  int methods = 0, job_files = 0;
  for (const auto& [path, method] : ServedMethods()) {
    if (method->client_streaming()) continue;  // a worker's, which has bounds of its own
    const std::string& type = method->input_type()->name();
    ++methods;
    if (type == "CreateJobRequest" || type == "ValidateJobRequest") {
      ++job_files;
      const grpc::Status refused = CallRaw(channel_, path, UnknownFields(4'000'000));
      EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << path;
      EXPECT_THAT(refused.error_message(),
                  AllOf(HasSubstr(type), HasSubstr("4000002 bytes"), HasSubstr("33554432")));
      continue;
    }
    const grpc::Status refused = CallRaw(channel_, path, UnknownFields(20'000));
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << path;
    EXPECT_THAT(refused.error_message(),
                AllOf(HasSubstr(type), HasSubstr("20001 bytes"), HasSubstr("16384")));
  }
  EXPECT_EQ(job_files, 2);
  EXPECT_GE(methods, 20);
}

// gRPC keeps a stream's request for as long as the stream is open.
TEST_F(RequestBoundsTest, AWatchHoldsNoLargeRequest) {
  constexpr size_t kWatches = 16, kBytes = size_t{1} << 20;
  Created("a");
  struct Watch {
    std::unique_ptr<grpc::ClientContext> context = Context();
    std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>> stream;
  };
  v1::WatchJobRequest request;
  ASSERT_TRUE(request.ParseFromString(UnknownFields(kBytes)));
  request.set_name("jobs/a");
  std::vector<Watch> watches(kWatches);
  const size_t before = BytesInUse();
  for (Watch& watch : watches) {
    watch.stream = jobs_->WatchJob(watch.context.get(), request);
    v1::WatchJobResponse response;
    EXPECT_FALSE(watch.stream->Read(&response));
  }
  const size_t now = BytesInUse();
  EXPECT_LT(now - std::min(now, before), kWatches * kBytes);
  for (Watch& watch : watches) watch.context->TryCancel();
}

TEST_F(RequestBoundsTest, WhatIsSmallOnTheWireAloneIsRefusedToo) {
  v1::GetJobRequest request;
  ASSERT_TRUE(request.ParseFromString(UnknownFields(2'000)));
  v1::Job job;
  const grpc::Status refused = jobs_->GetJob(Context().get(), request, &job);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(),
              AllOf(HasSubstr("2001 bytes"), HasSubstr("16384"), HasSubstr("does not know")));
  EXPECT_EQ(Metric("ringleader_coordinator_rpc_requests_total"), 1);
}

// A client of a later release may name more than this one knows.
TEST_F(RequestBoundsTest, AFewUnknownFieldsAreTaken) {
  Created("a");
  v1::GetJobRequest request;
  ASSERT_TRUE(request.ParseFromString(UnknownFields(300)));
  request.set_name("jobs/a");
  v1::Job job;
  const grpc::Status got = jobs_->GetJob(Context().get(), request, &job);
  EXPECT_TRUE(got.ok()) << got.error_message();
}

// The longest filter that is read.
TEST_F(RequestBoundsTest, TheLargestRequestFits) {
  v1::ListJobsRequest request;
  request.set_filter("name=" + std::string(4091, 'x'));
  request.set_page_token(std::string(512, 'x'));
  v1::ListJobsResponse page;
  const grpc::Status listed = jobs_->ListJobs(Context().get(), request, &page);
  EXPECT_THAT(listed.error_message(), HasSubstr("page_token"));
}

TEST_F(RequestBoundsTest, WhatIsNoMessageIsRefusedByName) {
  const grpc::Status refused = CallRaw(channel_, "/ringleader.v1.JobService/GetJob", "\x07");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("GetJobRequest"));
}

// gRPC serves these itself.
TEST_F(RequestBoundsTest, HoldForHealthAndReflection) {
  for (const char* path : {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
                           "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    bool is_answered = false;
    CallRaw(channel_, path, UnknownFields(300), &is_answered);
    EXPECT_TRUE(is_answered) << path;
    EXPECT_EQ(CallRaw(channel_, path, UnknownFields(20'000), &is_answered).error_code(),
              grpc::StatusCode::CANCELLED);
    EXPECT_FALSE(is_answered) << path;
  }
}

}  // namespace
}  // namespace ringleader::api
