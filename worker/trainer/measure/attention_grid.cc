#include "worker/trainer/measure/attention_grid.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "balance/grid.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "patterns/pattern.h"
#include "worker/attention/documents/document_attention.h"

namespace ringleader::trainer {
namespace {

using patterns::AttentionOptions;
using torch::Tensor;

// Longer ones are predicted by a power of their length; to measure them would take a job's memory.
constexpr int64_t kLongestOnGpu = 131072, kLongestOnCpu = 16384;  // tokens
constexpr int64_t kDocumentTokens = 4096;
// Random values for so many tokens are repeated over the sequence: to draw all would take too long.
constexpr int64_t kDrawnTokens = 2048;

// Runs attention over sequences of one length after the other.
class Bench {
 public:
  Bench(const TrainingJob& job, const model::ModelConfig& config, EngineDevice& device)
      : job_(job), config_(config), device_(device) {}

  // RESOURCE_EXHAUSTED: perhaps the sequence is too long for the memory that is left. Other errors
  // mean that this is broken, and the log tells of them.
  absl::StatusOr<balance::Timing> Run(const balance::GridPoint& point) {
    absl::StatusOr<balance::Timing> timing;
    try {
      timing = RunOrThrow(point);
    } catch (const c10::Error& error) {
      timing = absl::ResourceExhaustedError(error.what_without_backtrace());
    }
    if (!timing.ok() && !absl::IsResourceExhausted(timing.status())) {
      std::printf("attention of %lld tokens was not measured, nor what is longer: %s\n",
                  static_cast<long long>(point.tokens), timing.status().ToString().c_str());
    }
    return timing;
  }

 private:
  absl::StatusOr<balance::Timing> RunOrThrow(const balance::GridPoint& point) {
    const torch::NoGradGuard no_grad;
    RETURN_IF_ERROR(SetUp(point));
    const attention::AttentionOutput output = attention_->Forward(0, q_, k_, v_);
    output.record->Backward(q_, k_, v_, output.out, output.lse, d_out_);
    const attention::AttentionStats stats = attention_->TakeStats();
    return balance::Timing{.forward_seconds = stats.seconds.forward,
                           .backward_seconds = stats.seconds.backward,
                           .density = stats.layers.at(0).density};
  }

  absl::Status SetUp(const balance::GridPoint& point) {
    const bool is_same = attention_ != nullptr && point.tokens == point_.tokens &&
                         point.document_tokens == point_.document_tokens &&
                         point.density == point_.density;
    if (is_same) return absl::OkStatus();
    if (attention_ == nullptr || point.tokens != point_.tokens) Draw(point.tokens);
    AttentionOptions options = attention::AloneOptions(job_.attention);
    options.dense_layers.clear();
    options.adapt_heads = options.adapt_by_probe = false;
    options.sequence_length = 0;  // a share is one of what is measured
    if (const auto set_density = patterns::DefinitionOf(options.pattern).set_density) {
      set_density(&options, point.tokens, point.density);
    }
    point_ = point;
    attention_ = nullptr;  // gives its memory back first
    ASSIGN_OR_RETURN(attention_, device_.MakeAttentionAlone(options));
    std::vector<int64_t> firsts;
    for (int64_t at = 0; point.document_tokens > 0 && at < point.tokens;
         at += point.document_tokens) {
      firsts.push_back(at);
    }
    return attention_->SetDocuments(point.tokens, firsts);
  }

  void Draw(int64_t tokens) {
    at::Generator generator = at::detail::createCPUGenerator(job_.seed);
    const auto draw = [&](int64_t heads) {
      const torch::Device device(device_.is_host() ? torch::kCPU : torch::kCUDA);
      const Tensor drawn = torch::randn({kDrawnTokens, heads, config_.head_dim}, generator)
                               .to(torch::TensorOptions().device(device).dtype(device_.type()));
      const int64_t times = CeilDiv(tokens, kDrawnTokens);
      return drawn.repeat({times, 1, 1}).narrow(0, 0, tokens);
    };
    q_ = draw(config_.heads);
    d_out_ = draw(config_.heads);
    k_ = draw(config_.kv_heads);
    v_ = draw(config_.kv_heads);
  }

  const TrainingJob& job_;
  const model::ModelConfig& config_;
  EngineDevice& device_;
  balance::GridPoint point_;
  Tensor q_, k_, v_, d_out_;
  std::unique_ptr<attention::ContextAttention> attention_;  // at point_
};

}  // namespace

std::vector<balance::Row> MeasureAttention(const TrainingJob& job, const model::ModelConfig& config,
                                           double budget_seconds, EngineDevice& device,
                                           const Host& host) {
  const AttentionOptions& options = job.attention;
  // Tables are of causal attention.
  if (options.mask != patterns::Mask::kCausal) return {};
  const balance::Row shape = {
      .pattern = patterns::MeasuredName(options, config.heads, config.kv_heads),
      .tile = options.tile,
      .heads = static_cast<int>(config.heads),
      .kv_heads = static_cast<int>(config.kv_heads),
      .head_dim = static_cast<int>(config.head_dim)};
  std::vector<double> densities = {1};
  if (patterns::DefinitionOf(options.pattern).set_density != nullptr)
    densities = {0.02, 0.05, 0.15, 0.4, 1};
  const int64_t longest = std::min<int64_t>(static_cast<int64_t>(job.sequence_length),
                                            device.is_host() ? kLongestOnCpu : kLongestOnGpu);
  Bench bench(job, config, device);
  return balance::MeasureGrid(
      shape,
      balance::MakeGrid(options.tile, longest, densities, job.document_mask ? kDocumentTokens : 0),
      budget_seconds, [&](const balance::GridPoint& point) { return bench.Run(point); },
      [] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
      },
      [&] { return host.stop_requested(); });
}

}  // namespace ringleader::trainer
