// Sparse attention in which short documents (attention.dense_below) attend to all of their tokens:
// what is chosen for a whole sequence may hold no estimate and no columns of theirs.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>

#include "patterns/attention_options.h"
#include "worker/attention/runner/context_attention.h"

namespace ringleader::attention {

// `options` for dense attention over the same ranks.
patterns::AttentionOptions DenseOptions(const patterns::AttentionOptions& options);

// Where a sequence has documents of both kinds, both attentions compute it, and each row is taken
// from one of them: keys travel twice. Dense attention sees long documents cut into tiles, so that
// they cost it little; of a sequence with documents of one kind only one of the two computes.
class ShortDocumentAttention : public ContextAttention {
 public:
  // `sparse` has `options`, `dense` has DenseOptions(options), both over the ranks that share a
  // sequence, of which this is number `rank`.
  ShortDocumentAttention(const patterns::AttentionOptions& options,
                         std::unique_ptr<ContextAttention> sparse,
                         std::unique_ptr<ContextAttention> dense, int rank);

  AttentionOutput Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                          const torch::Tensor& v) override;
  void StartForward(int layer, const torch::Tensor& k, const torch::Tensor& v) override;
  void SetDense(bool dense) override;
  using ContextAttention::SetDocuments;
  // Causal alone: INVALID_ARGUMENT of documents with prefixes.
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding,
                            std::span<const int64_t> prefix_ends) override;
  // FAILED_PRECONDITION: documents that lie by themselves are dense.
  absl::Status SetLayout(const ring::DocumentLayout& layout) override;
  void SetStep(uint64_t step) override;
  void SetMove(float factor) override { sparse_->SetMove(factor); }
  void SetHeadBudgets(std::span<const patterns::LayerBudgets> layers) override {
    sparse_->SetHeadBudgets(layers);
  }
  void MarkMicroBatch() override;
  void SetCasts(bool casts) override { casts_ = casts; }
  // Tiles are those of both. Shares and counts of choices are the sparse one's.
  AttentionStats TakeStats() override;

 private:
  class Record;
  enum class Computes { kSparse, kDense, kBoth };
  Computes ComputesIn(int layer) const;

  const patterns::AttentionOptions options_;
  const int rank_;
  const std::set<int> dense_layers_;
  const std::unique_ptr<ContextAttention> sparse_, dense_;
  bool is_dense_ = false;                  // SetDense
  bool casts_ = false;                     // SetCasts; of an output that one of the two makes
  Computes computes_ = Computes::kSparse;  // the next forwards
  torch::Tensor is_short_;                 // [n] bool: of a short document; kBoth alone
  uint64_t causal_tiles_ = 0;              // of one head of the sequence
  // By layer, since the last TakeStats: what both computed.
  struct Twice {
    int calls = 0;
    uint64_t causal_tiles = 0;
  };
  std::map<int, Twice> counted_twice_;
  uint64_t twice_in_micro_batch_ = 0;  // causal tiles that both counted since the last mark
  std::vector<uint64_t> twice_by_micro_batch_;  // the same of the marked ones
};

}  // namespace ringleader::attention
