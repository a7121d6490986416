// Training steps of a real model shape on the GPUs of one machine, or on its CPU (--engine cpu):
// this process plays the worker of as many trainer processes as a case has ranks (--gpus), and
// prints what they report.
//
//   training_bench [--tokens 32768,131072] [--gpus 1,2,4] [--mode dense,sparse] [--ring flat]
//       [--nodes 1] [--steps 3] [--csv FILE] [--profile FOLDER] [--trainer bin/ringleader-trainer]
//       [--config FILE] [--engine cuda|cpu] [--layout striped,documents] [--documents ProLong-like]
//       [--precision bfloat16,fp8,fp8_all_layers] [--heads 1,2] [--dense-below 0,4096]
//       [--group-queries 16|64]
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
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/process/config.h"
#include "bench/length_distributions.h"
#include "bench/training_case.h"
#include "bench/training_figures.h"
#include "coordinator/lifecycle/job/step_merger.h"
#include "patterns/pattern.h"
#include "proto/phase_fields.h"
#include "worker/data/pack/pack_folder.h"
#include "worker/trainer/testing/fake_agent.h"

namespace ringleader::bench {
namespace {

using trainer::testing::FakeAgent;
using trainer::testing::RankLog;

struct Flags {
  CaseOptions options;
  std::string trainer, csv, profile, commit = "unknown", hardware = "unknown";
  std::vector<int64_t> tokens = {32768, 131072};
  std::vector<int> gpus = {1}, heads = {1};
  std::vector<std::string> modes = {"dense", "sparse"};
  std::vector<std::string> rings = {"auto"};
  std::vector<std::string> layouts = {"striped"};
  std::vector<std::string> precisions = {"bfloat16"};
  std::vector<uint64_t> dense_below = {0};
  double peak_tflops = 989;
  int timeout_seconds = 300;
};

[[noreturn]] void Die(const std::string& what) {
  std::cerr << "training_bench: " << what << "\n";
  std::exit(1);
}

// Lengths of documents that are `tokens` together: one, all of the length that `name` is, or drawn
// from the distribution of that name.
std::vector<uint64_t> DocumentLengths(uint64_t tokens, const std::string& name) {
  const auto* const drawn =
      std::find_if(std::begin(kLengthDistributions), std::end(kLengthDistributions),
                   [&](const LengthDistribution& d) { return d.name == name; });
  uint64_t length = 0;
  const bool are_alike = absl::SimpleAtoi(name, &length) && length > 0;
  if (drawn == std::end(kLengthDistributions) && !are_alike) return {tokens};
  LengthRandom random(1);
  std::vector<uint64_t> lengths;
  for (uint64_t left = tokens; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min(left, are_alike ? length : drawn->draw(random)));
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
                       const TrainingCase& run, const TokenFolder& folder) {
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / run.gpus);
  const auto spec = MakeSpec(flags.options, run, folder.path());
  if (!spec.ok()) Die(std::string(spec.status().message()));
  const auto plan = MakePlan(*spec, config, run, flags.options);
  if (!plan.ok()) Die(std::string(plan.status().message()));
  FakeAgent agent(folder.path() + "/agent.sock", *spec, *plan, run.gpus, threads);
  agent.Spawn(flags.trainer, folder.path(), flags.options.nodes);
  const size_t wanted = flags.options.steps + 1;
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
    std::string name = absl::StrFormat("%d-gpus-%d-tokens-%s-%s-%s-%s", run.gpus, run.tokens,
                                       run.mode, run.ring, run.layout, run.precision);
    if (run.heads > 1) absl::StrAppend(&name, "-", run.heads, "-heads");
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
      "date,commit,hardware,model,gpus,nodes,tokens,mode,heads,ring,layout,documents,dense_below,"
      "kv_gradients,precision,density,recall,step_seconds,tokens_per_second";
  ForEachPhase({}, [&](const std::string& name, double) { absl::StrAppend(&header, ",", name); });
  return header +
         ",mfu,token_wise_tflops,exposed_share,ring_gib,head_gib,peak_gib,worker_imbalance,"
         "step_imbalance,loss\n";
}

std::string CsvRow(const Flags& flags, const TrainingCase& run, const TrainingFigures& figures,
                   const v1::StepReport& report) {
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
  std::string phases;
  ForEachPhase(report.phases(), [&](const std::string&, double seconds) {
    absl::StrAppendFormat(&phases, ",%.4f", seconds);
  });
  const CaseOptions& options = flags.options;
  const std::string head =
      absl::StrFormat("%s,%s,%s,%s,%d,%d,%d,%s,%d,%s,%s,%s,%d,%s,%s", date, flags.commit,
                      flags.hardware, std::filesystem::path(options.config).stem().string(),
                      run.gpus, options.nodes, run.tokens, run.mode, run.heads, run.ring,
                      run.layout, options.documents.empty() ? "one" : options.documents,
                      run.dense_below, options.kv_gradients, run.precision);
  return absl::StrFormat("%s,%.4f,%.3f,%.4f,%.0f%s,%.4f,%.1f,%.4f,%.3f,%.3f,%.2f,%.4f,%.4f,%.4f\n",
                         head, figures.density, figures.recall, figures.step_seconds,
                         figures.tokens_per_second, phases, figures.mfu, figures.token_wise_tflops,
                         figures.exposed_share, figures.ring_gib, figures.head_gib,
                         figures.peak_gib, report.worker_imbalance(), report.step_imbalance(),
                         report.loss());
}

// Empty where the case could not be measured.
std::string Row(const Flags& flags, const model::ModelConfig& config, const TrainingCase& run) {
  // The loader hands out whole sequences, each once an epoch. Documents differ from one sequence to
  // the next: all cases see the same.
  const CaseOptions& options = flags.options;
  const uint64_t sequences = options.documents.empty() ? 2 : options.steps + 2;
  const TokenFolder folder(DocumentLengths(sequences * run.tokens + 1, options.documents),
                           static_cast<uint32_t>(config.vocab_size));
  const v1::StepReport report = Measure(flags, config, run, folder);
  if (report.step() == 0) return "";
  PrintSettings(folder);
  return CsvRow(flags, run, Derive(config, run, report, flags.peak_tflops), report);
}

void AddOptions(CLI::App& app, Flags* flags) {
  app.add_option("--trainer", flags->trainer, "the trainer's program");
  app.add_option("--config", flags->options.config,
                 "config.json of the model; the Qwen2.5-3B shape");
  app.add_option("--engine", flags->options.engine, "of the trainers: cuda or cpu")
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
  app.add_option("--density", flags->options.density,
                 "share of the causal tiles that a named pattern visits; 0: its defaults hold")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--group-queries", flags->options.group_queries,
                 "attention.group_queries of key_groups, in all of a call's cases")
      ->check(CLI::IsMember({16, 64}));
  app.add_option("--group-heads", flags->options.group_heads,
                 "attention.group_heads of key_groups, in all of a call's cases")
      ->check(CLI::IsMember({0, 1, 2}));
  app.add_option("--heads", flags->heads,
                 "parallelism.heads of the job: Ulysses with as many as there are GPUs, else USP")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--ring", flags->rings, "flat, hierarchical, all_gather; auto is flat")
      ->delimiter(',')
      ->check(CLI::IsMember({"auto", "flat", "hierarchical", "all_gather"}));
  app.add_option("--layout", flags->layouts, "striped, documents")
      ->delimiter(',')
      ->check(CLI::IsMember({"striped", "documents"}));
  app.add_option("--documents", flags->options.documents,
                 "whose lengths documents have, or the length of each")
      ->check(CLI::IsMember({"LongAlign-like", "ChatQA2-like", "ProLong-like"}) |
              CLI::PositiveNumber);
  app.add_option("--dense-below", flags->dense_below,
                 "attention.dense_below of sparse cases, in tokens; 0: off")
      ->delimiter(',');
  app.add_option("--precision", flags->precisions, "training.precision of the job")
      ->delimiter(',')
      ->check(CLI::IsMember({"bfloat16", "fp8", "fp8_all_layers"}));
  app.add_option("--nodes", flags->options.nodes,
                 "equal parts of the GPUs that NCCL takes for machines")
      ->check(CLI::PositiveNumber);
  app.add_option("--inter-node-gbytes", flags->options.inter_node_gbytes,
                 "GB/s of a GPU to another machine, by which documents are laid out; 45")
      ->check(CLI::PositiveNumber);
  app.add_option("--recompute", flags->options.recompute, "resources.recompute of the job")
      ->check(CLI::IsMember({"auto", "none", "attention_only", "full"}));
  app.add_option("--offload", flags->options.offload, "resources.offload of the job")
      ->check(CLI::IsMember({"auto", "none", "host"}));
  app.add_option("--kv-gradients", flags->options.kv_gradients,
                 "parallelism.kv_gradients of the job")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--steps", flags->options.steps, "counted steps of a case")
      ->check(CLI::PositiveNumber);
  app.add_option("--verticals", flags->options.verticals, "columns of a head");
  app.add_option("--slash-share", flags->options.slash_share, "share of block diagonals of a head");
  app.add_option("--peak-tflops", flags->peak_tflops, "of one GPU, bf16 dense: what MFU refers to");
  app.add_option("--timeout", flags->timeout_seconds, "seconds for one case");
  app.add_option("--csv", flags->csv, "also write the rows to this file");
  app.add_option("--profile", flags->profile, "folder for traces of a step, one a rank");
  app.add_option("--commit", flags->commit, "for the rows");
  app.add_option("--hardware", flags->hardware, "for the rows, without commas");
}

// Every case that the flags name: what is named first changes last.
std::vector<TrainingCase> Cases(const Flags& flags) {
  std::vector<TrainingCase> cases(1);
  const auto each = [&cases](const auto& values, auto TrainingCase::*field) {
    std::vector<TrainingCase> more;
    for (const TrainingCase& run : cases) {
      for (const auto& value : values) {
        more.push_back(run);
        more.back().*field = value;
      }
    }
    cases = std::move(more);
  };
  each(flags.tokens, &TrainingCase::tokens);
  each(flags.gpus, &TrainingCase::gpus);
  each(flags.modes, &TrainingCase::mode);
  each(flags.heads, &TrainingCase::heads);
  each(flags.rings, &TrainingCase::ring);
  each(flags.layouts, &TrainingCase::layout);
  each(flags.precisions, &TrainingCase::precision);
  each(flags.dense_below, &TrainingCase::dense_below);
  return cases;
}

// All of them, one after another. Returns whether each gave a row.
bool MeasureAll(const Flags& flags, const model::ModelConfig& config, std::ofstream& csv) {
  bool all_measured = true;
  for (const TrainingCase& run : Cases(flags)) {
    const std::string row = Row(flags, config, run);
    all_measured &= !row.empty();
    std::printf("%s", row.c_str());
    std::fflush(stdout);
    if (csv.is_open()) csv << row << std::flush;
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
    if (std::filesystem::exists(config)) flags.options.config = config.lexically_normal();
  }
  AddOptions(app, &flags);
  if (const std::optional<int> code = ParseArguments(app, argc, argv)) return *code;

  const auto config = model::LoadModelConfig(flags.options.config);
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
