#include "worker/attention/documents/short_document_attention.h"

#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "ring/band_tiles.h"

namespace ringleader::attention {

using torch::Tensor;

namespace {

// Documents of the sequence as dense attention sees them.
struct Documents {
  bool has_short = false, has_long = false;
  std::vector<int64_t> firsts;     // short ones as they are, long ones cut at tiles
  std::vector<uint8_t> are_short;  // by position
};

Documents Cut(int64_t tokens, std::span<const int64_t> firsts, int64_t padding,
              const patterns::AttentionOptions& options) {
  Documents documents;
  documents.are_short.resize(tokens, 0);
  const std::vector<int64_t> one = {0};
  const std::span<const int64_t> starts = firsts.empty() ? one : firsts;
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t first = starts[i], end = i + 1 < starts.size() ? starts[i + 1] : tokens;
    documents.firsts.push_back(first);
    const bool is_padding = padding > 0 && first >= tokens - padding;
    if (!is_padding && end - first < options.dense_below) {
      documents.has_short = true;
      std::fill(documents.are_short.begin() + first, documents.are_short.begin() + end, 1);
      continue;
    }
    documents.has_long |= !is_padding;
    for (int64_t next = (first / options.tile + 1) * options.tile; next < end;
         next += options.tile) {
      documents.firsts.push_back(next);
    }
  }
  return documents;
}

}  // namespace

patterns::AttentionOptions DenseOptions(const patterns::AttentionOptions& options) {
  return {.tile = options.tile,
          .layout = options.layout,
          .stripe = options.stripe,
          .ring = options.ring,
          .bf16_gradients = options.bf16_gradients,
          .deterministic = options.deterministic,
          .threads = options.threads};
}

class ShortDocumentAttention::Record : public AttentionRecord {
 public:
  Record(std::shared_ptr<const AttentionRecord> sparse,
         std::shared_ptr<const AttentionRecord> dense, Tensor is_short)
      : sparse_(std::move(sparse)), dense_(std::move(dense)), is_short_(std::move(is_short)) {}

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    sparse_->StartBackward(k, v);
  }

  // A row without a gradient of its output gives none to anybody. Its logarithm is taken away, too:
  // of the other choice it would say nothing of the probabilities here, which might overflow.
  AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Tensor& d_out) const override {
    const Tensor rows = is_short_.view({-1, 1, 1});
    const Tensor of_heads = is_short_.view({1, -1});
    constexpr double kNobody = -std::numeric_limits<double>::infinity();
    AttentionGradients gradients = sparse_->Backward(
        q, k, v, out, lse.masked_fill(of_heads, kNobody), d_out.masked_fill(rows, 0));
    const AttentionGradients dense =
        dense_->Backward(q, k, v, out, lse.masked_fill(of_heads.logical_not(), kNobody),
                         d_out.masked_fill(rows.logical_not(), 0));
    gradients.dq += dense.dq;
    gradients.dk += dense.dk;
    gradients.dv += dense.dv;
    return gradients;
  }

 private:
  const std::shared_ptr<const AttentionRecord> sparse_, dense_;
  const Tensor is_short_;
};

ShortDocumentAttention::ShortDocumentAttention(const patterns::AttentionOptions& options,
                                               std::unique_ptr<ContextAttention> sparse,
                                               std::unique_ptr<ContextAttention> dense, int rank)
    : options_(options),
      rank_(rank),
      dense_layers_(options.dense_layers.begin(), options.dense_layers.end()),
      sparse_(std::move(sparse)),
      dense_(std::move(dense)) {}

ShortDocumentAttention::Computes ShortDocumentAttention::ComputesIn(int layer) const {
  return is_dense_ || dense_layers_.contains(layer) ? Computes::kSparse : computes_;
}

AttentionOutput ShortDocumentAttention::Forward(int layer, const Tensor& q, const Tensor& k,
                                                const Tensor& v) {
  const torch::NoGradGuard no_grad;
  const Computes computes = ComputesIn(layer);
  for (ContextAttention* const attention : {sparse_.get(), dense_.get()}) {
    attention->SetCasts(casts_ && computes != Computes::kBoth);
  }
  switch (computes) {
    case Computes::kSparse:
      return sparse_->Forward(layer, q, k, v);
    case Computes::kDense:
      return dense_->Forward(layer, q, k, v);
    case Computes::kBoth:
      break;
  }
  TORCH_CHECK(q.size(0) == is_short_.size(0), "attention: q has ", q.size(0),
              " tokens; of the sequence's documents this rank holds ", is_short_.size(0));
  // From pinned memory the copy waits for nothing.
  if (q.is_cuda() && !is_short_.is_cuda()) is_short_ = is_short_.pin_memory();
  is_short_ = is_short_.to(q.device(), is_short_.scalar_type(), /*non_blocking=*/q.is_cuda());
  const AttentionOutput sparse = sparse_->Forward(layer, q, k, v);
  const AttentionOutput dense = dense_->Forward(layer, q, k, v);
  Twice& twice = counted_twice_[layer];
  ++twice.calls;
  twice.causal_tiles += causal_tiles_ * static_cast<uint64_t>(q.size(1));
  twice_in_micro_batch_ += causal_tiles_ * static_cast<uint64_t>(q.size(1));
  return {.out = torch::where(is_short_.view({-1, 1, 1}), dense.out, sparse.out),
          .lse = torch::where(is_short_.view({1, -1}), dense.lse, sparse.lse),
          .record = std::make_shared<Record>(sparse.record, dense.record, is_short_)};
}

void ShortDocumentAttention::StartForward(int layer, const Tensor& k, const Tensor& v) {
  (ComputesIn(layer) == Computes::kDense ? dense_ : sparse_)->StartForward(layer, k, v);
}

void ShortDocumentAttention::SetDense(bool dense) {
  is_dense_ = dense;
  sparse_->SetDense(dense);
}

absl::Status ShortDocumentAttention::SetDocuments(int64_t tokens, std::span<const int64_t> firsts,
                                                  int64_t padding,
                                                  std::span<const int64_t> prefix_ends) {
  if (!prefix_ends.empty()) {
    return absl::InvalidArgumentError("attention.dense_below: short documents have no prefixes");
  }
  RETURN_IF_ERROR(sparse_->SetDocuments(tokens, firsts, padding));
  const Documents documents = Cut(tokens, firsts, padding, options_);
  computes_ = !documents.has_short ? Computes::kSparse
              : documents.has_long ? Computes::kBoth
                                   : Computes::kDense;
  if (computes_ == Computes::kSparse) return absl::OkStatus();
  RETURN_IF_ERROR(dense_->SetDocuments(tokens, documents.firsts));
  const int ranks = options_.ring.ranks();
  kernels::ShardLayout layout = patterns::LayoutOf(options_, ranks, rank_, tokens / ranks);
  if (layout.stripe == 0) layout.stripe = options_.tile;
  causal_tiles_ = static_cast<uint64_t>(ring::CausalTiles(layout, options_.tile));
  is_short_ = torch::empty({layout.local_tokens()}, torch::kBool);
  bool* const rows = is_short_.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < layout.local_tokens(); ++i) {
    rows[i] = documents.are_short[layout.Position(i)] != 0;
  }
  return absl::OkStatus();
}

absl::Status ShortDocumentAttention::SetLayout(const ring::DocumentLayout& /*layout*/) {
  return absl::FailedPreconditionError(
      "documents that lie by themselves are dense: attention.dense_below says nothing of them");
}

void ShortDocumentAttention::SetStep(uint64_t step) {
  sparse_->SetStep(step);
  dense_->SetStep(step);
}

void ShortDocumentAttention::MarkMicroBatch() {
  sparse_->MarkMicroBatch();
  dense_->MarkMicroBatch();
  twice_by_micro_batch_.push_back(std::exchange(twice_in_micro_batch_, 0));
}

AttentionStats ShortDocumentAttention::TakeStats() {
  AttentionStats stats = sparse_->TakeStats();
  const AttentionStats dense = dense_->TakeStats();
  stats.seconds.index += dense.seconds.index;
  stats.seconds.forward += dense.seconds.forward;
  stats.seconds.backward += dense.seconds.backward;
  stats.seconds.exposed_communication += dense.seconds.exposed_communication;
  stats.ring_bytes.sent += dense.ring_bytes.sent;
  stats.ring_bytes.whole += dense.ring_bytes.whole;
  stats.layers.resize(std::max(stats.layers.size(), dense.layers.size()));
  for (size_t i = 0; i < dense.layers.size(); ++i) {
    LayerStats& layer = stats.layers[i];
    const LayerStats& more = dense.layers[i];
    layer.tiles_per_ring_step.resize(
        std::max(layer.tiles_per_ring_step.size(), more.tiles_per_ring_step.size()));
    for (size_t step = 0; step < more.tiles_per_ring_step.size(); ++step) {
      layer.tiles_per_ring_step[step] += more.tiles_per_ring_step[step];
    }
    const Twice& twice = counted_twice_[static_cast<int>(i)];
    layer.calls += more.calls - twice.calls;
    layer.causal_tiles += more.causal_tiles - twice.causal_tiles;
    if (layer.causal_tiles > 0) {
      layer.density =
          static_cast<double>(layer.TotalTiles()) / static_cast<double>(layer.causal_tiles);
    }
  }
  counted_twice_.clear();
  for (size_t i = 0; i < stats.micro_batches.size(); ++i) {
    stats.micro_batches[i].visited += dense.micro_batches[i].visited;
    stats.micro_batches[i].causal += dense.micro_batches[i].causal - twice_by_micro_batch_[i];
  }
  twice_by_micro_batch_.clear();
  twice_in_micro_batch_ = 0;  // of an evaluation, which marks none
  return stats;
}

}  // namespace ringleader::attention
