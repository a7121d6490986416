// JobService over real gRPC.
#include <google/protobuf/unknown_field_set.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/protocol_version.h"
#include "coordinator/api/testing/server_fixture.h"
#include "coordinator/store/testing/damage.h"

namespace ringleader::api {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Spec;

class JobServiceTest : public testing::ServerTest {};

TEST_F(JobServiceTest, CreatesAndGets) {
  const v1::Job created = Created("a");
  EXPECT_EQ(created.name(), "jobs/a");
  EXPECT_EQ(created.state(), v1::Job::PENDING);
  EXPECT_FALSE(created.uid().empty());
  EXPECT_FALSE(created.etag().empty());
  EXPECT_TRUE(created.spec().training().has_beta1());  // defaults are filled in
  v1::Job job;
  ASSERT_TRUE(Get("jobs/a", &job).ok());
  EXPECT_EQ(job.uid(), created.uid());
  EXPECT_GT(job.create_time().seconds(), 0);

  const grpc::Status missing = Get("jobs/b", &job);
  EXPECT_EQ(missing.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(missing.error_message(), "jobs/b does not exist");
  EXPECT_EQ(Reason(missing), "RESOURCE_NOT_FOUND");
  EXPECT_EQ(Get("b", &job).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Create("a", &job).error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(JobServiceTest, RepeatedRequestGetsTheFirstReply) {
  v1::Job first, again;
  ASSERT_TRUE(Create("a", &first, "request-1").ok());
  ASSERT_TRUE(Create("a", &again, "request-1").ok());
  EXPECT_EQ(again.uid(), first.uid());
  EXPECT_EQ(Create("b", &again, "request-1").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Create("a", &again, "request-2").error_code(), grpc::StatusCode::ALREADY_EXISTS);
  // Also from a coordinator that was started again in between.
  Start({.listen = Loopback(), .check_files = false});
  ASSERT_TRUE(Create("a", &again, "request-1").ok());
  EXPECT_EQ(again.uid(), first.uid());
}

// Before, one record of a job that had ended took the list from everybody.
TEST_F(JobServiceTest, AListHasDamagedJobsByName) {
  for (const char* name : {"a", "b", "c"}) Created(name);
  store::testing::DamageRecord(database_, "jobs", "id = 'b'");
  v1::ListJobsResponse list;
  const grpc::Status status = jobs_->ListJobs(Context().get(), {}, &list);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(list.total_size(), 3);
  std::vector<std::string> names;
  for (const v1::Job& job : list.jobs()) names.push_back(job.name());
  ASSERT_THAT(names, ElementsAre("jobs/c", "jobs/b", "jobs/a"));
  EXPECT_THAT(list.jobs(1).state_reason(), HasSubstr("the record of jobs/b is damaged"));
}

TEST_F(JobServiceTest, RefusesASpecificationThatCannotWork) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("a");
  request.mutable_spec()->mutable_resources()->set_trainers(3);
  v1::Job job;
  const grpc::Status status = jobs_->CreateJob(Context().get(), request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("trainers"));

  v1::ValidateJobRequest validate;
  *validate.mutable_spec() = request.spec();
  v1::ValidateJobResponse response;
  EXPECT_EQ(jobs_->ValidateJob(Context().get(), validate, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  *validate.mutable_spec() = Spec("a");
  ASSERT_TRUE(jobs_->ValidateJob(Context().get(), validate, &response).ok());
  EXPECT_THAT(response.pending_reason(), HasSubstr("4"));
  EXPECT_EQ(Get("jobs/a", &job).error_code(), grpc::StatusCode::NOT_FOUND);  // nothing was created
}

// Before, a job was made, and failed at once for want of a plan.
TEST_F(JobServiceTest, RefusesASpecificationThatTheModelDoesNotGoWith) {
  const std::string config = ::testing::TempDir() + "/two_layers.json";
  std::ofstream(config) << R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256,
      "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320})";
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("a");
  request.mutable_spec()->mutable_model()->set_config(config);
  request.mutable_spec()->mutable_training()->set_precision(v1::TrainingSpec::FP8);
  v1::Job job;
  const grpc::Status status = jobs_->CreateJob(Context().get(), request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(),
              HasSubstr("training.precision: fp8 leaves a model's first and last layer"));
  v1::ValidateJobRequest validate;
  *validate.mutable_spec() = request.spec();
  v1::ValidateJobResponse response;
  EXPECT_EQ(jobs_->ValidateJob(Context().get(), validate, &response).error_message(),
            status.error_message());
  EXPECT_EQ(Get("jobs/a", &job).error_code(), grpc::StatusCode::NOT_FOUND);
  // Of a model that is not to be seen here nothing is known.
  std::filesystem::remove(config);
  const grpc::Status unseen = jobs_->CreateJob(Context().get(), request, &job);
  EXPECT_TRUE(unseen.ok()) << unseen.error_message();
}

TEST_F(JobServiceTest, ListsInPagesAndByFilter) {
  for (const char* name : {"a", "b", "c", "d", "e"}) Created(name);
  v1::Job job;
  ASSERT_TRUE(Cancel("jobs/b", &job).ok());
  v1::ListJobsRequest request;
  request.set_page_size(2);
  std::vector<std::string> names;
  v1::ListJobsResponse response;
  do {
    ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &response).ok());
    EXPECT_EQ(response.total_size(), 5);
    for (const v1::Job& listed : response.jobs()) names.push_back(listed.spec().name());
    request.set_page_token(response.next_page_token());
  } while (!response.next_page_token().empty());
  EXPECT_THAT(names, ElementsAre("e", "d", "c", "b", "a"));

  request.clear_page_token();
  request.set_filter("state=CANCELLED");
  ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &response).ok());
  ASSERT_EQ(response.jobs_size(), 1);
  EXPECT_EQ(response.jobs(0).name(), "jobs/b");

  request.clear_filter();
  ASSERT_TRUE(jobs_->ListJobs(Context().get(), request, &response).ok());
  request.set_page_token(response.next_page_token());
  request.set_filter("state=PENDING");
  const grpc::Status changed = jobs_->ListJobs(Context().get(), request, &response);
  EXPECT_EQ(changed.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(changed.error_message(), HasSubstr("the filter differs"));
}

TEST_F(JobServiceTest, TransitionsCheckStateAndEtag) {
  const v1::Job created = Created("a");
  v1::Job job;
  EXPECT_EQ(Cancel("jobs/a", &job, "stale").error_code(), grpc::StatusCode::ABORTED);
  v1::DeleteJobRequest remove;
  remove.set_name("jobs/a");
  google::protobuf::Empty empty;
  EXPECT_EQ(jobs_->DeleteJob(Context().get(), remove, &empty).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  ASSERT_TRUE(Cancel("jobs/a", &job, created.etag()).ok());
  EXPECT_EQ(job.state(), v1::Job::CANCELLED);
  v1::ResumeJobRequest resume;
  resume.set_name("jobs/a");
  EXPECT_EQ(jobs_->ResumeJob(Context().get(), resume, &job).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(jobs_->DeleteJob(Context().get(), remove, &empty).ok());
  EXPECT_EQ(Get("jobs/a", &job).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(JobServiceTest, PausesAndResumesAJobThatWaits) {
  Created("a");
  v1::Job job;
  v1::PauseJobRequest pause;
  pause.set_name("jobs/a");
  ASSERT_TRUE(jobs_->PauseJob(Context().get(), pause, &job).ok());
  EXPECT_EQ(job.state(), v1::Job::PAUSED);
  v1::ResumeJobRequest resume;
  resume.set_name("jobs/a");
  ASSERT_TRUE(jobs_->ResumeJob(Context().get(), resume, &job).ok());
  EXPECT_EQ(job.state(), v1::Job::PENDING);
}

// A newer ringctl may ask for what this coordinator has no name for: dropping it would train
// something else.
TEST_F(JobServiceTest, ASpecificationWithUnknownFieldsIsRefused) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("newer");
  v1::AttentionSpec& attention = *request.mutable_spec()->mutable_attention();
  attention.GetReflection()->MutableUnknownFields(&attention)->AddVarint(9999, 1);
  v1::Job job;
  const grpc::Status status = jobs_->CreateJob(Context().get(), request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("fields that this coordinator does not know"));
  for (const uint32_t version : {kProtocolVersion - 1, kProtocolVersion + 1}) {
    request.set_protocol_version(version);
    EXPECT_THAT(jobs_->CreateJob(Context().get(), request, &job).error_message(),
                HasSubstr(absl::StrCat("protocol version ", version, ", this coordinator")));
    v1::ValidateJobRequest validate;
    *validate.mutable_spec() = request.spec();
    validate.set_protocol_version(version);
    v1::ValidateJobResponse validated;
    EXPECT_EQ(jobs_->ValidateJob(Context().get(), validate, &validated).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
}

// Whoever speaks the coordinator's version of the protocol knows of no field that could change what
// is trained; what has no name here is neither stored nor sent on.
TEST_F(JobServiceTest, UnknownFieldsOfTheSameProtocolVersionAreDropped) {
  v1::CreateJobRequest request;
  *request.mutable_spec() = Spec("same");
  v1::AttentionSpec& attention = *request.mutable_spec()->mutable_attention();
  const size_t known = request.spec().ByteSizeLong();
  attention.GetReflection()
      ->MutableUnknownFields(&attention)
      ->AddLengthDelimited(9999, std::string(10'000, 'x'));
  request.set_protocol_version(kProtocolVersion);
  v1::Job job;
  const grpc::Status status = jobs_->CreateJob(Context().get(), request, &job);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_TRUE(Get("jobs/same", &job).ok());
  EXPECT_LT(job.spec().ByteSizeLong(), known + 1000);
  v1::JobSpec stripped = job.spec();
  stripped.DiscardUnknownFields();
  EXPECT_EQ(stripped.ByteSizeLong(), job.spec().ByteSizeLong());
}

}  // namespace
}  // namespace ringleader::api
