#include "cli/jobs/dry_run.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/protocol_version.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "cli/client.h"
#include "cli/plan_text.h"
#include "cli/printer.h"
#include "coordinator/planner/cost/memory.h"
#include "coordinator/planner/planner.h"
#include "jobspec/fields/text.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/memory_estimate.h"

namespace ringleader::cli {
namespace {

using Notes = std::map<std::string, std::string>;
using v1::ResourcesSpec;

constexpr uint32_t kGpusOfANode = 8;
constexpr double kGiB = 1024.0 * 1024 * 1024;
// The memory of an H200, less what the driver takes.
constexpr double kGpuGiB = 139;

struct Machines {
  uint32_t nodes = 1;
  uint32_t trainers_per_node = 1;
  double trainer_gib = 0;
  std::string text;  // for people
};

// GPUs in nodes of eight; CPU ranks on one node with this machine's memory.
Machines UsualMachines(const ResourcesSpec& resources) {
  Machines machines;
  const uint32_t trainers = std::max(1u, resources.trainers());
  const bool is_cuda = resources.engine() == ResourcesSpec::CUDA;
  machines.nodes = is_cuda ? (trainers + kGpusOfANode - 1) / kGpusOfANode : 1;
  if (resources.max_nodes() > 0) machines.nodes = std::min(machines.nodes, resources.max_nodes());
  machines.trainers_per_node = (trainers + machines.nodes - 1) / machines.nodes;
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  machines.trainer_gib = is_cuda ? kGpuGiB : memory / kGiB / machines.trainers_per_node;
  machines.text = absl::StrFormat("%d node%s of %d %s with %.0f GiB each", machines.nodes,
                                  machines.nodes == 1 ? "" : "s", machines.trainers_per_node,
                                  is_cuda ? "GPUs" : "trainers", machines.trainer_gib);
  return machines;
}

absl::StatusOr<v1::StepPlan> PlanHere(const v1::JobSpec& spec, const model::ModelConfig& model,
                                      const Machines& machines) {
  planner::ClusterShape cluster =
      planner::TypicalCluster(spec.resources().engine(), static_cast<int>(machines.nodes),
                              static_cast<int>(machines.trainers_per_node));
  cluster.threads_per_trainer = std::max(1u, spec.resources().threads());
  if (spec.resources().engine() == ResourcesSpec::CUDA) {
    // No GPU has more. How much hosts and other machines have is not known here.
    cluster.memory_bytes_per_trainer = static_cast<uint64_t>(machines.trainer_gib * kGiB);
  }
  const planner::CostModel cost_model(spec, model, cluster);
  return planner::MakePlan(spec, model, cluster, cost_model);
}

// Notes the trainers' own estimate; they know their memory, and what is left of it.
void AddMemoryNotes(const v1::JobSpec& spec, const model::ModelConfig& model,
                    const Machines& machines, Notes* notes) {
  const bool is_cuda = spec.resources().engine() == ResourcesSpec::CUDA;
  const patterns::IndexMemory choice = planner::ChoiceMemory(spec, model, is_cuda ? 2 : 4);
  model::TrainingShape shape = {
      .ranks = static_cast<int>(spec.resources().trainers()),
      .tokens = static_cast<int64_t>(spec.data().sequence_length() / spec.parallelism().context()),
      .element_bytes = is_cuda ? 2 : 4,
      .ranks_per_node = static_cast<int>(machines.trainers_per_node),
      .device_is_host = !is_cuda,
      .choice_bytes = choice.kept,
      .choice_working_bytes = choice.working,
      .head_ranks = static_cast<int>(jobspec::HeadRanks(spec.parallelism()))};
  const auto trainer = static_cast<int64_t>(machines.trainer_gib * kGiB);
  const model::MemoryLimits limits = {
      .device = is_cuda ? trainer - model::ReservedBytes(trainer) : trainer,
      .host = std::numeric_limits<int64_t>::max()};
  const auto wishes = jobspec::MemoryWishesOf(spec.resources());
  if (!wishes.ok() || !jobspec::SetPrecision(spec, &shape).ok())
    return;  // jobspec::Validate() has refused it
  const auto plan = model::PlanTraining(model, shape, *wishes, limits);
  const std::string with = absl::StrFormat(" where a trainer has %.0f GiB", machines.trainer_gib);
  if (spec.resources().recompute() == ResourcesSpec::RECOMPUTE_UNSPECIFIED) {
    (*notes)["resources.recompute"] = plan.ok()
                                          ? model::DescribeRecompute(model, plan->recompute) + with
                                          : absl::StrCat("nothing fits", with);
  }
  if (is_cuda && spec.resources().offload() == ResourcesSpec::OFFLOAD_UNSPECIFIED && plan.ok()) {
    (*notes)["resources.offload"] =
        plan->recompute.host_layers == 0
            ? "none" + with
            : absl::StrCat("of ", plan->recompute.host_layers, " layers", with);
  }
}

// What stands open in the file, and what it becomes under `plan`.
Notes NotesOf(const v1::JobSpec& spec, const model::ModelConfig& model, const v1::StepPlan& plan,
              const Machines& machines) {
  Notes notes;
  const v1::ParallelismSpec& parallelism = spec.parallelism();
  if (parallelism.layout() == v1::ParallelismSpec::LAYOUT_UNSPECIFIED) {
    notes["parallelism.layout"] = LayoutText(plan);
  } else if (parallelism.layout() == v1::ParallelismSpec::STRIPED && parallelism.stripe() == 0) {
    notes["parallelism.stripe"] = absl::StrCat(plan.stripe());
  }
  if (parallelism.ring() == v1::ParallelismSpec::RING_UNSPECIFIED) {
    notes["parallelism.ring"] = RingText(plan);
  }
  if (spec.resources().engine() == ResourcesSpec::CPU && spec.resources().threads() == 0) {
    notes["resources.threads"] = "a node's cores divided by its trainers";
  }
  if (jobspec::PicksHeads(parallelism)) {
    notes["parallelism.heads"] = absl::StrCat(plan.heads(), " by prediction");
  }
  if (jobspec::PicksHeadGroups(parallelism)) {
    notes["parallelism.head_groups"] = absl::StrCat(plan.head_groups(), " by prediction");
  }
  if (model.known()) AddMemoryNotes(jobspec::PlannedJob(spec, plan), model, machines, &notes);
  return notes;
}

absl::Status CheckNameIsFree(const std::string& name, Client& client) {
  v1::GetJobRequest request;
  request.set_name(JobName(name));
  const absl::StatusOr<v1::Job> job = client.GetJob(request);
  if (absl::IsNotFound(job.status())) return absl::OkStatus();
  RETURN_IF_ERROR(job.status());
  return absl::AlreadyExistsError(
      absl::StrCat(request.name(), " exists already; choose another name, or delete it first"));
}

// Nothing where nobody answers, which is said.
absl::StatusOr<std::optional<v1::ValidateJobResponse>> Ask(Context context,
                                                           const v1::JobSpec& spec) {
  context.retry.read_patience = absl::ZeroDuration();
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  v1::ValidateJobRequest request;
  *request.mutable_spec() = spec;
  request.set_protocol_version(kProtocolVersion);
  absl::StatusOr<v1::ValidateJobResponse> answer = client->ValidateJob(request);
  if (answer.ok()) {
    RETURN_IF_ERROR(CheckNameIsFree(spec.name(), *client));
    return *std::move(answer);
  }
  if (!absl::IsUnavailable(answer.status())) return answer.status();
  context.err << "ringctl: no coordinator answers at " << context.address
              << "; this is what the job file says by itself\n";
  return std::nullopt;
}

}  // namespace

absl::StatusOr<int> DryRun(const Context& context, const CheckedJob& job, bool asks) {
  std::optional<v1::ValidateJobResponse> answer;
  if (asks) {
    ASSIGN_OR_RETURN(answer, Ask(context, job.spec));
  }
  const bool is_asked = answer.has_value();
  v1::ValidateJobResponse result = std::move(answer).value_or(v1::ValidateJobResponse());
  if (!is_asked) *result.mutable_spec() = job.spec;
  jobspec::ApplyDefaults(result.mutable_spec());
  const v1::JobSpec& spec = result.spec();
  const Machines machines = UsualMachines(spec.resources());
  const bool is_planned = result.has_plan();
  if (!is_planned) {
    ASSIGN_OR_RETURN(*result.mutable_plan(), PlanHere(spec, job.model, machines));
  }
  const Notes notes = NotesOf(spec, job.model, result.plan(), machines);
  nlohmann::ordered_json document = ToJson(result);
  document["auto"] = notes;
  PrintJson(context, document, [&](std::ostream& out) {
    out << jobspec::ToCompleteYaml(spec, notes) << "\n";
    WritePlan(out, spec, result.plan(), Columns(context));
    if (!is_planned) {
      out << "planned for " << machines.text << "; ringctl plan takes others\n";
    }
    if (is_asked) {
      out << (result.pending_reason().empty()
                  ? "would start at once"
                  : absl::StrCat("would wait: ", EscapeControls(result.pending_reason())))
          << "\n";
    }
  });
  return kOk;
}

}  // namespace ringleader::cli
