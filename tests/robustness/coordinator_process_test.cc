// The coordinator as a process: killed, stopped, started on a bad database or a taken port, and
// read by Prometheus.
#include "tests/support/coordinator_process.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/protocol_version.h"
#include "ringleader/v1/job_service.grpc.pb.h"
#include "ringleader/v1/log_service.grpc.pb.h"
#include "ringleader/v1/worker_control.grpc.pb.h"
#include "tests/support/fake_worker.h"

namespace ringleader::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CoordinatorProcessTest : public ::testing::Test {
 protected:
  grpc::Status Create(v1::JobService::Stub& stub, const v1::JobSpec& spec,
                      const std::string& request_id, v1::Job* job) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = spec;
    request.set_request_id(request_id);
    return stub.CreateJob(CoordinatorProcess::Context().get(), request, job);
  }
  v1::Job Get(const std::string& id) {
    v1::GetJobRequest request;
    request.set_name(absl::StrCat("jobs/", id));
    v1::Job job;
    v1::JobService::NewStub(coordinator_.Channel())
        ->GetJob(CoordinatorProcess::Context().get(), request, &job);
    return job;
  }
  // Starts the coordinator and expects it to give up; returns what it says.
  std::string Complaint() {
    coordinator_.Spawn();
    EXPECT_EQ(coordinator_.process().Wait(), 1);
    return coordinator_.log();
  }

  CoordinatorProcess coordinator_{{"--reserve-mebibytes", "1"}};
};

// Clients submit as fast as they can while the coordinator is killed and started again. Every job
// that was acknowledged is there afterwards, with the uid that the client was told, and each
// client's request, sent until it was answered, made exactly one job.
TEST_F(CoordinatorProcessTest, KilledWhileJobsAreSubmitted) {
  constexpr int kClients = 4, kJobsEach = 40, kKills = 4;
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  absl::Mutex mu;
  std::map<std::string, std::string> uid_by_job;  // acknowledged
  int retries = 0;
  std::vector<std::thread> clients;
  clients.reserve(kClients);
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      for (int i = 0; i < kJobsEach; ++i) {
        const std::string id = absl::StrCat("c", client, "-", i);
        v1::Job job;
        const absl::Time give_up = absl::Now() + absl::Seconds(120);
        while (true) {
          const auto stub = v1::JobService::NewStub(coordinator_.Channel());
          const grpc::Status status = Create(*stub, TestJob(id, 1, 10), "request-" + id, &job);
          if (status.ok()) break;
          ASSERT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
          ASSERT_LT(absl::Now(), give_up);
          absl::MutexLock lock(&mu);
          ++retries;
        }
        absl::MutexLock lock(&mu);
        uid_by_job[id] = job.uid();
      }
    });
  }
  // Whatever fails below, the clients end before what they refer to: each gives up by itself.
  const auto join = [&] {
    for (std::thread& client : clients) {
      if (client.joinable()) client.join();
    }
  };
  const absl::Cleanup join_at_the_end = join;
  for (int kill = 1; kill <= kKills; ++kill) {
    const size_t enough = static_cast<size_t>(kClients * kJobsEach * kill / (kKills + 1));
    ASSERT_TRUE(Eventually([&] {
      absl::MutexLock lock(&mu);
      return uid_by_job.size() >= enough;
    }));
    coordinator_.process().KillHard();
    ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  }
  join();
  EXPECT_GT(retries, 0);
  ASSERT_EQ(uid_by_job.size(), static_cast<size_t>(kClients * kJobsEach));
  for (const auto& [id, uid] : uid_by_job) EXPECT_EQ(Get(id).uid(), uid) << id;
  v1::ListJobsResponse response;
  const auto stub = v1::JobService::NewStub(coordinator_.Channel());
  ASSERT_TRUE(stub->ListJobs(CoordinatorProcess::Context().get(), {}, &response).ok());
  EXPECT_EQ(response.total_size(), kClients * kJobsEach);
}

TEST_F(CoordinatorProcessTest, SigtermEndsInOrderWithStreamsOpen) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const auto channel = coordinator_.Channel();
  const auto stub = v1::JobService::NewStub(channel);
  v1::Job job;
  ASSERT_TRUE(Create(*stub, TestJob("a", 1, 10), "", &job).ok());
  v1::WatchJobRequest request;
  request.set_name("jobs/a");
  const auto context = CoordinatorProcess::Context();
  const auto stream = stub->WatchJob(context.get(), request);
  v1::WatchJobResponse response;
  ASSERT_TRUE(stream->Read(&response));
  v1::TailLogsRequest tail;
  tail.set_job("jobs/a");
  tail.set_rank(-1);
  tail.set_follow(true);
  const auto tail_context = CoordinatorProcess::Context();
  const auto logs = v1::LogService::NewStub(channel)->TailLogs(tail_context.get(), tail);
  const FakeWorker worker({.node = "n1", .trainers = 0}, coordinator_.Channel());
  ASSERT_TRUE(Eventually([&] { return worker.welcomed(); }));

  coordinator_.process().Signal(SIGTERM);
  EXPECT_EQ(coordinator_.process().Wait(absl::Seconds(30)), 0) << coordinator_.log();
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::TailLogsResponse lines;
  while (logs->Read(&lines)) {
  }
  EXPECT_EQ(logs->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(coordinator_.log(), HasSubstr("stopped"));
}

TEST_F(CoordinatorProcessTest, PortInUse) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const std::vector<std::string> flags = {"--data-dir", coordinator_.File("second"),
                                          "--metrics-listen"};
  std::vector<std::string> same_port = flags;
  same_port.insert(same_port.end(), {"off", "--listen", coordinator_.address()});
  std::vector<std::string> same_metrics = flags;
  same_metrics.insert(same_metrics.end(),
                      {coordinator_.metrics_address(), "--listen", "127.0.0.1:0"});
  for (const auto& arguments : {same_port, same_metrics}) {
    Process second(ProgramPath("ringleader-coordinator"), arguments,
                   coordinator_.File("second.log"));
    EXPECT_EQ(second.Wait(), 1);
    EXPECT_THAT(second.Log(),
                HasSubstr("is in use by another program; stop it or choose another port"));
    std::filesystem::remove(coordinator_.File("second.log"));
  }
}

TEST_F(CoordinatorProcessTest, SecondCoordinatorOnTheSameFolder) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  Process second(
      ProgramPath("ringleader-coordinator"),
      {"--data-dir", coordinator_.data_dir(), "--metrics-listen", "off", "--listen", "127.0.0.1:0"},
      coordinator_.File("second.log"));
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.Log(), HasSubstr("another coordinator uses it"));
}

TEST_F(CoordinatorProcessTest, RefusesOtherAddressesWithoutTls) {
  Process open(
      ProgramPath("ringleader-coordinator"),
      {"--data-dir", coordinator_.data_dir(), "--metrics-listen", "off", "--listen", "0.0.0.0:0"},
      coordinator_.File("open.log"));
  EXPECT_EQ(open.Wait(), 1);
  EXPECT_THAT(open.Log(), HasSubstr("is not a loopback address"));
}

TEST_F(CoordinatorProcessTest, ConfigurationFile) {
  std::ofstream(coordinator_.File("config.yaml"))
      << "listen: " << coordinator_.address() << "\ndata-dir: " << coordinator_.data_dir()
      << "\nmetrics-listen: off\ncheck-files: false\nlease: 30\n";
  {
    Process configured(ProgramPath("ringleader-coordinator"),
                       {"--config", coordinator_.File("config.yaml")},
                       coordinator_.File("configured.log"));
    EXPECT_TRUE(Eventually([&] { return coordinator_.Serving(); })) << configured.Log();
    EXPECT_THAT(configured.Log(), HasSubstr("lease: 30"));
    EXPECT_THAT(configured.Log(), HasSubstr("metrics-listen: off"));
  }
  std::ofstream(coordinator_.File("config.yaml"), std::ios::app) << "lisen: x\n";
  Process mistaken(ProgramPath("ringleader-coordinator"),
                   {"--config", coordinator_.File("config.yaml")},
                   coordinator_.File("mistaken.log"));
  EXPECT_NE(mistaken.Wait().value_or(0), 0);
  EXPECT_THAT(mistaken.Log(), HasSubstr("lisen"));
}

TEST_F(CoordinatorProcessTest, BadDatabasesAreNamed) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  coordinator_.process().Signal(SIGTERM);
  ASSERT_EQ(coordinator_.process().Wait(), 0);
  const std::string path = coordinator_.data_dir() + "/ringleader.db";
  SQLite::Database(path, SQLite::OPEN_READWRITE)
      .exec("INSERT INTO migrations VALUES (999, 'future')");
  EXPECT_THAT(Complaint(), HasSubstr("schema 999 is newer than this program"));
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(100);  // the first page's header
    file << std::string(64, '\xff');
  }
  EXPECT_THAT(Complaint(), HasSubstr(absl::StrCat("database ", path, ": it is damaged")));
  std::filesystem::remove_all(coordinator_.data_dir());
  std::ofstream(coordinator_.data_dir()) << "a file in the folder's place";
  EXPECT_THAT(Complaint(), HasSubstr("--data-dir: cannot create"));
}

TEST_F(CoordinatorProcessTest, AReadOnlyFolderIsNamed) {
  std::filesystem::create_directories(coordinator_.data_dir());
  if (mount("tmpfs", coordinator_.data_dir().c_str(), "tmpfs", 0, "size=4m") != 0) {
    GTEST_SKIP() << "mounting a file system needs CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] { umount(coordinator_.data_dir().c_str()); };
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  coordinator_.process().Signal(SIGTERM);
  ASSERT_EQ(coordinator_.process().Wait(), 0);
  ASSERT_EQ(mount("tmpfs", coordinator_.data_dir().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, ""),
            0);
  EXPECT_THAT(Complaint(), AllOf(HasSubstr(coordinator_.data_dir() + "/ringleader.db"),
                                 HasSubstr("writable for this user")));
}

// A file system of 8 MiB fills up: requests fail and say why, the coordinator stays up with all
// that it acknowledged, says so to whoever looks, and takes requests again once there is space.
TEST_F(CoordinatorProcessTest, FullDisk) {
  std::filesystem::create_directories(coordinator_.data_dir());
  if (mount("tmpfs", coordinator_.data_dir().c_str(), "tmpfs", 0, "size=8m") != 0) {
    GTEST_SKIP() << "mounting a small file system needs CAP_SYS_ADMIN";
  }
  const absl::Cleanup unmount = [&] {
    coordinator_.process().KillHard();
    umount(coordinator_.data_dir().c_str());
  };
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  std::ofstream(coordinator_.data_dir() + "/ballast") << std::string(5 << 20, 'b');
  const auto stub = v1::JobService::NewStub(coordinator_.Channel());
  v1::JobSpec spec = TestJob("j", 1, 10);
  for (int i = 0; i < 30; ++i) {
    (*spec.mutable_labels())[absl::StrCat("label-", i)] = std::string(60, 'x');
  }
  v1::Job job;
  grpc::Status status;
  int created = 0;
  for (; status.ok() && created < 2000; ++created) {
    spec.set_name(absl::StrCat("j", created));
    spec.mutable_checkpoint()->set_directory(absl::StrCat("/job/checkpoints/", spec.name()));
    status = Create(*stub, spec, "", &job);
  }
  --created;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("the disk is full"));
  ASSERT_TRUE(coordinator_.process().Running());
  EXPECT_THAT(coordinator_.Metrics(), HasSubstr("ringleader_coordinator_disk_full 1"));
  EXPECT_THAT(coordinator_.log(), HasSubstr("the disk is full"));
  const std::string ringctl = ProgramPath("ringctl");
  Process list(ringctl, {"--address", coordinator_.address(), "list"},
               coordinator_.File("list.log"));
  EXPECT_EQ(list.Wait(), 0);
  EXPECT_THAT(list.Log(), HasSubstr("says: the disk is full"));
  for (int i = 0; i < created; ++i) EXPECT_FALSE(Get(absl::StrCat("j", i)).uid().empty()) << i;
  EXPECT_TRUE(Get(absl::StrCat("j", created)).uid().empty());
  std::filesystem::remove(coordinator_.data_dir() + "/ballast");
  EXPECT_TRUE(Eventually([&] { return Create(*stub, spec, "", &job).ok(); }));
  EXPECT_THAT(coordinator_.Metrics(), HasSubstr("ringleader_coordinator_disk_full 0"));
}

// Copies taken while others submit end, and a fresh coordinator has all that was acknowledged
// before.
TEST_F(CoordinatorProcessTest, BackedUpUnderLoadAndRestored) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  std::atomic<bool> stop = false;
  std::atomic<int> created = 0;
  std::thread client([&] {
    const auto stub = v1::JobService::NewStub(coordinator_.Channel());
    v1::Job job;
    while (!stop && Create(*stub, TestJob(absl::StrCat("j", created.load()), 1, 10), "", &job).ok())
      ++created;
  });
  const absl::Cleanup join = [&] {
    stop = true;
    if (client.joinable()) client.join();
  };
  ASSERT_TRUE(Eventually([&] { return created > 20; }));
  const int before = created;
  const std::string copy = coordinator_.File("copy.db");
  Process backup(ProgramPath("ringleader-coordinator"),
                 {"--data-dir", coordinator_.data_dir(), "--backup", copy},
                 coordinator_.File("backup.log"));
  ASSERT_EQ(backup.Wait(), 0) << backup.Log();
  ASSERT_TRUE(Eventually([&] { return created > before; }));
  stop = true;
  client.join();

  CoordinatorProcess fresh;
  std::filesystem::create_directory(fresh.data_dir());
  std::filesystem::copy_file(copy, fresh.data_dir() + "/ringleader.db");
  ASSERT_TRUE(fresh.Start()) << fresh.log();
  v1::ListJobsResponse response;
  const auto stub = v1::JobService::NewStub(fresh.Channel());
  ASSERT_TRUE(stub->ListJobs(CoordinatorProcess::Context().get(), {}, &response).ok());
  EXPECT_GE(response.total_size(), before);
  v1::Job job;
  EXPECT_TRUE(Create(*stub, TestJob("new", 1, 10), "", &job).ok());
}

TEST_F(CoordinatorProcessTest, CtrlCOfAWatchSaysThatTheJobGoesOn) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const auto stub = v1::JobService::NewStub(coordinator_.Channel());
  v1::Job job;
  ASSERT_TRUE(Create(*stub, TestJob("tiny", 1, 10), "", &job).ok());
  Process watch(ProgramPath("ringctl"), {"watch", "tiny", "--address", coordinator_.address()},
                coordinator_.File("watch.log"));
  ASSERT_TRUE(Eventually([&] { return watch.Log().find("PENDING") != std::string::npos; }));
  watch.Signal(SIGINT);
  EXPECT_EQ(watch.Wait(), 130);
  EXPECT_THAT(watch.Log(), HasSubstr("tiny goes on; follow it again with: ringctl watch tiny"));
}

// Nobody waits while the file is read for damage; where there is any, the coordinator ends and says
// so.
TEST_F(CoordinatorProcessTest, DamageThatNobodyCameAcrossEndsTheCoordinator) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  coordinator_.process().Signal(SIGTERM);
  ASSERT_EQ(coordinator_.process().Wait(), 0);
  const std::string path = coordinator_.data_dir() + "/ringleader.db";
  {
    // An index that nobody reads at the start.
    SQLite::Database database(path, SQLite::OPEN_READONLY);
    const int page =
        database.execAndGet("SELECT rootpage FROM sqlite_master WHERE name = 'audit_by_resource'")
            .getInt();
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(std::streamoff{4096} * (page - 1));
    file << std::string(4096, '\x7f');
  }
  EXPECT_THAT(Complaint(),
              AllOf(HasSubstr("serving on"), HasSubstr(absl::StrCat(path, ": it is damaged"))));
}

// 400 MB of events, as fast as they can be sent: what cannot be written yet waits with who sends
// it.
TEST_F(CoordinatorProcessTest, ABurstOfEventsRaisesItsMemoryByLittle) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const auto stub = v1::WorkerControl::NewStub(coordinator_.Channel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(5));
  const auto stream = stub->Session(&context);
  v1::WorkerMessage message;
  message.mutable_hello()->set_node("nodes/n1");
  message.mutable_hello()->set_incarnation("folder.process");
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  ASSERT_TRUE(stream->Write(message));
  v1::CoordinatorMessage answer;
  ASSERT_TRUE(stream->Read(&answer));
  const auto resident = [&] {
    std::ifstream file(absl::StrCat("/proc/", coordinator_.process().pid(), "/statm"));
    int64_t total = 0, pages = 0;
    file >> total >> pages;
    return pages * 4096;
  };
  const int64_t before = resident();
  std::atomic<int64_t> most = before;
  std::atomic<bool> done = false;
  std::thread watcher([&] {
    while (!done) {
      most = std::max<int64_t>(most, resident());
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  constexpr uint64_t kMessages = 400;
  std::thread reader([&] {
    while (answer.acknowledged_sequence() < kMessages && stream->Read(&answer)) {
    }
  });
  bool sent = true;
  for (uint64_t i = 1; i <= kMessages && sent; ++i) {
    message.Clear();
    message.set_sequence(i);
    v1::AttemptEvent* const event = message.mutable_event();
    event->set_job("absent");
    event->set_attempt(1);
    event->mutable_logs()->add_lines()->set_text(std::string(1 << 20, 'x'));
    sent = stream->Write(message);
  }
  reader.join();
  done = true;
  watcher.join();
  EXPECT_TRUE(sent);
  EXPECT_EQ(answer.acknowledged_sequence(), kMessages);
  EXPECT_LT(most - before, int64_t{64} << 20);
  context.TryCancel();
}

// A job runs to its end on a worker; /metrics is clean all the while and keeps nothing of it.
TEST_F(CoordinatorProcessTest, MetricsAreCleanAndForgetEndedJobs) {
  ASSERT_TRUE(coordinator_.Start()) << coordinator_.log();
  const auto stub = v1::JobService::NewStub(coordinator_.Channel());
  v1::Job job;
  ASSERT_TRUE(Create(*stub, TestJob("distinctive", 2, 200), "", &job).ok());
  FakeWorker worker({.node = "n1", .trainers = 2}, coordinator_.Channel());
  const auto check = [&](const std::string& when) {
    std::string page = coordinator_.Metrics();
    EXPECT_THAT(page, HasSubstr("ringleader_coordinator_jobs")) << when;
    std::ofstream(coordinator_.File("page")) << page;
    EXPECT_EQ(
        std::system(absl::StrCat("promtool check metrics < ", coordinator_.File("page")).c_str()),
        0)
        << when;
    return page;
  };
  ASSERT_TRUE(Eventually([&] { return worker.trainers_running() == 2; })) << coordinator_.log();
  ASSERT_TRUE(Eventually([&] {
    worker.Step();
    return Get("distinctive").progress().step() >= 2;
  }));
  EXPECT_THAT(check("while it runs"),
              HasSubstr("ringleader_job_completed_steps{job_name=\"distinctive\"} "));
  ASSERT_TRUE(Eventually([&] {
    worker.Step();
    return Get("distinctive").state() == v1::Job::SUCCEEDED;
  })) << Get("distinctive").DebugString();
  const std::string page = check("after it ended");
  EXPECT_THAT(page, Not(HasSubstr("distinctive")));
  EXPECT_THAT(page, HasSubstr("ringleader_coordinator_jobs{state=\"SUCCEEDED\"} 1"));
  EXPECT_THAT(page, HasSubstr("method=\"CreateJob\""));
}

}  // namespace
}  // namespace ringleader::testing
