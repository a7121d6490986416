#include "worker/trainer/testing/model_on_ranks.h"

#include <gtest/gtest.h>

#include "worker/attention/cpu/cpu_ring_attention.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/golden.h"
#include "worker/model/token_ops/cpu_token_ops.h"

namespace ringleader::trainer::testing {

using torch::Tensor;

namespace {

// The tokens at `positions` alone.
ModelResult RunPart(const Sequence& sequence, const model::Golden& golden, const Tensor& positions,
                    attention::ContextAttention& attention) {
  const auto ops = model::NewCpuTokenOps(/*threads=*/1);
  model::FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
  model::Decoder decoder(golden.config, *ops, store,
                         {.recompute = {.recompute = model::Recompute::kNone}});
  const model::TokenBatch batch = {.tokens = sequence.tokens.index_select(0, positions),
                                   .positions = positions,
                                   .labels = sequence.labels.index_select(0, positions),
                                   .sequence_length = sequence.length()};
  ModelResult part;
  part.losses = decoder.Score(batch, attention).losses.clone();
  part.loss = decoder.ForwardBackward(batch, attention).item<double>();
  for (const model::ParameterSlot& slot : decoder.layout().slots) {
    part.gradients[slot.name] =
        store.gradients().narrow(0, slot.offset, slot.elements).view(slot.shape).clone();
  }
  return part;
}

}  // namespace

Sequence WholeSequence(int64_t tokens) {
  torch::manual_seed(5);
  const Tensor drawn =
      torch::randint(model::LoadGolden("qwen2").config.vocab_size, {tokens}, torch::kLong);
  Tensor labels = drawn.roll(-1);
  labels[tokens - 1] = model::kIgnoreLabel;
  return {drawn, labels};
}

Sequence PackedSequence(int64_t tokens, const std::vector<int64_t>& firsts) {
  Sequence sequence = WholeSequence(tokens);
  sequence.document_firsts = firsts;
  for (const int64_t first : firsts) {
    if (first > 0) sequence.labels[first - 1] = model::kIgnoreLabel;
  }
  return sequence;
}

ModelResult RunWith(const Sequence& sequence, attention::ContextAttention& attention) {
  return RunPart(sequence, model::LoadGolden(sequence.model), torch::arange(sequence.length()),
                 attention);
}

ModelResult RunOnRanks(const Sequence& sequence, const patterns::AttentionOptions& options,
                       int ranks) {
  const model::Golden golden = model::LoadGolden(sequence.model);
  std::vector<ModelResult> parts(ranks);
  ModelResult result;
  result.losses = torch::zeros({sequence.length()});
  comm::testing::RunRanks(ranks, [&](comm::Communicator& communicator) {
    const kernels::ShardLayout layout{.kind = options.layout,
                                      .ranks = ranks,
                                      .rank = communicator.rank(),
                                      .stripe = options.tile,
                                      .tokens = sequence.length()};
    Tensor positions = torch::empty({layout.local_tokens()}, torch::kLong);
    for (int64_t i = 0; i < layout.local_tokens(); ++i) {
      positions.data_ptr<int64_t>()[i] = layout.Position(i);
    }
    auto attention = attention::CreateCpuRingAttention(options, &communicator);
    TORCH_CHECK(attention.ok(), std::string(attention.status().message()));
    const absl::Status documents = (*attention)
                                       ->SetDocuments(sequence.length(), sequence.document_firsts,
                                                      /*padding=*/0, sequence.prefix_ends);
    TORCH_CHECK(documents.ok(), std::string(documents.message()));
    ModelResult& part = parts[communicator.rank()];
    part = RunPart(sequence, golden, positions, **attention);
    result.losses.index_copy_(0, positions, part.losses);  // ranks write different places
  });
  result.gradients = std::move(parts[0].gradients);
  for (int rank = 0; rank < ranks; ++rank) {
    result.loss += parts[rank].loss;
    for (auto& [name, gradient] : result.gradients) {
      if (rank > 0) gradient += parts[rank].gradients.at(name);
    }
  }
  return result;
}

void ExpectNear(const ModelResult& actual, const ModelResult& expected) {
  EXPECT_NEAR(actual.loss, expected.loss, 1e-5 * expected.loss);
  for (const auto& [name, gradient] : expected.gradients) {
    // Softmax hardly feels a bias of all keys: what is left of its gradient is a cancellation,
    // and is measured by the gradient of the matrix beside it.
    std::string scale = name;
    if (name.ends_with("k_proj.bias")) scale.replace(name.size() - 4, 4, "weight");
    EXPECT_LE((actual.gradients.at(name) - gradient).norm().item<double>(),
              1e-5 * expected.gradients.at(scale).norm().item<double>())
        << name;
  }
}

}  // namespace ringleader::trainer::testing
