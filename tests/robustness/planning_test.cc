// Job files that were made to stop the coordinator: whatever plans they need and whatever lies in
// the place of their files, they fail alone. All the while two workers train another job, whose
// steps are recorded, and other calls are answered.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "tests/support/coordinator_process.h"
#include "tests/support/fake_worker.h"

namespace ringleader::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kConfig[] = R"({
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 257,
  "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
  "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536})";

class PlanningTest : public ::testing::Test {
 protected:
  // Starts the coordinator, two workers of two trainers, and a job on all four.
  void SetUp() override {
    std::ofstream(coordinator_.File("config.json")) << kConfig;
    std::filesystem::create_directory(coordinator_.File("shards"));
    std::ofstream(coordinator_.File("shards/manifest.json")) << "{}";
    ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
    for (int i = 0; i < 2; ++i) {
      workers_[i] = std::make_unique<FakeWorker>(
          FakeWorkerOptions{.node = absl::StrCat("n", i), .trainers = 2}, coordinator_.Channel());
    }
    ASSERT_TRUE(Eventually([&] { return workers_[0]->welcomed() && workers_[1]->welcomed(); }));
    ASSERT_TRUE(Create(Job("bystander", 4)).ok());
    ASSERT_TRUE(Eventually([&] {
      return workers_[0]->trainers_running() + workers_[1]->trainers_running() == 4;
    })) << coordinator_.log();
    BystanderGoesOn();
  }

  // A job whose files are there.
  v1::JobSpec Job(const std::string& name, uint32_t trainers) {
    v1::JobSpec spec = TestJob(name, trainers, 1'000'000);
    spec.mutable_model()->set_config(coordinator_.File("config.json"));
    spec.mutable_data()->set_train(coordinator_.File("shards"));
    spec.mutable_data()->clear_eval();
    spec.mutable_checkpoint()->set_directory(coordinator_.File("checkpoints-" + name));
    return spec;
  }
  grpc::Status Create(const v1::JobSpec& spec) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = spec;
    v1::Job job;
    return Stub()->CreateJob(CoordinatorProcess::Context().get(), request, &job);
  }
  grpc::Status Validate(const v1::JobSpec& spec) {
    v1::ValidateJobRequest request;
    *request.mutable_spec() = spec;
    v1::ValidateJobResponse response;
    return Stub()->ValidateJob(CoordinatorProcess::Context().get(), request, &response);
  }
  v1::Job Get(const std::string& id) {
    v1::GetJobRequest request;
    request.set_name(absl::StrCat("jobs/", id));
    v1::Job job;
    EXPECT_TRUE(Stub()->GetJob(CoordinatorProcess::Context().get(), request, &job).ok()) << id;
    return job;
  }
  std::unique_ptr<v1::JobService::Stub> Stub() {
    return v1::JobService::NewStub(coordinator_.Channel());
  }

  // The other job completes a step, in the record that users see.
  void BystanderGoesOn() {
    const uint64_t before = Get("bystander").progress().step();
    EXPECT_TRUE(Eventually([&] {
      for (const auto& worker : workers_) worker->Step();
      return Get("bystander").progress().step() > before;
    })) << coordinator_.log();
    EXPECT_TRUE(coordinator_.process().Running()) << coordinator_.log();
  }

  CoordinatorProcess coordinator_{{}, /*check_files=*/true};
  std::unique_ptr<FakeWorker> workers_[2];
};

TEST_F(PlanningTest, ATopKOfEveryBlockIsPlanned) {
  v1::JobSpec spec = Job("hungry", 4);
  spec.mutable_data()->set_sequence_length(4194304);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::BLOCK_TOPK);
  for (const uint32_t blocks : {1000, 4096, 65536}) {
    spec.mutable_attention()->set_topk_blocks(blocks);
    const grpc::Status status = Validate(spec);
    EXPECT_TRUE(status.ok()) << blocks << " " << status.error_message();
  }
  BystanderGoesOn();
}

TEST_F(PlanningTest, ARingBeyondTheBudgetIsRefusedByName) {
  v1::JobSpec spec = Job("wide", 65536);
  spec.mutable_data()->set_sequence_length(uint64_t{65536} * 128);
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::BLOCK_TOPK,
                             v1::AttentionSpec::VERTICAL_SLASH}) {
    spec.mutable_attention()->set_pattern(pattern);
    const grpc::Status status = Validate(spec);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr("65536 ranks in a ring"), HasSubstr("lower parallelism.context")));
  }
  BystanderGoesOn();
}

// Anybody may send as many validations at a time as this.
TEST_F(PlanningTest, ManyValidationsHoldUpNoOtherCall) {
  v1::JobSpec spec = Job("wide", 4096);
  spec.mutable_data()->set_sequence_length(uint64_t{4096} * 128);
  std::atomic<int> answered = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 12; ++i) {
    clients.emplace_back([&] {
      const grpc::Status status = Validate(spec);
      const bool turned_away = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
      EXPECT_TRUE(status.ok() || turned_away) << status.error_message();
      ++answered;
    });
  }
  BystanderGoesOn();
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(answered, 12);
  EXPECT_TRUE(Validate(Job("small", 4)).ok());
}

TEST_F(PlanningTest, WhatLiesInPlaceOfAConfigIsRefusedByName) {
  v1::JobSpec spec = Job("trap", 2);
  const auto refused = [&](const std::string& config) {
    spec.mutable_model()->set_config(config);
    return Create(spec).error_message();
  };
  const std::string pipe = coordinator_.File("pipe"), large = coordinator_.File("large");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(refused(pipe), HasSubstr(pipe));
  EXPECT_THAT(refused("/dev/zero"), HasSubstr("/dev/zero"));
  EXPECT_THAT(refused(coordinator_.File("shards")), HasSubstr(coordinator_.File("shards")));
  std::ofstream file(large);
  std::filesystem::resize_file(large, 1'500'000'000);
  EXPECT_THAT(refused(large), AllOf(HasSubstr(large), HasSubstr("at most 1048576 are allowed")));
  std::ofstream(coordinator_.File("layers.json")) << absl::StrCat(
      R"({"model_type": "qwen2", "vocab_size": 2, "hidden_size": 2, "intermediate_size": 1,)",
      R"("num_hidden_layers": 100000000000, "num_attention_heads": 1, "num_key_value_heads": 1})");
  EXPECT_THAT(refused(coordinator_.File("layers.json")),
              HasSubstr("\"num_hidden_layers\" is 100000000000; at most"));
  BystanderGoesOn();
}

// A file system whose server never answers: its mount is there, and every look at it hangs.
TEST_F(PlanningTest, AHungMountFailsItsCallAndHoldsUpNoOther) {
  const std::string mount_point = coordinator_.File("hung");
  std::filesystem::create_directory(mount_point);
  const int server = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  const std::string options =
      absl::StrCat("fd=", server, ",rootmode=40000,user_id=0,group_id=0,allow_other");
  if (server < 0 || mount("hung", mount_point.c_str(), "fuse", 0, options.c_str()) != 0) {
    GTEST_SKIP() << "mounting a file system needs /dev/fuse and CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] {
    close(server);  // what hangs gets an error now
    umount2(mount_point.c_str(), MNT_DETACH);
  };
  v1::JobSpec spec = Job("hung", 2);
  spec.mutable_model()->set_config(mount_point + "/config.json");
  grpc::Status status;
  std::thread client([&] { status = Create(spec); });
  BystanderGoesOn();
  EXPECT_TRUE(Validate(Job("small", 2)).ok());
  client.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr(mount_point + "/config.json"));
  BystanderGoesOn();
}

TEST_F(PlanningTest, SpecificationsAreCappedInSize) {
  v1::JobSpec spec = Job("large", 2);
  for (int i = 0; i < 1'000'000; ++i) spec.mutable_attention()->add_dense_layers(1'000'000 + i);
  EXPECT_THAT(Create(spec).error_message(),
              AllOf(HasSubstr("at most 1048576 are allowed"), HasSubstr("attention.dense_layers")));
  BystanderGoesOn();
}

// A job whose plan cannot be made fails by name once there is room for it, and those after it run.
TEST_F(PlanningTest, AJobWithoutAPlanFailsAndTheNextOneRuns) {
  v1::JobSpec spec = Job("impossible", 2);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  spec.mutable_attention()->add_dense_layers(99);
  EXPECT_THAT(Create(spec).error_message(), HasSubstr("layer 99 does not exist"))
      << "what no node could change is refused at once";
  spec.mutable_attention()->clear_dense_layers();
  // Of 4.1e12 parameters a trainer has half, and half a TiB of memory.
  std::ofstream(coordinator_.File("vast.json")) << R"({
      "model_type": "qwen2", "vocab_size": 257, "hidden_size": 65536, "intermediate_size": 262144,
      "num_hidden_layers": 60, "num_attention_heads": 512, "num_key_value_heads": 512})";
  spec.mutable_model()->set_config(coordinator_.File("vast.json"));
  const grpc::Status created = Create(spec);
  ASSERT_TRUE(created.ok()) << created.error_message();
  ASSERT_TRUE(Create(Job("next", 2)).ok());
  const FakeWorker third({.node = "n2", .trainers = 2}, coordinator_.Channel());
  EXPECT_TRUE(Eventually([&] { return Get("impossible").state() == v1::Job::FAILED; }));
  EXPECT_THAT(Get("impossible").state_reason(), HasSubstr("no plan: the model does not fit"));
  EXPECT_TRUE(Eventually([&] { return third.trainers_running() == 2; })) << coordinator_.log();
  EXPECT_EQ(Get("next").attempts_size(), 1);
  BystanderGoesOn();
}

}  // namespace
}  // namespace ringleader::testing
