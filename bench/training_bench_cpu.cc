// A training step of the quickstart's model on one CPU rank, dense beside vertical-slash, in runs
// that alternate.
//
//   training_bench_cpu MODEL_CONFIG [--tokens N] [--steps N] [--threads N] [--verticals N]
//       [--slashes N] [--mass P] [--text FILE]
//
// Selection is top-k with the counts given, so that the density is what was asked for; --mass makes
// it top-p with these counts as caps. --text takes the sequence from a file's bytes, otherwise it
// is random.
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/model/decoder/cpu_token_ops.h"
#include "worker/model/decoder/decoder.h"
#include "worker/optim/cpu_shard_device.h"
#include "worker/optim/sharded_adamw.h"

namespace ringleader::bench {
namespace {

struct Options {
  std::string config;
  std::string text;
  int64_t tokens = 32768;
  int steps = 3;
  int threads = 2;
  uint32_t verticals = 512;
  uint32_t slashes = 16;
  double mass = 0.0;  // 0: top-k
};

void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

torch::Tensor Sequence(const Options& options, int64_t vocabulary) {
  if (options.text.empty()) return torch::randint(vocabulary, {options.tokens + 1}, torch::kLong);
  std::ifstream file(options.text, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  TORCH_CHECK(!bytes.empty(), options.text, " is empty or cannot be read");
  const torch::Tensor tokens = torch::empty({options.tokens + 1}, torch::kLong);
  for (int64_t i = 0; i <= options.tokens; ++i) {
    tokens.data_ptr<int64_t>()[i] = static_cast<uint8_t>(bytes[i % bytes.size()]);
  }
  return tokens;
}

// A model with its optimizer and attention.
class Trainer {
 public:
  Trainer(const model::ModelConfig& config, const Options& options, patterns::Pattern pattern,
          comm::Communicator& communicator)
      : token_ops_(options.threads), device_(communicator, options.threads) {
    const model::ParameterLayout layout = model::MakeParameterLayout(config);
    std::vector<float> start(layout.ShardElements(1));
    model::InitializeParameters(config, layout, 1, 0, layout.elements, start.data());
    auto optimizer = optim::ShardedAdamW::Create({}, layout, device_, torch::kFloat, start);
    Check(optimizer.status());
    optimizer_ = *std::move(optimizer);
    decoder_.emplace(config, token_ops_, *optimizer_,
                     model::DecoderOptions{.recompute = {.recompute = model::Recompute::kNone}});
    auto attention = attention::CreateCpuRingAttention(
        {.pattern = pattern,
         .select = options.mass > 0.0 ? patterns::Select::kTopP : patterns::Select::kTopK,
         .budget = {.vertical_mass = options.mass > 0.0 ? options.mass : 1.0,
                    .slash_mass = options.mass > 0.0 ? options.mass : 1.0,
                    .max_verticals = options.verticals,
                    .max_slashes = options.slashes},
         .tile = 64,
         .threads = options.threads},
        &communicator);
    Check(attention.status());
    attention_ = *std::move(attention);
  }

  double Step(const torch::Tensor& sequence) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t n = sequence.size(0) - 1;
    optimizer_->ZeroGradients();
    const torch::Tensor loss = decoder_->ForwardBackward({.tokens = sequence.slice(0, 0, n),
                                                          .positions = torch::arange(n),
                                                          .labels = sequence.slice(0, 1),
                                                          .sequence_length = n},
                                                         *attention_);
    const auto step = optimizer_->Step(1e-3, loss, n);
    Check(step.status());
    loss_ = step->loss;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  attention::AttentionStats TakeStats() { return attention_->TakeStats(); }
  double loss() const { return loss_; }

 private:
  const model::CpuTokenOps token_ops_;
  optim::CpuShardDevice device_;
  std::unique_ptr<optim::ShardedAdamW> optimizer_;
  std::optional<model::Decoder> decoder_;
  std::unique_ptr<attention::ContextAttention> attention_;
  double loss_ = 0.0;
};

void Run(const Options& options, comm::Communicator& communicator) {
  const auto config = model::LoadModelConfig(options.config);
  Check(config.status());
  Trainer dense(*config, options, patterns::Pattern::kDense, communicator);
  Trainer sparse(*config, options, patterns::Pattern::kVerticalSlash, communicator);
  const torch::Tensor sequence = Sequence(options, config->vocab_size);
  std::printf("# training_bench_cpu: %lld tokens, %d threads, %u verticals, %u slashes (%s)\n\n",
              static_cast<long long>(options.tokens), options.threads, options.verticals,
              options.slashes, options.mass > 0.0 ? "caps of top-p" : "top-k");
  std::printf(
      "| step | dense s | sparse s | ratio | density | index s | forward s | backward s | rest s | "
      "index share | dense loss | sparse loss "
      "|\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (int step = 1; step <= options.steps; ++step) {
    const double dense_seconds = dense.Step(sequence);
    const double sparse_seconds = sparse.Step(sequence);
    const attention::AttentionStats stats = sparse.TakeStats();
    double density = 0.0;
    for (const attention::LayerStats& layer : stats.layers) density += layer.density;
    const attention::AttentionSeconds& s = stats.seconds;
    const double attention_seconds = s.index + s.forward + s.backward;
    std::printf(
        "| %d | %.2f | %.2f | %.2f | %.3f | %.3f | %.2f | %.2f | %.2f | %.1f %% | %.3f | %.3f |\n",
        step, dense_seconds, sparse_seconds, dense_seconds / sparse_seconds,
        density / stats.layers.size(), s.index, s.forward, s.backward,
        sparse_seconds - attention_seconds, 100.0 * s.index / attention_seconds, dense.loss(),
        sparse.loss());
    std::fflush(stdout);
  }
}

int Main(int argc, char** argv) {
  Options options;
  if (argc < 2) {
    std::fprintf(stderr, "usage: training_bench_cpu MODEL_CONFIG [--tokens N] ...\n");
    return 2;
  }
  options.config = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--text") options.text = argv[i + 1];
    if (flag == "--tokens") options.tokens = std::stoll(argv[i + 1]);
    if (flag == "--steps") options.steps = std::stoi(argv[i + 1]);
    if (flag == "--threads") options.threads = std::stoi(argv[i + 1]);
    if (flag == "--verticals") options.verticals = std::stoul(argv[i + 1]);
    if (flag == "--mass") options.mass = std::stod(argv[i + 1]);
    if (flag == "--slashes") options.slashes = std::stoul(argv[i + 1]);
  }
  torch::manual_seed(1);
  at::set_num_threads(options.threads);
  comm::testing::RunRanks(1, [&](comm::Communicator& communicator) { Run(options, communicator); });
  return 0;
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  return ringleader::bench::Main(argc, argv);
}
