#include <google/protobuf/util/message_differencer.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/commands/plan_files.h"
#include "cli/plan_text.h"
#include "cli/printer.h"
#include "cli/validators.h"
#include "coordinator/planner/deal/sample_steps.h"
#include "coordinator/planner/planner.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"
#include "jobspec/values/model_spec.h"
#include "model_shape/model_config.h"

namespace ringleader::cli {
namespace {

using google::protobuf::util::MessageDifferencer;

struct Flags {
  std::string file;
  std::vector<std::string> overrides;
  int nodes = 0;  // not said
  int gpus = 0;
  double memory_gib = 0, host_memory_gib = 0;
  double intra_gigabytes = 0;
  double inter_gigabytes = 0;
  patterns::PatternHints measured;
  std::string lengths;
  bool asks_latency = false;    // --from-coordinator
  std::string machine, device;  // --measured, and whose of it
  std::string job;              // --job
  std::string steps;
};

// Predicts steps of samples from their lengths: those of the file or, without one, of the data
// where it can be read here. Returns whose they are, for people; empty if nobody's are known.
absl::StatusOr<std::string> PredictFromLengths(const Flags& flags, const v1::JobSpec& spec,
                                               const model::ModelConfig& model,
                                               const planner::ClusterShape& cluster,
                                               const planner::CostModel& costs,
                                               v1::StepPlan* plan) {
  const bool samples = spec.data().batching() == v1::DataSpec::SAMPLES;
  if (!samples && !flags.lengths.empty()) {
    return absl::InvalidArgumentError(
        "--lengths: goes with data.batching: samples; sequences of the job have "
        "data.sequence_length tokens");
  }
  if (!samples) return "";
  std::vector<uint64_t> lengths;
  std::string whose = flags.lengths;
  if (!flags.lengths.empty()) {
    ASSIGN_OR_RETURN(lengths, ReadLengths(flags.lengths));
  } else {
    const absl::StatusOr<std::vector<uint64_t>> packed = PackedLengths(spec.data());
    if (!packed.ok()) {
      return absl::StrFormat(
          "each sample is taken to have data.sequence_length tokens, for those of data.train are "
          "not known here "
          "(%s); --lengths FILE says how long they are",
          std::string(packed.status().message()));
    }
    lengths = *packed;
    whose = "data.train";
  }
  planner::Pricer pricer(spec, model, cluster, flags.measured);
  ASSIGN_OR_RETURN(*plan->mutable_prediction(),
                   planner::PredictSamples(spec, costs, *plan, lengths, pricer));
  return absl::StrFormat("predicted from %d lengths of %s", lengths.size(), whose);
}

// What a GPU of the kind that the kernels are for has, less what the driver takes.
constexpr double kGpuGiB = 139;

// The job as it would run with `trainers` of them: the context stays where it divides them, and the
// groups multiply. Returns what was changed, for people; empty if nothing.
std::string Scale(int64_t trainers, v1::JobSpec* spec) {
  v1::ParallelismSpec* parallelism = spec->mutable_parallelism();
  if (spec->resources().trainers() == trainers) return "";
  const int64_t before = parallelism->context();
  const int64_t context = before > 0 && trainers % before == 0 ? before : trainers;
  parallelism->set_context(static_cast<uint32_t>(context));
  parallelism->set_data(static_cast<uint32_t>(trainers / context));
  spec->mutable_resources()->set_trainers(static_cast<uint32_t>(trainers));
  const uint32_t groups = parallelism->data();
  const uint32_t batch = (spec->training().global_batch() + groups - 1) / groups * groups;
  spec->mutable_training()->set_global_batch(batch);
  return absl::StrFormat(
      "the job asks for other trainers: planned with context %d × data %d, global_batch %d; "
      "--set parallelism.context=… plans longer rings",
      context, groups, batch);
}

// What the flags say of documents goes with jobs that keep them apart. Stripes of a sequence let a
// pattern choose for all of its documents together, which is not priced.
absl::Status CheckDocuments(const Flags& flags, const v1::JobSpec& spec) {
  const v1::ParallelismSpec::Layout layout = spec.parallelism().layout();
  const bool fits =
      spec.data().document_mask() && (layout == v1::ParallelismSpec::DOCUMENTS ||
                                      (layout == v1::ParallelismSpec::STRIPED &&
                                       spec.attention().pattern() == v1::AttentionSpec::DENSE));
  if (flags.measured.document_tokens.empty() || fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--documents: goes with data.document_mask: true and parallelism.layout: documents, or "
      "striped with attention.pattern: dense; set them, or leave it out");
}

// What is asked of the coordinator: the reports of --job, and the latency table.
struct Asked {
  std::optional<JobReports> reports = {};
  std::optional<v1::ListLatencyResponse> latency = {};
};

absl::StatusOr<Asked> Ask(const Context& context, const Flags& flags) {
  Asked asked;
  // A job's machines are those that the coordinator knows.
  const bool asks_latency =
      flags.asks_latency || (!flags.job.empty() && flags.machine.empty() && flags.gpus == 0);
  if (flags.job.empty() && !asks_latency) return asked;
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  if (!flags.job.empty()) {
    ASSIGN_OR_RETURN(asked.reports, ReadReports(client.get(), flags.job));
  }
  if (asks_latency) {
    ASSIGN_OR_RETURN(asked.latency, client->ListLatency());
    const bool is_empty = asked.latency->tables().empty() && asked.latency->links().empty();
    // Nobody asked for the table by name.
    if (is_empty && !flags.asks_latency) asked.latency.reset();
  }
  return asked;
}

absl::StatusOr<v1::JobSpec> SpecOf(const Flags& flags, const Asked& asked) {
  if (!flags.file.empty()) return jobspec::LoadJobFile(flags.file, flags.overrides);
  if (!asked.reports.has_value()) {
    return absl::InvalidArgumentError(
        "plan: name a job file, or by --job a job of the coordinator");
  }
  return jobspec::ParseJobFile(jobspec::ToYaml(asked.reports->job.spec()),
                               {.overrides = flags.overrides, .file_name = "--job " + flags.job});
}

absl::StatusOr<model::ModelConfig> ModelOf(const v1::JobSpec& spec, const Asked& asked) {
  if (asked.reports.has_value()) {
    const v1::Job& job = asked.reports->job;
    const model::ModelConfig kept = jobspec::ModelOf(job.model_shape());
    if (kept.known() && MessageDifferencer::Equals(job.spec().model(), spec.model())) return kept;
  }
  return model::LoadModelConfig(jobspec::ModelConfigPath(spec.model()));
}

// Those of the job's newest attempt, unless the command line says how many there are.
int NodesOf(const Flags& flags, const Asked& asked) {
  if (flags.nodes > 0) return flags.nodes;
  if (!asked.reports.has_value() || asked.reports->job.attempts().empty()) return 1;
  return std::max(1, asked.reports->job.attempts().rbegin()->placements_size());
}

// Where the job's reports measured what its layers visit, plans go by it. Returns what was taken,
// for people.
absl::StatusOr<std::string> UseReports(const v1::JobSpec& spec, const JobReports& reports,
                                       Flags* flags) {
  patterns::PatternHints& hints = flags->measured;
  const bool is_given = hints.density > 0 || hints.slashes > 0 || hints.verticals > 0;
  if (is_given) return "";
  if (spec.attention().pattern() != reports.job.spec().attention().pattern()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--job %s: its attention.pattern is another one than the plan's, so that its reports do "
        "not say what that visits; leave --job out, or give --density",
        flags->job));
  }
  if (reports.hints == patterns::PatternHints()) {
    return absl::StrFormat("the reports of %s say nothing of what its pattern visits: it is %s",
                           flags->job,
                           reports.step_seconds.empty() ? "assumed" : "known without them");
  }
  hints.density = reports.hints.density;
  hints.slashes = reports.hints.slashes;
  hints.verticals = reports.hints.verticals;
  return absl::StrFormat(
      "%s as its newest reports have it: sparse layers visit %.4g %% of the "
      "causal tiles",
      flags->job, 100 * hints.density);
}

absl::StatusOr<int> Plan(const Context& context, Flags flags) {
  ASSIGN_OR_RETURN(const Asked asked, Ask(context, flags));
  flags.nodes = NodesOf(flags, asked);
  ASSIGN_OR_RETURN(v1::JobSpec spec, SpecOf(flags, asked));
  // A plan for another cluster may change the trainers alone, so that is not a mistake here.
  const bool is_scaled = flags.gpus > 0;
  if (is_scaled) spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  jobspec::ApplyDefaults(&spec);
  std::string note;
  if (is_scaled) note = Scale(int64_t{flags.nodes} * flags.gpus, &spec);
  const absl::StatusOr<model::ModelConfig> config = ModelOf(spec, asked);
  const model::ModelConfig model = config.value_or(model::ModelConfig());
  RETURN_IF_ERROR(jobspec::Validate(spec, model));
  RETURN_IF_ERROR(CheckDocuments(flags, spec));
  RETURN_IF_ERROR(config.status());
  std::string visited;
  if (asked.reports.has_value()) {
    ASSIGN_OR_RETURN(visited, UseReports(spec, *asked.reports, &flags));
  }

  const int trainers = static_cast<int>(spec.resources().trainers());
  const int per_node = is_scaled ? flags.gpus : (trainers + flags.nodes - 1) / flags.nodes;
  planner::ClusterShape cluster =
      planner::TypicalCluster(spec.resources().engine(), flags.nodes, per_node);
  cluster.threads_per_trainer = std::max(1u, spec.resources().threads());
  const double memory = flags.memory_gib > 0 ? flags.memory_gib : is_scaled ? kGpuGiB : 0;
  cluster.memory_bytes_per_trainer = static_cast<uint64_t>(memory * 1024 * 1024 * 1024);
  cluster.host_memory_bytes_per_trainer =
      static_cast<uint64_t>(flags.host_memory_gib * 1024 * 1024 * 1024);
  MeasuredMachine machine;
  if (!flags.machine.empty()) {
    ASSIGN_OR_RETURN(const v1::ListLatencyResponse measured, ReadMeasured(flags.machine));
    ASSIGN_OR_RETURN(machine, UseMeasured(measured, "--measured " + flags.machine, flags.device,
                                          spec, model, &cluster));
  } else if (asked.latency.has_value()) {
    ASSIGN_OR_RETURN(machine, UseMeasured(*asked.latency, "the coordinator's latency table",
                                          flags.device, spec, model, &cluster));
  }
  if (flags.intra_gigabytes > 0) cluster.intra_node.bytes_per_second = flags.intra_gigabytes * 1e9;
  if (flags.inter_gigabytes > 0) cluster.inter_node.bytes_per_second = flags.inter_gigabytes * 1e9;

  const planner::CostModel cost_model(spec, model, cluster, machine.table);
  ASSIGN_OR_RETURN(v1::StepPlan plan,
                   planner::MakePlan(spec, model, cluster, cost_model, flags.measured));
  ASSIGN_OR_RETURN(const std::string basis,
                   PredictFromLengths(flags, jobspec::PlannedJob(spec, plan), model, cluster,
                                      cost_model, &plan));
  std::string compared;
  if (!flags.steps.empty()) {
    ASSIGN_OR_RETURN(std::vector<double> steps, ReadStepSeconds(flags.steps));
    compared = CompareSteps(std::move(steps), plan.prediction().step_seconds());
  } else if (asked.reports.has_value() && !asked.reports->step_seconds.empty() &&
             MessageDifferencer::Equals(spec, asked.reports->job.spec())) {
    compared = CompareSteps(asked.reports->step_seconds, plan.prediction().step_seconds());
  }
  if (asked.reports.has_value() && asked.reports->probe.has_value() && !visited.empty()) {
    *plan.mutable_prediction()->mutable_probed_recall() = *asked.reports->probe;
  }
  Print(context, plan, [&](std::ostream& out) {
    out << absl::StrFormat("%s on %d node%s × %d %s: context %d × data %d, %s tokens a sequence\n",
                           spec.name(), flags.nodes, flags.nodes == 1 ? "" : "s", per_node,
                           is_scaled ? "GPUs" : "trainers", spec.parallelism().context(),
                           spec.parallelism().data(),
                           FormatCount(static_cast<double>(spec.data().sequence_length())));
    WritePlan(out, spec, plan, Columns(context));
  });
  for (const std::string& text : {machine.text, visited, basis, note, compared}) {
    if (!text.empty()) context.err << "ringctl: " << text << "\n";
  }
  return kOk;
}

}  // namespace

void AddPlanCommand(CLI::App& app, Context* context) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("plan", "predict a job's steps, on machines that need not exist");
  command->add_option("file", flags->file, "job.yaml (with --job, the job's own without it)");
  command->add_option("--set", flags->overrides, "path=value: override a field of the job file")
      ->allow_extra_args(false);
  command
      ->add_option("--nodes", flags->nodes,
                   "machines (default: 1, with --job those of its newest attempt)")
      ->check(CLI::Range(1, 65536));
  command->add_option("--gpus", flags->gpus, "GPUs of a machine (default: the job's own trainers)")
      ->check(CLI::Range(1, 1024));
  command->add_option("--memory-gib", flags->memory_gib, "memory of one trainer")
      ->check(MoreThanZero());
  command
      ->add_option("--host-memory-gib", flags->host_memory_gib,
                   "a GPU trainer's share of its machine's memory, for resources.offload")
      ->check(MoreThanZero());
  command
      ->add_option("--intra-node-gbytes", flags->intra_gigabytes,
                   "GB/s between two trainers of a machine")
      ->check(MoreThanZero());
  command
      ->add_option("--inter-node-gbytes", flags->inter_gigabytes,
                   "GB/s of one trainer to another machine")
      ->check(MoreThanZero());
  command
      ->add_option(
          "--verticals", flags->measured.verticals,
          "columns that a head keeps, as a job's step reports say (`ringctl watch JOB -o json`)")
      ->check(MoreThanZero());
  command
      ->add_option("--slashes", flags->measured.slashes,
                   "block diagonals that a head keeps, likewise")
      ->check(MoreThanZero());
  command
      ->add_option("--density", flags->measured.density,
                   "share of the causal tiles that a sparse layer visits, likewise")
      ->check(NumberThat("from 0.000001 to 1",
                         [](double share) { return share >= 1e-6 && share <= 1; }));
  command
      ->add_option(
          "--lengths", flags->lengths,
          "file with one sample's tokens a line, for data.batching: samples (default: those "
          "of data.train, where it can be read)")
      ->check(CLI::ExistingFile);
  command
      ->add_option("--measured", flags->machine,
                   "what `ringctl latency -o json` printed: attention and links are as measured "
                   "there, unless given here")
      ->check(CLI::ExistingFile);
  command
      ->add_flag("--from-coordinator", flags->asks_latency,
                 "the same, as the coordinator has it now")
      ->excludes("--measured");
  command->add_option("--device", flags->device,
                      "of what was measured: whose measurements (default: its only device's)");
  command->add_option(
      "--job", flags->job,
      "a job of the coordinator: its specification unless a file is given, what its "
      "newest reports say that its pattern visits, and, unless --gpus or --measured "
      "names other machines, what was measured of the coordinator's");
  command
      ->add_option(
          "--steps", flags->steps,
          "what `ringctl history JOB -o jsonl` printed: says how far off the prediction is")
      ->check(CLI::ExistingFile);
  command
      ->add_option("--documents", flags->measured.document_tokens,
                   "tokens of a sequence's documents, in turn until it is full: 65536,4096,1024")
      ->delimiter(',')
      ->check(MoreThanZero());
  command->callback([=] { context->action = [=] { return Plan(*context, *flags); }; });
}

}  // namespace ringleader::cli
