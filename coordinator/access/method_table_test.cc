// Every method of every service has a row in the table that says who may call it.
#include "coordinator/access/method_table.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ringleader::access {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The methods of all services in the protos of this build.
std::vector<std::string> Paths() {
  google::protobuf::FileDescriptorSet files;
  std::ifstream input(RINGLEADER_DESCRIPTOR, std::ios::binary);
  EXPECT_TRUE(files.ParseFromIstream(&input)) << RINGLEADER_DESCRIPTOR;
  std::vector<std::string> paths;
  for (const auto& file : files.file()) {
    for (const auto& service : file.service()) {
      for (const auto& method : service.method()) {
        paths.push_back(absl::StrCat("/", file.package(), ".", service.name(), "/", method.name()));
      }
    }
  }
  return paths;
}

std::vector<std::string> PathsOpenTo(const Caller& caller) {
  std::vector<std::string> open;
  for (const std::string& path : Paths()) {
    if (CheckMethod(path, caller).ok()) open.push_back(ShortMethod(path));
  }
  return open;
}

Caller As(v1::Role role) {
  return {.role = role, .name = "alice", .credential = "certificate"};
}

TEST(MethodTableTest, EveryMethodHasARow) {
  std::vector<std::string> without;
  const std::vector<std::string> paths = Paths();
  ASSERT_GT(paths.size(), 15u);
  for (const std::string& path : paths) {
    const absl::Status status = CheckMethod(path, LocalCaller());
    if (absl::StrContains(status.message(), "no rule says")) without.push_back(path);
  }
  EXPECT_THAT(without, IsEmpty()) << "give them a row in method_table.cc";
}

TEST(MethodTableTest, AMethodWithoutARowIsRefusedWhoeverCalls) {
  for (const char* path :
       {"/ringleader.v1.JobService/Added", "/x.Y/Z", "", "/", "CreateJob",
        "/ringleader.v1.JobService/createjob", "/ringleader.v1.JobService/CreateJob/"}) {
    for (const Caller& caller : {As(v1::ADMIN), LocalCaller(), Caller()}) {
      EXPECT_EQ(CheckMethod(path, caller).code(), absl::StatusCode::kPermissionDenied) << path;
    }
  }
}

TEST(MethodTableTest, ARoleMayDoWhatTheDocumentationSays) {
  EXPECT_THAT(PathsOpenTo(Caller()), IsEmpty());
  EXPECT_THAT(PathsOpenTo(As(v1::NODE)),
              ElementsAre("WorkerControl.Session", "WorkerControl.ReportDeath"));
  EXPECT_THAT(PathsOpenTo(As(v1::VIEWER)),
              ElementsAre("JobService.GetJob", "JobService.ListJobs", "JobService.GetJobHistory",
                          "JobService.WatchJob", "LogService.TailLogs", "NodeService.ListNodes",
                          "NodeService.ListLatency"));
  EXPECT_THAT(PathsOpenTo(As(v1::USER)),
              ElementsAre("JobService.CreateJob", "JobService.GetJob", "JobService.ListJobs",
                          "JobService.DeleteJob", "JobService.CancelJob", "JobService.PauseJob",
                          "JobService.ResumeJob", "JobService.ProfileJob", "JobService.ValidateJob",
                          "JobService.GetJobHistory", "JobService.WatchJob", "LogService.TailLogs",
                          "NodeService.ListNodes", "NodeService.ListLatency"));
  const std::vector<std::string> admin = PathsOpenTo(As(v1::ADMIN));
  EXPECT_THAT(admin, ::testing::Contains("AccessService.CreateToken"));
  EXPECT_THAT(admin, ::testing::Not(::testing::Contains("WorkerControl.Session")));
  EXPECT_TRUE(CheckMethod("/grpc.health.v1.Health/Check", Caller()).ok());
  EXPECT_FALSE(CheckMethod("/grpc.health.v1.Health/Watch", Caller()).ok());
  EXPECT_TRUE(CheckMethod("/grpc.health.v1.Health/Watch", As(v1::VIEWER)).ok());
}

// Where the coordinator's own handlers ask again, knowing the address, the gate lets any role pass.
TEST(MethodTableTest, BeforeTheHandlerOnlyNobodyAndWhatNoHandlerServesIsRefused) {
  const auto pass = [](const char* path, const Caller& caller) {
    return CheckBeforeHandler(path, caller).ok();
  };
  EXPECT_TRUE(pass("/ringleader.v1.JobService/CreateJob", As(v1::VIEWER)));
  EXPECT_FALSE(pass("/ringleader.v1.JobService/CreateJob", Caller()));
  EXPECT_FALSE(pass("/ringleader.v1.JobService/Added", As(v1::ADMIN)));
  EXPECT_FALSE(pass("/ringleader.v1.PeerExchange/Stream", As(v1::NODE)));
  EXPECT_FALSE(
      pass("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", As(v1::NODE)));
  EXPECT_TRUE(pass("/grpc.health.v1.Health/Check", Caller()));
}

// It goes into the audit log, whoever called it.
TEST(MethodTableTest, ANameOfAnyLengthIsShort) {
  const std::string x(5000, 'x');
  EXPECT_EQ(ShortMethod("/ringleader.v1.JobService/CreateJob"), "JobService.CreateJob");
  for (const std::string& path : {"/a." + x + "/b", "/a.b/" + x, "/a." + x + "/" + x, "/" + x, x}) {
    EXPECT_LE(ShortMethod(path).size(), 201u);
  }
}

TEST(MethodTableTest, RefusalsSayWhoMay) {
  const absl::Status denied = CheckMethod("/ringleader.v1.NodeService/DrainNode", As(v1::VIEWER));
  EXPECT_EQ(denied.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(denied.message(),
            "NodeService.DrainNode: viewer alice may not call it; it is for the roles admin");
  const absl::Status unknown = CheckMethod("/ringleader.v1.JobService/GetJob", Caller());
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("show a certificate or a token"));
}

TEST(CallerTest, JobsAreChangedByTheirOwnerTheirProjectAndAdmins) {
  v1::Job job;
  job.set_name("jobs/a");
  job.set_owner("alice");
  job.set_project("ocean");
  const auto may = [&](v1::Role role, const std::string& name, const std::string& project) {
    return Caller{.role = role, .name = name, .project = project}.MayChange(job).ok();
  };
  EXPECT_TRUE(may(v1::USER, "alice", ""));
  EXPECT_FALSE(may(v1::USER, "alice", "desert"));
  EXPECT_TRUE(may(v1::USER, "bob", "ocean"));
  EXPECT_FALSE(may(v1::USER, "bob", "desert"));
  EXPECT_FALSE(may(v1::USER, "bob", ""));
  EXPECT_FALSE(may(v1::VIEWER, "alice", "ocean"));
  EXPECT_FALSE(may(v1::NODE, "alice", "ocean"));
  EXPECT_TRUE(may(v1::ADMIN, "root", ""));
  EXPECT_TRUE(LocalCaller().MayChange(job).ok());
  // Nobody shares a job that is nobody's by having an empty name and project.
  job.clear_owner();
  job.clear_project();
  EXPECT_FALSE(may(v1::USER, "", ""));
  EXPECT_TRUE(may(v1::ADMIN, "root", ""));
  EXPECT_THAT(std::string(Caller{.role = v1::USER, .name = "bob"}.MayChange(job).message()),
              HasSubstr("jobs/a belongs to nobody: user bob may look at it"));
}

TEST(CallerTest, ANodeSpeaksForItselfAlone) {
  const Caller node = {.role = v1::NODE, .name = "a"};
  EXPECT_TRUE(node.MaySpeakFor("a").ok());
  EXPECT_THAT(std::string(node.MaySpeakFor("b").message()),
              HasSubstr("node a may not speak for nodes/b"));
  EXPECT_FALSE(node.MaySpeakFor("").ok());
  EXPECT_FALSE((Caller{.role = v1::ADMIN, .name = "a"}).MaySpeakFor("a").ok());
  EXPECT_TRUE(LocalCaller().MaySpeakFor("a").ok());
}

}  // namespace
}  // namespace ringleader::access
