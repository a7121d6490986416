// A coordinator's page over jobs that never ran: 10,000 of them, one of 1,000,000 steps, and one
// whose texts try to be markup. For tests in a browser, and to look at.
//
//   page_demo FOLDER [PORT]   serves until its standard input ends; its first line says where
#include <prometheus/registry.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/api/server.h"
#include "coordinator/lifecycle/job_controller.h"
#include "coordinator/lifecycle/testing/fixed_plan.h"
#include "coordinator/page/page_server.h"
#include "coordinator/store/sqlite/sqlite_store.h"
#include "proto/timestamps.h"

namespace ringleader::page {
namespace {

using store::WriteTransaction;

constexpr int kJobs = 10'000;
constexpr uint64_t kSteps = 1'000'000;
constexpr uint64_t kDone = 750'000;
constexpr uint64_t kStride = 48;  // between reports, as a coordinator thins them out
constexpr uint32_t kLayers = 36;
constexpr uint32_t kHeads = 16;
constexpr uint64_t kProbeEvery = 16;
constexpr uint32_t kRanks = 16;
constexpr char kLong[] = "qwen3b-512k";
constexpr char kMarkup[] =
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">";

// A wavy line between -1 and 1, the same each time.
double Wave(uint64_t a, uint64_t b) {
  const auto x = static_cast<double>(a), y = static_cast<double>(b);
  return 0.6 * std::sin(x * 0.37 + y * 1.7) + 0.4 * std::sin(x * 28.2 + y * 15.5);
}

void Stamp(absl::Duration ago, google::protobuf::Timestamp* time) {
  SetTime(absl::Now() - ago, time);
}

v1::StepReport StepOf(uint64_t step, bool layers) {
  const double part = static_cast<double>(step) / kSteps;
  const uint64_t slow = step / 5'000;
  v1::StepReport report;
  report.set_step(step);
  report.set_rank(-1);
  report.set_loss(1.9 + 8 * std::exp(-part * 9) + 0.03 * Wave(step, 1));
  report.set_tokens(524'288);
  report.set_step_seconds(8.6 + 0.3 * Wave(step, 2));
  v1::PhaseSeconds& phases = *report.mutable_phases();
  phases.set_data(0.02);
  phases.set_index(0.31);
  phases.set_attention_forward(1.9 + 0.1 * Wave(step, 3));
  phases.set_attention_backward(3.2 + 0.1 * Wave(step, 4));
  phases.set_linear(2.4);
  phases.set_exposed_communication(0.4 + 0.2 * Wave(step, 5));
  phases.set_optimizer(0.3);
  report.set_worker_imbalance(1.02 + 0.015 * Wave(slow, 6));
  report.set_step_imbalance(1.05 + 0.03 * Wave(slow, 7));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    report.add_rank_tiles(static_cast<uint64_t>(1e6 * (1 + 0.02 * Wave(slow, rank))));
  }
  for (uint32_t number = 0; layers && number < kLayers; ++number) {
    v1::LayerReport& layer = *report.add_layers();
    layer.set_layer(number);
    layer.set_density(0.03 + 0.03 * (1 + Wave(number, 1)) + 0.08 * std::exp(-part * 6));
    layer.set_recall(0.985 - 0.02 * (1 + Wave(number, 3)) * (1.2 - part));
    layer.set_probed_recall(layer.recall() - 0.02);
    for (uint32_t head = 0; step % kProbeEvery == 0 && head < kHeads; ++head) {
      layer.add_probed_recall_by_head(
          static_cast<float>(layer.probed_recall() + 0.02 * Wave(number + head, 5)));
    }
    for (uint64_t hop = 0; hop < kRanks; ++hop) {
      layer.add_tiles_per_ring_step(
          static_cast<uint64_t>(10'000 * (1 + 0.05 * Wave(hop, slow / 10))));
    }
  }
  return report;
}

v1::Attempt AttemptOf(uint32_t number, v1::Attempt::State state, absl::Duration ago) {
  v1::Attempt attempt;
  attempt.set_number(number);
  attempt.set_state(state);
  attempt.set_first_step((number - 1) * 300'000);
  attempt.set_last_step(number == 1 ? 300'000 : kDone);
  Stamp(ago, attempt.mutable_create_time());
  for (const uint32_t node : {1, 2}) {
    v1::Placement& placement = *attempt.add_placements();
    placement.set_node(absl::StrCat("nodes/gpu-0", node));
    placement.set_first_rank((node - 1) * 8);
    placement.set_trainers(8);
  }
  v1::StepPlan& plan = *attempt.mutable_plan();
  plan.mutable_ring()->set_kind(v1::ParallelismSpec::HIERARCHICAL);
  plan.mutable_ring()->set_inner(8);
  plan.mutable_ring()->set_outer(2);
  plan.set_layout(v1::ParallelismSpec::STRIPED);
  plan.set_stripe(64);
  plan.mutable_prediction()->set_step_seconds(8.4);
  plan.mutable_prediction()->set_tokens_per_second(62'400);
  plan.mutable_prediction()->set_density(0.052);
  plan.mutable_prediction()->set_worker_imbalance(1.01);
  plan.add_reasons("Stripes of 64 tokens: any set of diagonals falls evenly on 16 ranks.");
  plan.add_reasons("A ring of rings: links between the two nodes are 9 times as slow as inside.");
  return attempt;
}

// What a plan that lives comes to: a change that was missed, one that is in force, a slow rank.
void AddChanges(v1::Attempt* attempt) {
  const uint64_t steps[] = {300'160, 300'320};
  for (const uint64_t step : steps) {
    v1::PlanChange& change = *attempt->add_plan_changes();
    change.set_version(step == steps[0] ? 3 : 4);
    change.set_effective_step(step);
    change.set_state(step == steps[0] ? v1::PlanChange::MISSED : v1::PlanChange::IN_FORCE);
    change.mutable_ring()->set_kind(v1::ParallelismSpec::FLAT);
    change.mutable_ring()->set_inner(16);
    change.mutable_ring()->set_outer(1);
    change.set_layout(v1::ParallelismSpec::STRIPED);
    change.set_stripe(128);
    change.add_reasons("at the densities of the last 32 steps 8.1 s a step, not 8.6 s");
  }
  v1::SlowRank& slow = *attempt->add_slow_ranks();
  slow.set_rank(11);
  slow.set_node("nodes/gpu-02");
  slow.set_ratio(1.18);
  slow.set_step(640'000);
}

v1::Job JobOf(const std::string& id, v1::Job::State state, absl::Duration ago) {
  v1::Job job;
  job.set_name("jobs/" + id);
  job.set_uid("uid-" + id);
  job.set_state(state);
  job.mutable_spec()->set_name(id);
  Stamp(ago, job.mutable_create_time());
  return job;
}

absl::Status AddLongJob(WriteTransaction& t) {
  v1::Job job = JobOf(kLong, v1::Job::RUNNING, absl::Hours(1800));
  job.set_owner("alice");
  job.set_project("ocean");
  job.mutable_spec()->mutable_attention()->set_probe_every(kProbeEvery);
  Stamp(absl::Hours(1799), job.mutable_start_time());
  v1::Progress& progress = *job.mutable_progress();
  progress.set_step(kDone);
  progress.set_total_steps(kSteps);
  progress.set_tokens(kDone * 524'288);
  progress.set_loss(1.9042);
  progress.set_tokens_per_second(60'964);
  progress.set_eta_seconds(2'150'000);
  progress.set_worker_imbalance(1.018);
  progress.set_checkpoint_step(749'000);
  job.mutable_last_eval()->set_loss(1.9511);
  RETURN_IF_ERROR(t.CreateJob(&job));
  v1::Attempt failed = AttemptOf(1, v1::Attempt::FAILED, absl::Hours(1799));
  Stamp(absl::Hours(900), failed.mutable_end_time());
  failed.mutable_failure()->set_rank(11);
  failed.mutable_failure()->set_node("nodes/gpu-02");
  failed.mutable_failure()->set_message("CUDA error: uncorrectable ECC error encountered");
  RETURN_IF_ERROR(t.PutAttempt(kLong, failed));
  v1::Attempt running = AttemptOf(2, v1::Attempt::RUNNING, absl::Hours(899));
  AddChanges(&running);
  RETURN_IF_ERROR(t.PutAttempt(kLong, running));
  for (uint64_t step = 1; step <= kDone; step += kStride) {
    RETURN_IF_ERROR(t.PutMissingStep(kLong, StepOf(step, true)));
  }
  RETURN_IF_ERROR(t.PutMissingStep(kLong, StepOf(kDone, true)));  // it was probed
  for (uint64_t step = 50'000; step <= kDone; step += 50'000) {
    v1::EvalReport eval;
    eval.set_step(step);
    eval.set_loss(StepOf(step, false).loss() + 0.3);
    RETURN_IF_ERROR(t.PutEval(kLong, eval));
  }
  for (const uint64_t step : {747'000, 748'000, 749'000}) {
    v1::CheckpointNotice checkpoint;
    checkpoint.set_step(step);
    RETURN_IF_ERROR(t.PutCheckpoint(kLong, checkpoint));
  }
  std::vector<v1::LogLine> lines(300);
  for (int i = 0; i < 300; ++i) {
    lines[i].set_rank(i % static_cast<int>(kRanks));
    Stamp(absl::Seconds(300 - i), lines[i].mutable_time());
    lines[i].set_is_stderr(i % 40 == 17);
    lines[i].set_text(i % 40 == 17 ? "NCCL WARN socket buffer is small"
                                   : absl::StrCat("step ", 749'700 + i, " loss 1.90", i % 10));
  }
  return t.AppendLogs(kLong, 2, lines);
}

absl::Status AddHostileJob(WriteTransaction& t) {
  v1::Job job = JobOf("hostile", v1::Job::FAILED, absl::Minutes(3));
  (*job.mutable_spec()->mutable_labels())["note"] = kMarkup;
  job.set_state_reason(kMarkup);
  job.set_owner(kMarkup);
  RETURN_IF_ERROR(t.CreateJob(&job));
  v1::Attempt attempt = AttemptOf(1, v1::Attempt::FAILED, absl::Minutes(3));
  attempt.mutable_failure()->set_message(kMarkup);
  attempt.mutable_plan()->add_reasons(kMarkup);
  attempt.add_plan_changes()->add_reasons(kMarkup);
  attempt.add_slow_ranks()->set_node(kMarkup);
  RETURN_IF_ERROR(t.PutAttempt("hostile", attempt));
  v1::StepReport report = StepOf(1, true);
  report.set_loss(std::nan(""));
  RETURN_IF_ERROR(t.PutStep("hostile", report));
  v1::LogLine line;
  line.set_text(kMarkup);
  return t.AppendLogs("hostile", 1, {line});
}

absl::Status AddOtherJobs(WriteTransaction& t) {
  constexpr v1::Job::State kStates[] = {v1::Job::SUCCEEDED, v1::Job::SUCCEEDED, v1::Job::FAILED,
                                        v1::Job::CANCELLED, v1::Job::SUCCEEDED, v1::Job::PAUSED};
  for (int i = 0; i < kJobs - 2; ++i) {
    const bool waits = i > kJobs - 20 && i % 4 == 1;
    v1::Job job = JobOf(absl::StrCat("sweep-", 10'000 + i),
                        waits ? v1::Job::PENDING : kStates[i % 6], absl::Minutes(kJobs - i));
    if (waits) {
      job.set_state_reason(
          "needs 16 trainers with GPUs on at most 2 nodes; 9 free on 3 nodes (1 node draining or "
          "unreachable)");
    }
    job.mutable_progress()->set_step(waits ? 0 : 4'000);
    job.mutable_progress()->set_total_steps(4'000);
    job.mutable_progress()->set_loss(2.0 + 0.001 * (i % 500));
    RETURN_IF_ERROR(t.CreateJob(&job));
  }
  return absl::OkStatus();
}

absl::Status AddNodes(WriteTransaction& t) {
  for (int i = 1; i <= 3; ++i) {
    v1::Node node;
    node.set_name(absl::StrCat("nodes/gpu-0", i));
    node.set_state(v1::Node::READY);
    v1::NodeInventory& inventory = *node.mutable_inventory();
    inventory.set_trainers(i == 2 ? 7 : 8);
    inventory.set_memory_bytes(uint64_t{2048} << 30);
    for (int number = 0; number < 8; ++number) {
      v1::Gpu& gpu = *inventory.add_gpus();
      gpu.set_uuid(absl::StrCat("GPU-", i, "-", number));
      gpu.set_model("NVIDIA H200");
    }
    if (i == 2) inventory.mutable_gpus(3)->set_fault("5 uncorrectable memory errors");
    if (i == 3) inventory.mutable_gpus(0)->set_fault(kMarkup);
    RETURN_IF_ERROR(t.PutNode(node));
  }
  return absl::OkStatus();
}

absl::Status Serve(const std::string& folder, int port) {
  ASSIGN_OR_RETURN(const auto store, store::OpenSqliteStore({.path = folder + "/demo.db"}));
  RETURN_IF_ERROR(store->Write(&AddNodes));
  lifecycle::testing::FixedPlan plans;
  ASSIGN_OR_RETURN(const auto controller, lifecycle::JobController::Create({}, store.get(), &plans,
                                                                           Clock::Real(), nullptr));
  // After the controller has looked: it shall do nothing about them.
  RETURN_IF_ERROR(store->Write([](WriteTransaction& t) -> absl::Status {
    RETURN_IF_ERROR(AddOtherJobs(t));
    RETURN_IF_ERROR(AddHostileJob(t));
    return AddLongJob(t);
  }));
  controller->Start();
  prometheus::Registry registry;
  limits::Limits limits({}, Clock::Real(), &registry);
  session::WorkerControlService workers(controller.get(), Clock::Real(), &limits);
  const Address anywhere{.host = "127.0.0.1", .port = 0, .path = ""};
  ASSIGN_OR_RETURN(const auto server,
                   api::Server::Start({.listen = anywhere, .check_files = false}, controller.get(),
                                      &workers, store.get(), &limits, &registry));
  ASSIGN_OR_RETURN(auto page,
                   PageServer::Start({.listen = {.host = "127.0.0.1", .port = port, .path = ""}},
                                     server->InProcessChannel()));
  std::cout << "http://127.0.0.1:" << page->port() << std::endl;
  for (std::string line; std::getline(std::cin, line);) continue;
  page.reset();
  server->Shutdown();
  controller->Stop();
  return absl::OkStatus();
}

}  // namespace
}  // namespace ringleader::page

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::cerr << "usage: page_demo FOLDER [PORT]\n";
    return 2;
  }
  const absl::Status served = ringleader::page::Serve(argv[1], argc == 3 ? std::atoi(argv[2]) : 0);
  if (!served.ok()) std::cerr << served << "\n";
  return served.ok() ? 0 : 1;
}
