// Training steps of a real model shape on the GPUs of one machine, or on its CPU (--engine cpu):
// this process plays the worker of as many trainer processes as a case has ranks (--gpus), and
// prints what they report.
//
//   training_bench [--tokens 32768,131072] [--gpus 1,2,4] [--mode dense,sparse] [--ring flat]
//       [--nodes 1] [--steps 3] [--csv FILE] [--profile FOLDER] [--trainer bin/ringleader-trainer]
//       [--config FILE] [--engine cuda|cpu] [--layout striped,documents] [--documents ProLong-like]
//       [--precision bfloat16,fp8,fp8_all_layers]
//
// Sparse: vertical-slash by top-k, --verticals columns and --slash-share of all block diagonals a
// head. A pattern's name instead has it visit --density of the causal tiles. Weights and tokens are
// random. The first step of a case warms up and is not counted; the row is the step of median time,
// of two in the middle the slower one. With --nodes 2 NCCL takes either half of the GPUs for a
// machine of its own and goes through the network between them. --profile traces one step after the
// counted ones. With --documents sequences are full of documents of such lengths
// (bench/length_distributions.h), kept apart, drawn alike for every case; without, each is one.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/length_distributions.h"
#include "bench/training_figures.h"
#include "coordinator/lifecycle/job/step_merger.h"
#include "coordinator/planner/planner.h"
#include "jobspec/jobspec.h"
#include "patterns/pattern.h"
#include "proto/phase_fields.h"
#include "worker/data/pack_folder.h"
#include "worker/trainer/testing/fake_agent.h"

namespace ringleader::bench {
namespace {

using trainer::testing::FakeAgent;
using trainer::testing::RankLog;

struct Flags {
  std::string trainer, config, engine = "cuda", csv, profile, commit = "unknown",
                               hardware = "unknown";
  std::vector<int64_t> tokens = {32768, 131072};
  std::vector<int> gpus = {1};
  std::vector<std::string> modes = {"dense", "sparse"};
  std::vector<std::string> ring = {"auto"};
  std::vector<std::string> layouts = {"striped"};
  std::vector<std::string> precisions = {"bfloat16"};
  std::string documents;  // a LengthDistribution's name; empty: a sequence is one document
  int nodes = 1;
  std::string recompute = "auto", offload = "auto", kv_gradients = "float32";
  int steps = 3;
  uint32_t verticals = 2621;
  double slash_share = 0.055;
  double density = 0.05;
  double peak_tflops = 989;
  int timeout_seconds = 300;
};

[[noreturn]] void Die(const std::string& what) {
  std::cerr << "training_bench: " << what << "\n";
  std::exit(1);
}

// Lengths of documents that are `tokens` together: one, or drawn from the distribution `name`.
std::vector<uint64_t> DocumentLengths(uint64_t tokens, const std::string& name) {
  const auto* const drawn =
      std::find_if(std::begin(kLengthDistributions), std::end(kLengthDistributions),
                   [&](const LengthDistribution& d) { return d.name == name; });
  if (drawn == std::end(kLengthDistributions)) return {tokens};
  LengthRandom random(1);
  std::vector<uint64_t> lengths;
  for (uint64_t left = tokens; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min(left, drawn->draw(random)));
  }
  return lengths;
}

// A folder of random tokens, gone with this object.
class TokenFolder {
 public:
  TokenFolder(const std::vector<uint64_t>& documents, uint32_t vocabulary) {
    char folder[] = "/tmp/training_bench.XXXXXX";
    if (mkdtemp(folder) == nullptr) Die("cannot make a folder under /tmp");
    path_ = folder;
    std::mt19937 random(1);
    data::PackOptions pack;
    pack.input = data::PackOptions::Input::kUint32;
    for (size_t i = 0; i < documents.size(); ++i) {
      std::vector<uint32_t> ids(std::max<uint64_t>(2, documents[i]) - 1);  // and the separator
      for (uint32_t& id : ids) id = random() % (vocabulary - 1);
      pack.paths.push_back(absl::StrCat(path_, "/ids-", i, ".bin"));
      std::ofstream(pack.paths.back(), std::ios::binary)
          .write(reinterpret_cast<const char*>(ids.data()), static_cast<int64_t>(ids.size() * 4));
    }
    pack.output = path_ + "/tokens";
    pack.eval_share = 0;
    pack.max_document_bytes = uint64_t{1} << 40;
    pack.vocabulary = vocabulary;
    pack.separator = vocabulary - 1;
    if (const auto packed = data::Pack(pack); !packed.ok()) {
      Die(std::string(packed.status().message()));
    }
  }
  ~TokenFolder() { std::filesystem::remove_all(path_); }
  TokenFolder(const TokenFolder&) = delete;
  TokenFolder& operator=(const TokenFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The pattern `name` at `density` of what `tokens` let it see; 0: as it is by default.
void SetPattern(const std::string& name, double density, int64_t tokens,
                v1::AttentionSpec* attention) {
  v1::AttentionSpec::Pattern pattern = v1::AttentionSpec::PATTERN_UNSPECIFIED;
  v1::AttentionSpec::Pattern_Parse(absl::AsciiStrToUpper(name), &pattern);
  attention->set_pattern(pattern);
  if (density == 0) {
    v1::JobSpec job;
    job.mutable_attention()->set_pattern(pattern);
    jobspec::ApplyDefaults(&job);
    *attention = job.attention();
    return attention->set_probe_every(0);
  }
  // Queries from the place on where the share begins see as many keys each.
  const double seen = patterns::ShareOfLength(density) * static_cast<double>(tokens);
  switch (pattern) {
    case v1::AttentionSpec::SLIDING_WINDOW:
      attention->set_window(std::max(1u, static_cast<uint32_t>(seen)));
      return;
    case v1::AttentionSpec::BLOCK_TOPK:
      attention->set_block_size(128);
      attention->set_topk_blocks(std::max(1u, static_cast<uint32_t>(seen) / 128));
      return;
    case v1::AttentionSpec::VERTICAL_SLASH:
      attention->set_select(v1::AttentionSpec::TOP_K);
      break;
    case v1::AttentionSpec::XATTENTION:
      attention->set_threshold(1.0);
      break;
    case v1::AttentionSpec::KEY_GROUPS:
      attention->set_tile(64);
      break;
    case v1::AttentionSpec::MOBA:
    case v1::AttentionSpec::ADASPA:
      break;
    default:
      Die(absl::StrCat("--mode ", name, " keeps no share"));
  }
  attention->set_density(density);
}

v1::JobSpec MakeSpec(const Flags& flags, const TrainingCase& run, const TokenFolder& folder) {
  v1::JobSpec spec;
  spec.set_name("bench");
  spec.mutable_model()->set_config(std::filesystem::absolute(flags.config));
  spec.mutable_model()->set_init("random");
  spec.mutable_data()->set_train(folder.path() + "/tokens/train");
  spec.mutable_data()->set_sequence_length(run.tokens);
  spec.mutable_data()->set_document_mask(!flags.documents.empty());
  v1::AttentionSpec* attention = spec.mutable_attention();
  attention->set_tile(128);
  if (run.mode == "dense") {
    attention->set_pattern(v1::AttentionSpec::DENSE);
  } else if (run.mode != "sparse") {
    SetPattern(run.mode, flags.density, run.tokens, attention);
  } else {
    attention->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
    attention->set_select(v1::AttentionSpec::TOP_K);
    attention->set_max_verticals(flags.verticals);
    attention->set_max_slashes(
        static_cast<uint32_t>(static_cast<double>(run.tokens) / 128 * flags.slash_share));
  }
  spec.mutable_parallelism()->set_context(run.gpus);
  spec.mutable_parallelism()->set_data(1);
  v1::ParallelismSpec::KvGradients kv_gradients = v1::ParallelismSpec::KV_GRADIENTS_UNSPECIFIED;
  v1::ParallelismSpec::KvGradients_Parse(absl::AsciiStrToUpper(flags.kv_gradients), &kv_gradients);
  spec.mutable_parallelism()->set_kv_gradients(kv_gradients);
  v1::TrainingSpec* training = spec.mutable_training();
  // The job has more steps than are waited for, because its end, with a checkpoint, is not
  // measured.
  training->set_steps(flags.steps + 1000);
  training->set_global_batch(1);
  training->set_learning_rate(1e-5);
  training->set_seed(1);
  v1::TrainingSpec::Precision precision = v1::TrainingSpec::PRECISION_UNSPECIFIED;
  v1::TrainingSpec::Precision_Parse(absl::AsciiStrToUpper(run.precision), &precision);
  training->set_precision(precision);
  spec.mutable_checkpoint()->set_directory(folder.path() + "/checkpoints");
  spec.mutable_checkpoint()->set_every_steps(1000000);
  spec.mutable_resources()->set_trainers(run.gpus);
  spec.mutable_resources()->set_engine(flags.engine == "cpu" ? v1::ResourcesSpec::CPU
                                                             : v1::ResourcesSpec::CUDA);
  v1::ResourcesSpec::Recompute recompute = v1::ResourcesSpec::RECOMPUTE_UNSPECIFIED;
  v1::ResourcesSpec::Recompute_Parse(absl::AsciiStrToUpper(flags.recompute), &recompute);
  spec.mutable_resources()->set_recompute(recompute);
  v1::ResourcesSpec::Offload offload = v1::ResourcesSpec::OFFLOAD_UNSPECIFIED;
  v1::ResourcesSpec::Offload_Parse("OFFLOAD_" + absl::AsciiStrToUpper(flags.offload), &offload);
  spec.mutable_resources()->set_offload(offload);
  return spec;
}

// What documents are predicted to take, as jobs get it on machines that nobody has measured.
void SetWeights(v1::JobSpec spec, const model::ModelConfig& config, v1::StepPlan* plan) {
  jobspec::ApplyDefaults(&spec);
  spec.mutable_parallelism()->set_layout(v1::ParallelismSpec::DOCUMENTS);
  const planner::ClusterShape cluster = planner::TypicalCluster(
      spec.resources().engine(), /*nodes=*/1, static_cast<int>(spec.resources().trainers()));
  const planner::CostModel costs(spec, config, cluster);
  const absl::StatusOr<v1::StepPlan> made = planner::MakePlan(spec, config, cluster, costs);
  if (!made.ok()) Die(std::string(made.status().message()));
  *plan->mutable_sample_weights() = made->sample_weights();
}

v1::StepPlan MakePlan(const v1::JobSpec& spec, const model::ModelConfig& config,
                      const TrainingCase& run, const std::string& ring, const std::string& layout,
                      int nodes) {
  v1::StepPlan plan;
  plan.set_version(1);
  plan.set_effective_step(1);
  plan.set_layout(v1::ParallelismSpec::STRIPED);
  if (layout == "documents") {
    plan.set_layout(v1::ParallelismSpec::DOCUMENTS);
    SetWeights(spec, config, &plan);
  }
  plan.set_stripe(128);
  v1::RingShape* shape = plan.mutable_ring();
  shape->set_kind(v1::ParallelismSpec::FLAT);
  shape->set_inner(run.gpus);
  shape->set_outer(1);
  if (ring == "all_gather") shape->set_kind(v1::ParallelismSpec::ALL_GATHER);
  if (ring == "hierarchical") {
    shape->set_kind(v1::ParallelismSpec::HIERARCHICAL);
    shape->set_inner(std::max(1, run.gpus / std::max(2, nodes)));
    shape->set_outer(run.gpus / shape->inner());
  }
  return plan;
}

// A trace of each rank's next step, in `to`; false if they do not come in time.
bool SaveTraces(FakeAgent& agent, const std::string& from, const std::filesystem::path& to,
                int ranks, absl::Duration timeout) {
  v1::AgentMessage message;
  message.mutable_profile()->set_steps(1);
  agent.Send(0, message);
  const auto traces = [&from] {
    std::vector<std::filesystem::path> files;
    std::error_code none;  // yet
    for (const auto& file : std::filesystem::directory_iterator(from, none)) {
      // Others are still being written.
      if (file.path().filename().string().starts_with("step-")) files.push_back(file);
    }
    return files;
  };
  const auto complete = [&](const std::vector<RankLog>&) {
    return traces().size() == static_cast<size_t>(ranks);
  };
  if (!agent.WaitFor(complete, timeout)) return false;
  std::error_code error;
  std::filesystem::create_directories(to, error);
  for (const std::filesystem::path& trace : traces()) {
    if (error) break;
    std::filesystem::copy_file(trace, to / trace.filename(),
                               std::filesystem::copy_options::overwrite_existing, error);
  }
  if (error) Die(absl::StrCat("cannot write to ", to.string(), ": ", error.message()));
  return true;
}

// The merged report of the counted step of median time.
v1::StepReport Measure(const Flags& flags, const model::ModelConfig& config,
                       const TrainingCase& run, const std::string& ring, const std::string& layout,
                       const TokenFolder& folder) {
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / run.gpus);
  const v1::JobSpec spec = MakeSpec(flags, run, folder);
  FakeAgent agent(folder.path() + "/agent.sock", spec,
                  MakePlan(spec, config, run, ring, layout, flags.nodes), run.gpus, threads);
  agent.Spawn(flags.trainer, folder.path(), flags.nodes);
  const size_t wanted = flags.steps + 1;
  std::vector<v1::StepReport> steps;
  std::string failure;
  const auto enough = [&](const std::vector<RankLog>& logs) {
    const bool all = std::all_of(logs.begin(), logs.end(),
                                 [&](const RankLog& log) { return log.steps.size() >= wanted; });
    if (!all) {
      for (const RankLog& log : logs) {
        if (log.result.has_value()) failure = log.result->message();
      }
      return !failure.empty();
    }
    steps.clear();
    for (size_t i = 1; i < wanted; ++i) {
      std::vector<v1::StepReport> of_ranks;
      of_ranks.reserve(logs.size());
      for (const RankLog& log : logs) of_ranks.push_back(log.steps[i]);
      steps.push_back(lifecycle::MergeSteps(of_ranks));
    }
    return true;
  };
  const bool done = agent.WaitFor(enough, absl::Seconds(flags.timeout_seconds));
  if (steps.empty()) {
    std::ifstream log(folder.path() + "/rank-0.log");
    std::cerr << std::string(std::istreambuf_iterator<char>(log), {});
    std::cerr << absl::StrFormat("%d GPUs, %d tokens, %s, %s: %s\n", run.gpus, run.tokens, run.mode,
                                 run.precision,
                                 !failure.empty() ? failure
                                 : done           ? "the trainers ended"
                                                  : "out of time");
    return {};
  }
  if (!flags.profile.empty()) {
    const std::string name = absl::StrFormat("%d-gpus-%d-tokens-%s-%s-%s-%s", run.gpus, run.tokens,
                                             run.mode, ring, layout, run.precision);
    if (!SaveTraces(agent, folder.path() + "/checkpoints/profiles",
                    std::filesystem::path(flags.profile) / name, run.gpus,
                    absl::Seconds(flags.timeout_seconds))) {
      std::cerr << name << ": no traces in time (see --timeout)\n";
      return {};
    }
  }
  std::sort(steps.begin(), steps.end(), [](const v1::StepReport& a, const v1::StepReport& b) {
    return a.step_seconds() < b.step_seconds();
  });
  return steps[steps.size() / 2];
}

// What the trainer chose, as it printed it: recomputation and the memory that it reckoned with.
void PrintSettings(const TokenFolder& folder) {
  std::ifstream log(folder.path() + "/rank-0.log");
  for (std::string line; std::getline(log, line);) {
    for (const char* row : {"linear layers", "recompute", "kept for", "memory of a rank"}) {
      if (line.starts_with(absl::StrCat("| ", row))) std::printf("%s\n", line.c_str());
    }
  }
}

std::string CsvHeader() {
  std::string header =
      "date,commit,hardware,model,gpus,nodes,tokens,mode,ring,layout,documents,kv_gradients,"
      "precision,"
      "density,recall,step_"
      "seconds,tokens_per_second";
  ForEachPhase({}, [&](const std::string& name, double) { absl::StrAppend(&header, ",", name); });
  return header +
         ",mfu,token_wise_tflops,exposed_share,peak_gib,worker_imbalance,step_imbalance,loss\n";
}

std::string CsvRow(const Flags& flags, const TrainingCase& run, const std::string& ring,
                   const std::string& layout, const TrainingFigures& figures,
                   const v1::StepReport& report) {
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
  std::string phases;
  ForEachPhase(report.phases(), [&](const std::string&, double seconds) {
    absl::StrAppendFormat(&phases, ",%.4f", seconds);
  });
  const std::string head = absl::StrFormat(
      "%s,%s,%s,%s,%d,%d,%d,%s,%s,%s,%s,%s,%s", date, flags.commit, flags.hardware,
      std::filesystem::path(flags.config).stem().string(), run.gpus, flags.nodes, run.tokens,
      run.mode, ring, layout, flags.documents.empty() ? "one" : flags.documents, flags.kv_gradients,
      run.precision);
  return absl::StrFormat("%s,%.4f,%.3f,%.4f,%.0f%s,%.4f,%.1f,%.4f,%.2f,%.4f,%.4f,%.4f\n", head,
                         figures.density, figures.recall, figures.step_seconds,
                         figures.tokens_per_second, phases, figures.mfu, figures.token_wise_tflops,
                         figures.exposed_share, figures.peak_gib, report.worker_imbalance(),
                         report.step_imbalance(), report.loss());
}

// Empty where the case could not be measured.
std::string Row(const Flags& flags, const model::ModelConfig& config, const TrainingCase& run,
                const std::string& ring, const std::string& layout) {
  // The loader hands out whole sequences, each once an epoch. Documents differ from one sequence to
  // the next: all cases see the same.
  const uint64_t sequences = flags.documents.empty() ? 2 : flags.steps + 2;
  const TokenFolder folder(DocumentLengths(sequences * run.tokens + 1, flags.documents),
                           static_cast<uint32_t>(config.vocab_size));
  const v1::StepReport report = Measure(flags, config, run, ring, layout, folder);
  if (report.step() == 0) return "";
  PrintSettings(folder);
  return CsvRow(flags, run, ring, layout, Derive(config, run, report, flags.peak_tflops), report);
}

void AddOptions(CLI::App& app, Flags* flags) {
  app.add_option("--trainer", flags->trainer, "the trainer's program");
  app.add_option("--config", flags->config, "config.json of the model; the Qwen2.5-3B shape");
  app.add_option("--engine", flags->engine, "of the trainers: cuda or cpu")
      ->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--tokens", flags->tokens, "sequence lengths")->delimiter(',');
  app.add_option("--gpus", flags->gpus, "ranks of the ring: one a GPU, or CPU ranks")
      ->delimiter(',');
  std::vector<std::string> modes = {"dense", "sparse"};
  for (const patterns::PatternDefinition* definition : patterns::Definitions()) {
    if (definition->pattern != patterns::Pattern::kDense) modes.emplace_back(definition->name);
  }
  app.add_option("--mode", flags->modes, "dense, sparse, or a pattern's name")
      ->delimiter(',')
      ->check(CLI::IsMember(modes));
  app.add_option("--density", flags->density,
                 "share of the causal tiles that a named pattern visits; 0: its defaults hold")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--ring", flags->ring, "flat, hierarchical, all_gather; auto is flat")
      ->delimiter(',')
      ->check(CLI::IsMember({"auto", "flat", "hierarchical", "all_gather"}));
  app.add_option("--layout", flags->layouts, "striped, documents")
      ->delimiter(',')
      ->check(CLI::IsMember({"striped", "documents"}));
  app.add_option("--documents", flags->documents, "whose lengths documents have")
      ->check(CLI::IsMember({"LongAlign-like", "ChatQA2-like", "ProLong-like"}));
  app.add_option("--precision", flags->precisions, "training.precision of the job")
      ->delimiter(',')
      ->check(CLI::IsMember({"bfloat16", "fp8", "fp8_all_layers"}));
  app.add_option("--nodes", flags->nodes, "equal parts of the GPUs that NCCL takes for machines")
      ->check(CLI::PositiveNumber);
  app.add_option("--recompute", flags->recompute, "resources.recompute of the job")
      ->check(CLI::IsMember({"auto", "none", "attention_only", "full"}));
  app.add_option("--offload", flags->offload, "resources.offload of the job")
      ->check(CLI::IsMember({"auto", "none", "host"}));
  app.add_option("--kv-gradients", flags->kv_gradients, "parallelism.kv_gradients of the job")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--steps", flags->steps, "counted steps of a case")->check(CLI::PositiveNumber);
  app.add_option("--verticals", flags->verticals, "columns of a head");
  app.add_option("--slash-share", flags->slash_share, "share of block diagonals of a head");
  app.add_option("--peak-tflops", flags->peak_tflops, "of one GPU, bf16 dense: what MFU refers to");
  app.add_option("--timeout", flags->timeout_seconds, "seconds for one case");
  app.add_option("--csv", flags->csv, "also write the rows to this file");
  app.add_option("--profile", flags->profile, "folder for traces of a step, one a rank");
  app.add_option("--commit", flags->commit, "for the rows");
  app.add_option("--hardware", flags->hardware, "for the rows, without commas");
}

// All cases that the flags name, one after another. Returns whether each of them gave a row.
bool MeasureAll(const Flags& flags, const model::ModelConfig& config, std::ofstream& csv) {
  bool all_measured = true;
  for (const int64_t tokens : flags.tokens) {
    for (const int gpus : flags.gpus) {
      for (const std::string& mode : flags.modes) {
        for (const std::string& ring : flags.ring) {
          for (const std::string& layout : flags.layouts) {
            for (const std::string& precision : flags.precisions) {
              const TrainingCase run{
                  .gpus = gpus, .tokens = tokens, .mode = mode, .precision = precision};
              const std::string row = Row(flags, config, run, ring, layout);
              all_measured &= !row.empty();
              std::printf("%s", row.c_str());
              std::fflush(stdout);
              if (csv.is_open()) csv << row << std::flush;
            }
          }
        }
      }
    }
  }
  return all_measured;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Training steps on this machine, by the trainers that jobs get.");
  const auto here = std::filesystem::canonical("/proc/self/exe").parent_path();
  flags.trainer = here / "ringleader-trainer";
  for (const char* root : {"..", "../.."}) {  // of a bundle, of a build folder in a checkout
    const auto config = here / root / "bench/models/qwen2.5-3b.json";
    if (std::filesystem::exists(config)) flags.config = config.lexically_normal();
  }
  AddOptions(app, &flags);
  CLI11_PARSE(app, argc, argv);

  const auto config = model::LoadModelConfig(flags.config);
  if (!config.ok()) Die(std::string(config.status().message()));
  std::ofstream csv;
  if (!flags.csv.empty()) {
    csv.open(flags.csv);
    if (!csv) Die("cannot write " + flags.csv);
    csv << CsvHeader();
  }
  std::printf("%s", CsvHeader().c_str());
  return MeasureAll(flags, *config, csv) ? 0 : 1;
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  return ringleader::bench::Main(argc, argv);
}
