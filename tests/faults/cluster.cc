#include "tests/faults/cluster.h"

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/support/program.h"

namespace ringleader::faults {
namespace {

namespace fs = std::filesystem;

std::string NewFolder() {
  std::string path = fs::temp_directory_path() / "ringleader-faults-XXXXXX";
  return mkdtemp(path.data());
}

// Flags for the certificate `name` of `certificates`; none without any.
void AppendTlsFlags(const TestCertificates* certificates, const std::string& name,
                    std::vector<std::string>* command) {
  if (certificates == nullptr) return;
  const TlsOptions tls = certificates->Options(name);
  command->insert(command->end(), {"--tls-cert=" + tls.cert_path, "--tls-key=" + tls.key_path,
                                   "--tls-ca=" + tls.ca_path});
}

// Witnesses of workers that ran in `dir` outlive them for as long as nobody listens.
void KillWitnesses(const fs::path& dir) {
  for (const auto& process : fs::directory_iterator("/proc")) {
    std::error_code ignored;
    int pid = 0;
    if (!absl::SimpleAtoi(process.path().filename().string(), &pid)) continue;
    if (fs::read_symlink(process.path() / "cwd", ignored) != dir) continue;
    std::string name;
    std::getline(std::ifstream(process.path() / "comm"), name);
    if (name == "rl-witness") kill(pid, SIGKILL);
  }
}

}  // namespace

Cluster::Cluster()
    : coordinator_flags_({{"--heartbeat", 0.2},
                          {"--lease", 1.5},
                          {"--fence-after", 5},
                          {"--adoption-timeout", 6},
                          {"--retry-backoff", 0.2},
                          {"--blame-window", 0.5},
                          {"--abort-grace", 2},
                          {"--checkpoint-grace", 10}}),
      worker_flags_({{"--pulse-timeout", 10}, {"--drain-timeout", 15}}),
      bin_(fs::read_symlink("/proc/self/exe").parent_path()),
      dir_(NewFolder()),
      port_(testing::FreePort()) {}

Cluster::~Cluster() {
  workers_.clear();
  coordinator_.reset();
  KillWitnesses(dir_);
  std::error_code ignored;
  if (!HasFailure()) fs::remove_all(dir_, ignored);
}

void Cluster::TearDown() {
  for (const std::string& name : submitted_) {
    for (const AuditLine& line : Audit(name)) {
      EXPECT_NE(line.what, "DOUBLE") << "rank " << line.rank << " of " << name << " ran twice";
    }
  }
  if (HasFailure()) std::fprintf(stderr, "output of all processes: %s\n", dir_.c_str());
}

agent::Process Cluster::StartProcess(const std::string& name, std::vector<std::string> command) {
  auto process = agent::Process::Start({.command = std::move(command), .directory = dir_});
  if (!process.ok()) {
    std::fprintf(stderr, "%s\n", std::string(process.status().message()).c_str());
    std::abort();
  }
  auto file = std::make_shared<std::ofstream>(dir_ + "/" + name + ".log", std::ios::app);
  const auto keep = [file](std::vector<std::string> lines, bool) {
    for (const std::string& line : lines) *file << line << std::endl;
  };
  output_.Add(process->TakeStdout(), keep);
  output_.Add(process->TakeStderr(), keep);
  return *std::move(process);
}

void Cluster::RestartCoordinator() {
  const std::string address = absl::StrCat("127.0.0.1:", port_);
  std::vector<std::string> command = {bin_ + "/ringleader-coordinator", "--listen=" + address,
                                      "--data-dir=" + dir_ + "/coordinator", "--metrics-listen=off",
                                      "--check-files=false"};
  AppendTlsFlags(certificates_.get(), "server", &command);
  if (!access_path_.empty()) command.push_back("--access=" + access_path_);
  for (const auto& [flag, seconds] : coordinator_flags_) {
    command.push_back(absl::StrCat(flag, "=", seconds));
  }
  coordinator_ = std::make_unique<agent::Process>(StartProcess("coordinator", std::move(command)));
}

void Cluster::GiveTimeToComeBack() {
  coordinator_flags_["--fence-after"] = 20;
  coordinator_flags_["--adoption-timeout"] = 25;
}

void Cluster::StartCoordinator() {
  RestartCoordinator();
  grpc::ChannelArguments arguments;
  // A connection to one that was killed may not have been seen to end yet.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  const Address address{.host = "127.0.0.1", .port = port_, .path = ""};
  const auto credentials = ChannelCredentials(
      certificates_ == nullptr ? TlsOptions() : certificates_->Options("client"), address);
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  const auto channel = grpc::CreateCustomChannel(FormatAddress(address), *credentials, arguments);
  jobs_ = v1::JobService::NewStub(channel);
  logs_ = v1::LogService::NewStub(channel);
  nodes_ = v1::NodeService::NewStub(channel);
  ASSERT_TRUE(channel->WaitForConnected(
      gpr_time_add(gpr_now(GPR_CLOCK_REALTIME), gpr_time_from_seconds(30, GPR_TIMESPAN))));
}

void Cluster::KillCoordinator() {
  coordinator_.reset();
}

void Cluster::StartWorker(const std::string& name, int trainers, const std::string& coordinator) {
  std::vector<std::string> command = {
      bin_ + "/ringleader-worker",
      "--coordinator=" + (coordinator.empty() ? absl::StrCat("127.0.0.1:", port_) : coordinator),
      "--data-dir=" + dir_ + "/worker-" + name,
      "--name=" + name,
      absl::StrCat("--trainers=", trainers),
      "--trainer=" + bin_ + "/" + trainer_};
  const auto certificate = certificate_of_.find(name);
  AppendTlsFlags(certificates_.get(),
                 certificate == certificate_of_.end() ? "client" : certificate->second, &command);
  for (const std::string& path : allowed_paths_) command.push_back("--allow-path=" + path);
  if (!run_as_.empty()) command.push_back("--run-as=" + run_as_);
  for (const auto& [flag, seconds] : worker_flags_) {
    command.push_back(absl::StrCat(flag, "=", seconds));
  }
  workers_.erase(name);
  workers_.emplace(name, StartProcess("worker-" + name, std::move(command)));
}

// Not the group: what a worker leaves behind is part of the test.
void Cluster::KillWorker(const std::string& name) {
  kill(workers_.at(name).pid(), SIGKILL);
  ASSERT_TRUE(Eventually([&] { return !WorkerRuns(name); }));
}

void Cluster::TerminateWorker(const std::string& name) {
  kill(workers_.at(name).pid(), SIGTERM);
}

bool Cluster::WorkerRuns(const std::string& name) {
  agent::Process& worker = workers_.at(name);
  return worker.pid() > 0 && !worker.Poll();
}

bool Cluster::Runs(int pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');  // the state stands after the name
  return name_end != std::string::npos && text.substr(name_end + 2, 1) != "Z";
}

std::vector<int> Cluster::TrainerPids(const std::string& worker) {
  std::vector<int> pids;
  const std::string process = absl::StrCat("/proc/", workers_.at(worker).pid());
  for (const auto& thread : fs::directory_iterator(process + "/task")) {
    std::ifstream children(thread.path() / "children");
    for (int pid = 0; children >> pid;) pids.push_back(pid);
  }
  std::sort(pids.begin(), pids.end());
  return pids;
}

v1::JobSpec Cluster::Spec(const std::string& name, uint32_t trainers, uint64_t steps,
                          const std::map<std::string, std::string>& labels) const {
  v1::JobSpec spec;
  spec.set_name(name);
  for (const auto& [key, value] : labels) (*spec.mutable_labels())[key] = value;
  spec.mutable_model()->set_config(dir_ + "/config.json");
  spec.mutable_data()->set_train(dir_ + "/train");
  spec.mutable_data()->set_eval(dir_ + "/eval");
  spec.mutable_data()->set_sequence_length(1024);
  spec.mutable_parallelism()->set_context(trainers);
  spec.mutable_parallelism()->set_data(1);
  spec.mutable_training()->set_steps(steps);
  spec.mutable_checkpoint()->set_directory(CheckpointFolder(name));
  spec.mutable_checkpoint()->set_every_steps(5);
  spec.mutable_resources()->set_trainers(trainers);
  return spec;
}

v1::Job Cluster::Submit(const v1::JobSpec& spec) {
  fs::create_directories(spec.checkpoint().directory());
  submitted_.push_back(spec.name());
  v1::CreateJobRequest request;
  *request.mutable_spec() = spec;
  v1::Job job;
  CallContext context;
  const grpc::Status status = jobs_->CreateJob(&context, request, &job);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return job;
}

v1::Job Cluster::Get(const std::string& name) {
  v1::GetJobRequest request;
  request.set_name("jobs/" + name);
  v1::Job job;
  CallContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = jobs_->GetJob(&context, request, &job);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return job;
}

void Cluster::AwaitServing() {
  EXPECT_TRUE(Eventually([&] {
    CallContext context;
    v1::ListNodesResponse response;
    return nodes_->ListNodes(&context, {}, &response).ok();
  }));
}

bool Cluster::Eventually(const std::function<bool()>& done, absl::Duration limit) {
  return testing::Eventually(done, limit);
}

void Cluster::LetGo(const std::string& name) {
  std::ofstream(CheckpointFolder(name) + "/go") << "";
}

v1::Job Cluster::AwaitFailure(const std::string& name, int attempt) {
  return Await(name, [attempt](const v1::Job& job) {
    return job.attempts_size() >= attempt &&
           job.attempts(attempt - 1).state() == v1::Attempt::FAILED;
  });
}

v1::Job Cluster::Await(const std::string& name, const std::function<bool(const v1::Job&)>& done,
                       absl::Duration limit) {
  v1::Job job;
  const bool came = Eventually(
      [&] {
        job = Get(name);
        return HasFailure() || done(job);
      },
      limit);
  EXPECT_TRUE(came) << "waited in vain; the job is\n" << job.DebugString();
  return job;
}

v1::Job Cluster::AwaitState(const std::string& name, v1::Job::State state, absl::Duration limit) {
  return Await(
      name, [state](const v1::Job& job) { return job.state() == state; }, limit);
}

v1::Job Cluster::AwaitStep(const std::string& name, uint64_t step) {
  return Await(name, [step](const v1::Job& job) { return job.progress().step() >= step; });
}

std::vector<v1::StepReport> Cluster::Steps(const std::string& name) {
  v1::WatchJobRequest request;
  request.set_name("jobs/" + name);
  request.set_include_steps(true);
  CallContext context;
  const auto stream = jobs_->WatchJob(&context, request);
  std::map<uint64_t, v1::StepReport> steps;
  v1::WatchJobResponse response;
  while (stream->Read(&response)) {
    for (const v1::StepReport& step : response.steps()) steps[step.step()] = step;
  }
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  std::vector<v1::StepReport> in_order;
  for (const auto& [number, step] : steps) in_order.push_back(step);
  return in_order;
}

std::vector<std::string> Cluster::LogLines(const std::string& name) {
  v1::TailLogsRequest request;
  request.set_job("jobs/" + name);
  request.set_rank(-1);
  CallContext context;
  const auto stream = logs_->TailLogs(&context, request);
  std::vector<std::string> lines;
  v1::TailLogsResponse response;
  while (stream->Read(&response)) {
    for (const v1::LogLine& line : response.lines()) {
      lines.push_back(absl::StrCat(line.attempt(), "/", line.rank(), ": ", line.text()));
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
  return lines;
}

std::vector<AuditLine> Cluster::Audit(const std::string& name) const {
  std::vector<AuditLine> lines;
  std::ifstream file(CheckpointFolder(name) + "/audit");
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text);
    std::string key;
    int64_t milliseconds = 0;
    AuditLine line;
    words >> milliseconds >> line.what >> key >> line.attempt >> key >> line.token >> key >>
        line.rank >> key >> line.pid >> key >> line.step;
    line.time = absl::FromUnixMillis(milliseconds);
    lines.push_back(line);
  }
  return lines;
}

int Cluster::PidOf(const std::string& name, uint32_t rank) const {
  int pid = 0;
  for (const AuditLine& line : Audit(name)) {
    if (line.rank == rank) pid = line.pid;
  }
  return pid;
}

double Cluster::UndisturbedLoss(uint64_t steps) {
  double state = 5;
  for (uint64_t step = 1; step <= steps; ++step) {
    state = 0.9 * state + 1.0 / static_cast<double>(step);
  }
  return state;
}

void Cluster::ExpectUnbrokenRecord(const std::string& name, uint64_t steps) {
  const std::vector<v1::StepReport> record = Steps(name);
  ASSERT_EQ(record.size(), steps);
  for (uint64_t i = 0; i < steps; ++i) {
    EXPECT_EQ(record[i].step(), i + 1);
    EXPECT_NEAR(record[i].loss(), UndisturbedLoss(i + 1), 1e-12);
  }
}

}  // namespace ringleader::faults
