#include "worker/model/decoder/decoder.h"

#include <utility>

#include "model_shape/rope_frequencies.h"
#include "worker/model/decoder/cast_block.h"
#include "worker/model/decoder/layer_passes.h"
#include "worker/model/decoder/weight_casts.h"

namespace ringleader::model {

using torch::Tensor;

// One micro-batch on its way through the model.
class Decoder::Pass {
 public:
  Pass(Decoder& decoder, const TokenBatch& batch, attention::ContextAttention& attention)
      : decoder_(decoder),
        config_(decoder.config_),
        ops_(decoder.ops_),
        store_(decoder.store_),
        batch_(batch),
        attention_(attention),
        saved_(static_cast<int>(config_.layers),
               static_cast<int>(config_.layers - decoder.options_.recompute.host_layers),
               decoder.options_.host_copies) {
    const RopeFrequencies frequencies = ComputeRopeFrequencies(config_, batch.sequence_length);
    rotary_ = {.positions = batch.positions,
               .inverse_frequencies = decoder.OnDevice(frequencies.inverse, batch.tokens.device()),
               .scale = frequencies.attention_factor};
    ops_.PrepareRotary(rotary_);
  }

  // Returns the normalised hidden states.
  TokenOps::Norm Forward(bool keep) {
    ResidualStream stream{
        .base = torch::embedding(View(Slot("model.embed_tokens.weight"), 0, 1), batch_.tokens),
        .pending = {}};
    for (int layer = 0; layer < Layers(); ++layer) {
      SavedLayer saved;
      if (keep) saved_.MakeRoom(layer);
      const Weights weights = Read(layer, layer + 2);
      ForwardLayer(Context(layer, weights), layer, weights.parameters, attention_, stream,
                   keep ? &saved : nullptr);
      if (keep) saved_.Keep(layer, std::move(saved));
    }
    return ops_.NormForward(stream.base, stream.pending, View(FinalNorm(), Final(), -1),
                            config_.rms_norm_epsilon, Form::kValues);
  }

  // If `gradient` is set, the hidden states' gradient takes their place.
  TokenScores Score(const Tensor& hidden, bool gradient) {
    const Tensor head = View(Head(), HeadBlock(), -1);
    const Tensor d_head =
        gradient ? ViewGroup(Head(), store_.OpenGradient(HeadBlock()), Begin(HeadBlock()))
                 : Tensor();
    return LossPass(ops_, hidden, head, batch_.labels, d_head, decoder_.options_.loss_chunk_tokens);
  }

  // final: Forward's result, with the gradient of y in y.
  void Backward(TokenOps::Norm final) {
    const Tensor d_final = store_.OpenGradient(Final());
    Operand dx = ops_.NormBackward(
        final.y.values, final.sum, final.rstd, View(FinalNorm(), Final(), -1), {},
        ViewGroup(FinalNorm(), d_final, Begin(Final())), GradientForm(Layers() - 1));
    final = {};
    store_.CloseGradient(Final());
    for (int layer = Layers() - 1; layer >= 0; --layer) {
      const int block = layer + 1;
      const Weights weights = Read(layer, layer > 0 ? block - 1 : -1);
      const LayerParameters gradients = Layer(store_.OpenGradient(block));
      dx = BackwardLayer(Context(layer, weights), weights.parameters, gradients, saved_.Take(layer),
                         std::move(dx), GradientForm(layer - 1));
      saved_.Return(layer);
      store_.CloseGradient(block);
    }
    const SlotGroup embedding = Slot("model.embed_tokens.weight");
    ops_.AddEmbeddingGradient(dx.values, batch_.tokens,
                              ViewGroup(embedding, store_.OpenGradient(0), Begin(0)));
    store_.CloseGradient(0);
  }

  Tensor Logits(const Tensor& hidden) { return hidden.mm(View(Head(), HeadBlock(), -1).t()); }

 private:
  int Layers() const { return static_cast<int>(config_.layers); }
  bool ReadsCasts(int layer) const {
    return decoder_.reads_casts_ &&
           CastLayersOf(config_.layers, decoder_.options_.precision).contains(layer);
  }
  // In which a layer, or the embedding below them all, takes the gradient of what it puts out.
  Form GradientForm(int layer) const { return ReadsCasts(layer) ? Form::kBoth : Form::kValues; }
  // What a layer's products read.
  struct Weights {
    LayerParameters parameters;
    LayerCasts* casts = nullptr;  // null: products read the parameters
  };
  Weights Read(int layer, int next_block) {
    const int block = layer + 1;
    if (!ReadsCasts(layer)) return {.parameters = Layer(store_.Parameters(block, next_block))};
    CastLayer views = ViewCastBlock(decoder_.layout_, store_.CastParameters(block, next_block));
    casts_ = LayerCasts(ops_, std::move(views.weights));
    return {.parameters = std::move(views.parameters), .casts = &casts_};
  }
  LayerContext Context(int layer, const Weights& weights) {
    const RecomputePlan& plan = decoder_.options_.recompute;
    return {
        .config = config_,
        .ops = ops_,
        .recompute = layer >= config_.layers - plan.kept_layers ? Recompute::kNone : plan.recompute,
        .mlp_chunk_tokens = decoder_.options_.mlp_chunk_tokens,
        .rotary = rotary_,
        .casts = weights.casts};
  }
  int Final() const { return Layers() + 1; }
  int HeadBlock() const { return config_.tied_embeddings ? 0 : Final(); }
  int64_t Begin(int block) const { return decoder_.layout_.blocks[block].begin; }
  SlotGroup Slot(const char* name) const { return FindGroup(decoder_.layout_, "", {name}); }
  SlotGroup FinalNorm() const { return Slot("model.norm.weight"); }
  SlotGroup Head() const {
    return Slot(config_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
  }
  Tensor View(const SlotGroup& group, int block, int next) {
    return ViewGroup(group, store_.Parameters(block, next), Begin(block));
  }
  // All layers' blocks are laid out alike.
  LayerParameters Layer(const Tensor& block) const {
    return MakeLayerParameters(decoder_.layout_, 0, [&](const SlotGroup& group) {
      return ViewGroup(group, block, Begin(1));
    });
  }

  Decoder& decoder_;
  const ModelConfig& config_;
  const TokenOps& ops_;
  ParameterStore& store_;
  const TokenBatch& batch_;
  attention::ContextAttention& attention_;
  Rotary rotary_;
  SavedLayers saved_;
  LayerCasts casts_;  // of the layer in work
};

Decoder::Decoder(ModelConfig config, const TokenOps& ops, ParameterStore& store,
                 const DecoderOptions& options)
    : config_(std::move(config)),
      layout_(MakeParameterLayout(config_)),
      ops_(ops),
      store_(store),
      options_(options) {
  const RecomputePlan& plan = options_.recompute;
  TORCH_CHECK(plan.host_layers == 0 || plan.kept_layers == 0,
              "layers that keep more than others cannot wait in the host's slots");
  TORCH_CHECK(plan.host_layers >= 0 && plan.host_layers < config_.layers,
              "the last layer's activations stay on the device");
  const CastLayers cast = CastLayersOf(config_.layers, options_.precision);
  if (cast.count() > 0) store_.HoldCasts(ops_, cast);
}

Tensor Decoder::ForwardBackward(const TokenBatch& batch, attention::ContextAttention& attention) {
  const torch::NoGradGuard no_grad;
  Pass pass(*this, batch, attention);
  TokenOps::Norm final = pass.Forward(/*keep=*/true);
  Tensor loss = pass.Score(final.y.values, /*gradient=*/true).losses.sum(torch::kDouble);
  pass.Backward(std::move(final));
  return loss;
}

torch::Tensor Decoder::OnDevice(const std::vector<float>& inverse_frequencies,
                                torch::Device device) {
  if (inverse_frequencies != inverse_frequencies_ || inverse_on_device_.device() != device) {
    inverse_frequencies_ = inverse_frequencies;
    inverse_on_device_ = torch::tensor(inverse_frequencies).to(device);
  }
  return inverse_on_device_;
}

TokenScores Decoder::Score(const TokenBatch& batch, attention::ContextAttention& attention) {
  const torch::NoGradGuard no_grad;
  Pass pass(*this, batch, attention);
  return pass.Score(pass.Forward(/*keep=*/false).y.values, /*gradient=*/false);
}

Tensor Decoder::Logits(const TokenBatch& batch, attention::ContextAttention& attention) {
  const torch::NoGradGuard no_grad;
  Pass pass(*this, batch, attention);
  return pass.Logits(pass.Forward(/*keep=*/false).y.values);
}

}  // namespace ringleader::model
