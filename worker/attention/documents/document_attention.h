// Dense attention where documents lie as ring/document_layout.h has it: those that are spread go
// through a ring of all ranks, and each rank attends to its whole ones by itself, while keys
// travel. Nothing travels where no document is spread. (Other patterns:
// chosen_document_attention.h.)
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "patterns/attention_options.h"
#include "ring/document_layout.h"
#include "worker/attention/documents/merged_stats.h"
#include "worker/attention/runner/context_attention.h"

namespace ringleader::attention {

// `options` for one rank by itself, as it attends to its whole documents.
patterns::AttentionOptions AloneOptions(const patterns::AttentionOptions& options);

class DocumentAttention : public ContextAttention {
 public:
  // `ring` has `options`, over the ranks that share a sequence; `alone` has AloneOptions(options).
  DocumentAttention(const patterns::AttentionOptions& options,
                    std::unique_ptr<ContextAttention> ring, std::unique_ptr<ContextAttention> alone,
                    int rank);

  // c10::Error before the first SetLayout.
  AttentionOutput Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                          const torch::Tensor& v) override;
  void SetDense(bool dense) override;
  using ContextAttention::SetDocuments;
  // FAILED_PRECONDITION: SetLayout says where documents lie.
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding,
                            std::span<const int64_t> prefix_ends) override;
  absl::Status SetLayout(const ring::DocumentLayout& layout) override;
  void SetStep(uint64_t step) override;
  // Dense attention has no choice to move.
  void SetMove(float /*factor*/) override {}
  void MarkMicroBatch() override;
  // Tiles of whole documents count as those of the ring's first step, which is a rank's own. The
  // causal tiles are those of the sequence as if it were one document in stripes.
  AttentionStats TakeStats() override;

 private:
  class Record;
  // A rank's tokens: of spread documents, then of whole ones.
  struct Parts {
    int64_t spread = 0, whole = 0;
    uint64_t causal_tiles = 0;  // of one head
  };

  const int ranks_, rank_, tile_;
  const std::unique_ptr<ContextAttention> ring_, alone_;
  std::optional<Parts> parts_;  // of the next forwards
  ForwardCounts forwards_;
};

}  // namespace ringleader::attention
