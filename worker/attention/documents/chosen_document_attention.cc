#include "worker/attention/documents/chosen_document_attention.h"

#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "patterns/pattern.h"

namespace ringleader::attention {

using torch::Tensor;

namespace {

void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), "attention: ", std::string(status.message()));
}

// One document of `tokens`, filled up to `filled`.
void SetDocument(ContextAttention& attention, int64_t tokens, int64_t filled) {
  std::vector<int64_t> firsts = {0};
  if (tokens < filled) firsts.push_back(tokens);
  Check(attention.SetDocuments(filled, firsts, filled - tokens));
}

int64_t RoundUp(int64_t tokens, int64_t multiple) {
  return (tokens + multiple - 1) / multiple * multiple;
}

// A tile of queries attends to all of itself under every pattern that keeps tiles.
int64_t DenseBelow(const patterns::AttentionOptions& options) {
  const bool keeps_tiles = !patterns::DefinitionOf(options.pattern).goes_by_distance();
  return std::max<int64_t>(options.dense_below, keeps_tiles ? options.tile + 1 : 0);
}

}  // namespace

class ChosenDocumentAttention::Record : public AttentionRecord {
 public:
  struct Call {
    Part part;
    AttentionOutput output;  // of `part` alone, its record in the end
  };

  // In the order of a rank's rows; the first `spread` are of the ring.
  Record(std::vector<Call> calls, size_t spread) : calls_(std::move(calls)), spread_(spread) {
    for (Call& call : calls_) call.output.out = call.output.lse = Tensor();
  }

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    if (spread_ == 0) return;
    const Call& first = calls_.front();
    first.output.record->StartBackward(Rows(k, first.part), Rows(v, first.part));
    is_started_ = true;
  }

  AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Tensor& d_out) const override {
    // Keys travel during the whole documents' part.
    if (!is_started_) StartBackward(k, v);
    is_started_ = false;
    std::vector<Tensor> dq(calls_.size()), dk(calls_.size()), dv(calls_.size());
    const auto run = [&](size_t i) {
      const Part& part = calls_[i].part;
      const AttentionGradients gradients = calls_[i].output.record->Backward(
          Rows(q, part), Rows(k, part), Rows(v, part), Rows(out, part),
          Rows(lse, part, /*dim=*/1).contiguous(), Rows(d_out, part));
      dq[i] = gradients.dq.narrow(0, 0, part.held);
      dk[i] = gradients.dk.narrow(0, 0, part.held);
      dv[i] = gradients.dv.narrow(0, 0, part.held);
    };
    for (size_t i = spread_; i < calls_.size(); ++i) run(i);
    for (size_t i = 0; i < spread_; ++i) run(i);
    return {.dq = torch::cat(dq), .dk = torch::cat(dk), .dv = torch::cat(dv)};
  }

 private:
  std::vector<Call> calls_;
  const size_t spread_;
  mutable bool is_started_ = false;  // the first one's backward, ahead of Backward
};

ChosenDocumentAttention::ChosenDocumentAttention(const patterns::AttentionOptions& options,
                                                 std::unique_ptr<ContextAttention> ring,
                                                 std::unique_ptr<ContextAttention> alone,
                                                 std::unique_ptr<ContextAttention> dense, int rank)
    : ranks_(options.ring.ranks()),
      rank_(rank),
      tile_(options.tile),
      dense_below_(DenseBelow(options)),
      ring_(std::move(ring)),
      alone_(std::move(alone)),
      dense_(std::move(dense)) {}

Tensor ChosenDocumentAttention::Rows(const Tensor& x, const Part& part, int64_t dim) {
  const Tensor held = x.narrow(dim, part.begin, part.held);
  if (part.rows == part.held) return held;
  std::vector<int64_t> sizes = held.sizes().vec();
  sizes[dim] = part.rows - part.held;
  return torch::cat({held, torch::zeros(sizes, held.options())}, dim);
}

void ChosenDocumentAttention::AttendTo(const Part& part) {
  SetDocument(*ring_, part.tokens, part.rows * ranks_);
  ring_->SetDense(is_dense_ || part.is_short);
}

AttentionOutput ChosenDocumentAttention::Forward(int layer, const Tensor& q, const Tensor& k,
                                                 const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TORCH_CHECK(parts_.has_value(), "attention: by documents, but nobody said where they lie");
  TORCH_CHECK(q.size(0) == parts_->rows, "attention: q has ", q.size(0),
              " tokens; of the sequence's documents this rank holds ", parts_->rows);
  forwards_.Count(layer, parts_->causal_tiles * static_cast<uint64_t>(q.size(1)));
  const auto call = [&](ContextAttention& attention, const Part& part) {
    return Record::Call{part,
                        attention.Forward(layer, Rows(q, part), Rows(k, part), Rows(v, part))};
  };
  if (!parts_->spread.empty()) {
    const Part& first = parts_->spread.front();
    AttendTo(first);
    ring_->StartForward(layer, Rows(k, first), Rows(v, first));
  }
  std::vector<Record::Call> of_whole;
  for (const Part& part : parts_->whole) {
    SetDocument(*alone_, part.tokens, part.rows);
    of_whole.push_back(call(*alone_, part));
  }
  if (parts_->dense.has_value()) of_whole.push_back(call(*dense_, *parts_->dense));
  std::vector<Record::Call> calls;
  for (const Part& part : parts_->spread) {
    if (!calls.empty()) AttendTo(part);
    calls.push_back(call(*ring_, part));
  }
  std::ranges::move(of_whole, std::back_inserter(calls));
  std::vector<Tensor> out, lse;
  for (const auto& [part, output] : calls) {
    out.push_back(output.out.narrow(0, 0, part.held));
    lse.push_back(output.lse.narrow(1, 0, part.held));
  }
  return {.out = torch::cat(out),
          .lse = torch::cat(lse, /*dim=*/1),
          .record = std::make_shared<Record>(std::move(calls), parts_->spread.size())};
}

void ChosenDocumentAttention::SetDense(bool dense) {
  is_dense_ = dense;
  alone_->SetDense(dense);
}

absl::Status ChosenDocumentAttention::SetDocuments(int64_t /*tokens*/, std::span<const int64_t>,
                                                   int64_t /*padding*/, std::span<const int64_t>) {
  return absl::FailedPreconditionError(
      "attention by documents is told where they lie, not only where they start");
}

absl::Status ChosenDocumentAttention::SetLayout(const ring::DocumentLayout& layout) {
  parts_.reset();
  if (layout.ranks() != ranks_ || !layout.is_apart()) {
    return absl::InvalidArgumentError(
        "documents: laid out for another number of ranks than share the sequence, or in one ring, "
        "which patterns that go by distances do not take");
  }
  Parts parts = {.rows = layout.local_tokens()};
  int64_t next = 0;
  const auto take = [&](int64_t held, int64_t rows, int64_t tokens) {
    const Part part = {
        .begin = next, .held = held, .rows = rows, .tokens = tokens, .is_short = IsShort(tokens)};
    next += held;
    return part;
  };
  const int64_t round = int64_t{ranks_} * layout.stripe();
  for (const int64_t tokens : layout.SpreadLengths()) {
    parts.spread.push_back(
        take(ring::DocumentLayout::HeldOf(tokens, rank_, ranks_, layout.stripe()),
             RoundUp(tokens, round) / ranks_, tokens));
  }
  std::vector<int64_t> firsts;  // of what is dense
  int64_t filled = 0;
  for (const int64_t tokens : layout.WholeLengths(rank_)) {  // the longest first
    if (!IsShort(tokens)) {
      parts.whole.push_back(take(tokens, RoundUp(tokens, tile_), tokens));
      continue;
    }
    firsts.push_back(filled);
    filled += tokens;
  }
  const int64_t dense = layout.local_tokens() - next;
  for (; filled < dense; filled += tile_) firsts.push_back(filled);  // filler, cut into tiles
  if (dense > 0) {
    parts.dense = take(dense, dense, dense);
    RETURN_IF_ERROR(dense_->SetDocuments(dense, firsts));
  }
  const int64_t blocks = (layout.tokens() + tile_ - 1) / tile_;
  parts.causal_tiles =
      static_cast<uint64_t>(std::max<int64_t>(1, blocks * (blocks + 1) / 2 / ranks_));
  parts_ = std::move(parts);
  return absl::OkStatus();
}

void ChosenDocumentAttention::SetStep(uint64_t step) {
  ring_->SetStep(step);
  alone_->SetStep(step);
}

void ChosenDocumentAttention::SetMove(float factor) {
  ring_->SetMove(factor);
  alone_->SetMove(factor);
}

void ChosenDocumentAttention::MarkMicroBatch() {
  ring_->MarkMicroBatch();
  alone_->MarkMicroBatch();
  dense_->MarkMicroBatch();
}

AttentionStats ChosenDocumentAttention::TakeStats() {
  AttentionStats stats = ring_->TakeStats();
  Add(alone_->TakeStats(), &stats);
  AttentionStats dense = dense_->TakeStats();
  for (LayerStats& layer : dense.layers) layer.calls = 0;  // without a choice to take means over
  Add(dense, &stats);
  for (LayerStats& layer : stats.layers) layer.tiles_per_ring_step.resize(ranks_);
  forwards_.MoveTo(&stats);
  return stats;
}

}  // namespace ringleader::attention
