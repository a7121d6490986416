#include "worker/attention/documents/document_attention.h"

#include <torch/torch.h>

#include <utility>

#include "base/status_macros.h"
#include "ring/band_tiles.h"

namespace ringleader::attention {

using torch::Tensor;

namespace {

// The first `spread` tokens, and the others: of [n, …] tensors along 0, of lse, [heads, n],
// along 1.
Tensor Spread(const Tensor& x, int64_t spread, int dim = 0) {
  return x.narrow(dim, 0, spread);
}
Tensor Whole(const Tensor& x, int64_t spread, int dim = 0) {
  return x.narrow(dim, spread, x.size(dim) - spread);
}

}  // namespace

patterns::AttentionOptions AloneOptions(const patterns::AttentionOptions& options) {
  patterns::AttentionOptions alone = options;
  alone.by_documents = false;
  alone.layout = kernels::LayoutKind::kContiguous;
  alone.stripe = 0;
  alone.ring = {};
  alone.head_ranks = alone.head_groups = 1;
  return alone;
}

class DocumentAttention::Record : public AttentionRecord {
 public:
  Record(int64_t spread, std::shared_ptr<const AttentionRecord> ring,
         std::shared_ptr<const AttentionRecord> alone)
      : spread_(spread), ring_(std::move(ring)), alone_(std::move(alone)) {}

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    if (ring_ == nullptr) return;
    ring_->StartBackward(Spread(k, spread_), Spread(v, spread_));
    is_started_ = true;
  }

  AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Tensor& d_out) const override {
    if (alone_ == nullptr) return ring_->Backward(q, k, v, out, lse, d_out);
    const auto of_whole = [&](const Tensor& x) { return Whole(x, spread_); };
    if (ring_ == nullptr) return alone_->Backward(q, k, v, out, lse, d_out);
    // Keys travel during the whole documents' part.
    if (!std::exchange(is_started_, false))
      ring_->StartBackward(Spread(k, spread_), Spread(v, spread_));
    const AttentionGradients whole =
        alone_->Backward(of_whole(q), of_whole(k), of_whole(v), of_whole(out),
                         Whole(lse, spread_, 1).contiguous(), of_whole(d_out));
    const auto of_spread = [&](const Tensor& x) { return Spread(x, spread_); };
    const AttentionGradients spread =
        ring_->Backward(of_spread(q), of_spread(k), of_spread(v), of_spread(out),
                        Spread(lse, spread_, 1).contiguous(), of_spread(d_out));
    return {.dq = torch::cat({spread.dq, whole.dq}),
            .dk = torch::cat({spread.dk, whole.dk}),
            .dv = torch::cat({spread.dv, whole.dv})};
  }

 private:
  const int64_t spread_;
  // Null where this rank has none of these tokens.
  const std::shared_ptr<const AttentionRecord> ring_, alone_;
  mutable bool is_started_ = false;  // the ring's backward, ahead of Backward
};

DocumentAttention::DocumentAttention(const patterns::AttentionOptions& options,
                                     std::unique_ptr<ContextAttention> ring,
                                     std::unique_ptr<ContextAttention> alone, int rank)
    : ranks_(options.ring.ranks()),
      rank_(rank),
      tile_(options.tile),
      ring_(std::move(ring)),
      alone_(std::move(alone)) {}

AttentionOutput DocumentAttention::Forward(int layer, const Tensor& q, const Tensor& k,
                                           const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TORCH_CHECK(parts_.has_value(), "attention: by documents, but nobody said where they lie");
  const auto [spread, whole, causal_tiles] = *parts_;
  TORCH_CHECK(q.size(0) == spread + whole, "attention: q has ", q.size(0),
              " tokens; of the sequence's documents this rank holds ", spread, " + ", whole);
  forwards_.Count(layer, causal_tiles * static_cast<uint64_t>(q.size(1)));
  AttentionOutput of_spread, of_whole;
  if (spread > 0 && whole > 0) {
    ring_->StartForward(layer, Spread(k, spread), Spread(v, spread));
  }
  if (whole > 0) {
    of_whole = alone_->Forward(layer, Whole(q, spread), Whole(k, spread), Whole(v, spread));
  }
  if (spread > 0) {
    of_spread = ring_->Forward(layer, Spread(q, spread), Spread(k, spread), Spread(v, spread));
  }
  auto record = std::make_shared<Record>(spread, of_spread.record, of_whole.record);
  if (spread == 0 || whole == 0) {
    AttentionOutput& only = spread > 0 ? of_spread : of_whole;
    return {.out = only.out, .lse = only.lse, .record = std::move(record)};
  }
  return {.out = torch::cat({of_spread.out, of_whole.out}),
          .lse = torch::cat({of_spread.lse, of_whole.lse}, /*dim=*/1),
          .record = std::move(record)};
}

void DocumentAttention::SetDense(bool dense) {
  ring_->SetDense(dense);
  alone_->SetDense(dense);
}

absl::Status DocumentAttention::SetDocuments(int64_t /*tokens*/, std::span<const int64_t>,
                                             int64_t /*padding*/, std::span<const int64_t>) {
  return absl::FailedPreconditionError(
      "attention by documents is told where they lie, not only where they start");
}

absl::Status DocumentAttention::SetLayout(const ring::DocumentLayout& layout) {
  parts_.reset();
  if (layout.ranks() != ranks_) {
    return absl::InvalidArgumentError(
        "documents: laid out for another number of ranks than share the sequence");
  }
  const int64_t spread = layout.spread_tokens()[rank_], whole = layout.local_tokens() - spread;
  if (layout.has_spread()) RETURN_IF_ERROR(ring_->SetLayout(layout));
  if (whole > 0) RETURN_IF_ERROR(alone_->SetDocuments(whole, layout.WholeFirsts(rank_)));
  const kernels::ShardLayout stripes = {.kind = kernels::LayoutKind::kStriped,
                                        .ranks = ranks_,
                                        .rank = rank_,
                                        .stripe = layout.stripe(),
                                        .tokens = layout.tokens()};
  parts_ = Parts{.spread = spread,
                 .whole = whole,
                 .causal_tiles = static_cast<uint64_t>(ring::CausalTiles(stripes, tile_))};
  return absl::OkStatus();
}

void DocumentAttention::SetStep(uint64_t step) {
  ring_->SetStep(step);
  alone_->SetStep(step);
}

void DocumentAttention::MarkMicroBatch() {
  ring_->MarkMicroBatch();
  alone_->MarkMicroBatch();
}

AttentionStats DocumentAttention::TakeStats() {
  AttentionStats stats = ring_->TakeStats();
  Add(alone_->TakeStats(), &stats);
  for (LayerStats& layer : stats.layers) layer.tiles_per_ring_step.resize(ranks_);
  forwards_.MoveTo(&stats);
  return stats;
}

}  // namespace ringleader::attention
