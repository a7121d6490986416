// The coordinator under load, as a process of its own: CPU share, memory, and latency of GetJob and
// ListJobs, idle and with a cluster's worth of workers that report.
//
//   coordinator_bench [--workers 1000] [--jobs 1000] [--running 100] [--seconds 60] [--output FILE]
//
// Idle: all jobs are stored, nobody is connected. Loaded: each worker holds a session over a
// connection of its own and sends a heartbeat every 2 s; each running job has workers / running
// ranks, which together send 10 step reports a second (with 24 layers each), and a line of log a
// second. Queries come one at a time, 50 a second, from this process, which shares the machine's
// cores with the coordinator.
#include <grpcpp/grpcpp.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/process/config.h"
#include "base/process/limits.h"
#include "tests/support/coordinator_process.h"
#include "tests/support/fake_worker.h"

namespace ringleader {
namespace {

using testing::CoordinatorProcess;
using testing::FakeWorker;

constexpr double kReportsPerJobAndSecond = 10;
constexpr absl::Duration kHeartbeatInterval = absl::Seconds(2);
constexpr absl::Duration kQueryInterval = absl::Milliseconds(20);
// One query in so many is a ListJobs.
constexpr int kListEvery = 5;

struct Flags {
  int workers = 1000;
  int jobs = 1000;
  int running = 100;
  int seconds = 60;
  std::string output;
};

[[noreturn]] void Die(const std::string& what) {
  std::cerr << "coordinator_bench: " << what << "\n";
  std::exit(1);
}

struct Latency {
  std::vector<double> milliseconds;

  nlohmann::json Summary() {
    std::sort(milliseconds.begin(), milliseconds.end());
    const auto at = [&](double share) {
      return milliseconds[static_cast<size_t>(share *
                                              static_cast<double>(milliseconds.size() - 1))];
    };
    return {{"calls", milliseconds.size()},
            {"p50_ms", at(0.5)},
            {"p99_ms", at(0.99)},
            {"max_ms", at(1)}};
  }
};

struct Queries {
  Latency get;
  Latency list;
};

template <typename Call>
void Time(Latency* latency, const Call& call) {
  const absl::Time start = absl::Now();
  const grpc::Status status = call();
  latency->milliseconds.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
  if (!status.ok()) Die("query: " + status.error_message());
}

Queries Measure(v1::JobService::Stub& stub, const Flags& flags, absl::Duration duration) {
  Queries queries;
  absl::Time next = absl::Now();
  const absl::Time end = next + duration;
  for (int i = 0; next < end; ++i, next += kQueryInterval) {
    absl::SleepFor(next - absl::Now());
    if (i % kListEvery == 0) {
      v1::ListJobsResponse response;
      Time(&queries.list,
           [&] { return stub.ListJobs(CoordinatorProcess::Context().get(), {}, &response); });
    } else {
      v1::GetJobRequest request;
      request.set_name(absl::StrCat("jobs/j", (i * 7919) % flags.jobs));
      v1::Job job;
      Time(&queries.get,
           [&] { return stub.GetJob(CoordinatorProcess::Context().get(), request, &job); });
    }
  }
  return queries;
}

double CpuSeconds(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  // The times are fields 14 and 15 of the line; they are counted from the end of the program's
  // name, which may hold spaces.
  std::istringstream fields(line.substr(line.rfind(')') + 2));
  std::string skipped;
  for (int i = 3; i < 14; ++i) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double ResidentMebibytes(pid_t pid) {
  double total = 0, resident = 0;
  std::ifstream(absl::StrCat("/proc/", pid, "/statm")) >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// Heartbeats and steps of all workers, each at its own moment within the interval.
class Load {
 public:
  explicit Load(std::vector<std::unique_ptr<FakeWorker>>* workers, double steps_per_second)
      : workers_(*workers),
        thread_([this, steps_per_second] { Run(absl::Seconds(1) / steps_per_second); }) {}
  ~Load() {
    stop_ = true;
    thread_.join();
  }
  uint64_t reports() const { return reports_; }

 private:
  void Run(absl::Duration step_interval) {
    const absl::Time start = absl::Now();
    std::vector<absl::Time> next_heartbeat, next_step;
    const auto count = static_cast<double>(workers_.size());
    for (size_t i = 0; i < workers_.size(); ++i) {
      const double phase = static_cast<double>(i) / count;
      next_heartbeat.push_back(start + phase * kHeartbeatInterval);
      next_step.push_back(start + phase * step_interval);
    }
    while (!stop_) {
      const absl::Time now = absl::Now();
      for (size_t i = 0; i < workers_.size(); ++i) {
        if (now >= next_heartbeat[i]) {
          workers_[i]->Heartbeat();
          next_heartbeat[i] += kHeartbeatInterval;
        }
        if (now >= next_step[i]) {
          reports_ += static_cast<uint64_t>(workers_[i]->Step());
          next_step[i] += step_interval;
        }
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
  }

  std::vector<std::unique_ptr<FakeWorker>>& workers_;
  std::atomic<bool> stop_ = false;
  std::atomic<uint64_t> reports_ = 0;
  std::thread thread_;
};

std::string Line(const std::string& command) {
  std::string text;
  if (FILE* const pipe = popen(command.c_str(), "r")) {
    char buffer[256];
    if (fgets(buffer, sizeof(buffer), pipe) != nullptr) text = buffer;
    pclose(pipe);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string Hardware() {
  const std::string cpu = Line("grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | xargs");
  return absl::StrCat(sysconf(_SC_NPROCESSORS_ONLN), " cores, ", cpu);
}

// `flags.jobs` jobs: the newest `flags.running` stay, the others are cancelled.
void StoreJobs(v1::JobService::Stub& stub, const Flags& flags, uint32_t ranks) {
  for (int i = 0; i < flags.jobs; ++i) {
    v1::CreateJobRequest request;
    *request.mutable_spec() = testing::TestJob(absl::StrCat("j", i), ranks, 1'000'000);
    v1::Job job;
    if (const grpc::Status status =
            stub.CreateJob(CoordinatorProcess::Context().get(), request, &job);
        !status.ok()) {
      Die("CreateJob: " + status.error_message());
    }
    if (i >= flags.jobs - flags.running) continue;
    v1::CancelJobRequest cancel;
    cancel.set_name(job.name());
    if (const grpc::Status status =
            stub.CancelJob(CoordinatorProcess::Context().get(), cancel, &job);
        !status.ok()) {
      Die("CancelJob: " + status.error_message());
    }
  }
}

nlohmann::json Run(const Flags& flags) {
  const auto ranks = static_cast<uint32_t>(flags.workers / flags.running);
  CoordinatorProcess coordinator({"--log-level", "warn"});
  if (!coordinator.Start()) Die("the coordinator does not start:\n" + coordinator.log());
  const pid_t pid = coordinator.process().pid();
  const auto stub = v1::JobService::NewStub(coordinator.Channel());

  std::cerr << "storing " << flags.jobs << " jobs\n";
  StoreJobs(*stub, flags, ranks);
  std::cerr << "idle queries\n";
  Measure(*stub, flags, absl::Seconds(2));  // warms caches
  Queries idle = Measure(*stub, flags, absl::Seconds(flags.seconds) / 3);
  const double idle_memory = ResidentMebibytes(pid);

  std::cerr << "connecting " << flags.workers << " workers\n";
  std::vector<std::unique_ptr<FakeWorker>> workers;
  workers.reserve(flags.workers);
  for (int i = 0; i < flags.workers; ++i) {
    workers.push_back(std::make_unique<FakeWorker>(
        testing::FakeWorkerOptions{.node = absl::StrCat("w", i), .trainers = 1, .layers = 24},
        coordinator.Channel()));
  }
  nlohmann::json result;
  {
    const Load load(&workers, kReportsPerJobAndSecond / ranks);
    const auto running = [&] {
      return std::all_of(workers.begin(), workers.end(),
                         [](const auto& worker) { return worker->trainers_running() == 1; });
    };
    if (!testing::Eventually(running, absl::Minutes(2)))
      Die("the jobs do not start:\n" + coordinator.log());
    std::cerr << "all run; settling, then loaded queries\n";
    absl::SleepFor(absl::Seconds(5));
    const double cpu_before = CpuSeconds(pid);
    const uint64_t reports_before = load.reports();
    const absl::Time start = absl::Now();
    Queries loaded = Measure(*stub, flags, absl::Seconds(flags.seconds));
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    result["loaded"] = {
        {"seconds", seconds},
        {"cpu_cores", (CpuSeconds(pid) - cpu_before) / seconds},
        {"memory_mib", ResidentMebibytes(pid)},
        {"reports_per_second", static_cast<double>(load.reports() - reports_before) / seconds},
        {"get_job", loaded.get.Summary()},
        {"list_jobs", loaded.list.Summary()}};
  }
  // What was reported must have arrived, or the figures speak of a coordinator that fell behind.
  v1::GetJobRequest request;
  request.set_name(absl::StrCat("jobs/j", flags.jobs - 1));
  v1::Job job;
  stub->GetJob(CoordinatorProcess::Context().get(), request, &job);
  result["loaded"]["steps_of_the_last_job"] = job.progress().step();
  result["idle"] = {{"memory_mib", idle_memory},
                    {"get_job", idle.get.Summary()},
                    {"list_jobs", idle.list.Summary()}};
  for (const char* method : {"get_job", "list_jobs"}) {
    result[absl::StrCat(method, "_p99_loaded_over_idle")] =
        result["loaded"][method]["p99_ms"].get<double>() /
        result["idle"][method]["p99_ms"].get<double>();
  }
  return result;
}

}  // namespace

int Main(int argc, char** argv) {
  CLI::App app("The coordinator under load.", "coordinator_bench");
  Flags flags;
  app.add_option("--workers", flags.workers, "simulated workers, one trainer each")
      ->capture_default_str();
  app.add_option("--jobs", flags.jobs, "jobs that are stored")->capture_default_str();
  app.add_option("--running", flags.running, "of which run; must divide --workers")
      ->capture_default_str();
  app.add_option("--seconds", flags.seconds, "of measurement under load")->capture_default_str();
  app.add_option("--output", flags.output, "JSON file; standard output without it");
  if (const std::optional<int> code = ParseArguments(app, argc, argv)) return *code;
  if (flags.running < 1 || flags.jobs < flags.running || flags.workers % flags.running != 0) {
    Die("--running must be at most --jobs and divide --workers");
  }
  RaiseOpenFileLimit();
  nlohmann::ordered_json report;
  report["bench"] = "coordinator_bench";
  report["date"] = absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone());
  report["commit"] = Line("git rev-parse --short HEAD");
  report["hardware"] = Hardware();
  report["command"] =
      absl::StrFormat("coordinator_bench --workers %d --jobs %d --running %d --seconds %d",
                      flags.workers, flags.jobs, flags.running, flags.seconds);
  // The load of the minute before, because other programs' work shows in the latencies.
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  report["load_average"] = load;
  report["result"] = Run(flags);
  const std::string text = report.dump(2) + "\n";
  if (flags.output.empty()) {
    std::cout << text;
  } else if (!(std::ofstream(flags.output) << text)) {
    Die("cannot write " + flags.output);
  }
  return 0;
}

}  // namespace ringleader

int main(int argc, char** argv) {
  return ringleader::Main(argc, argv);
}
