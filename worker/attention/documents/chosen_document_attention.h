// Attention under any pattern but dense where documents lie apart (ring/document_layout.h): what a
// document attends to is chosen for it alone. Each spread document goes through a ring of its own,
// each whole one is attended to by its rank, and what is short is attended to densely, together.
//
// A spread document is filled up to whole stripes of all ranks here, a whole one to whole tiles,
// with rows of zeros that are its sequence's padding; nobody else sees them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "patterns/attention_options.h"
#include "ring/document_layout.h"
#include "worker/attention/documents/merged_stats.h"
#include "worker/attention/runner/context_attention.h"

namespace ringleader::attention {

class ChosenDocumentAttention : public ContextAttention {
 public:
  // `ring` has `options`, over the ranks that share a sequence, of which this is number `rank`;
  // `alone` has AloneOptions(options), and `dense` has DenseOptions() of those.
  ChosenDocumentAttention(const patterns::AttentionOptions& options,
                          std::unique_ptr<ContextAttention> ring,
                          std::unique_ptr<ContextAttention> alone,
                          std::unique_ptr<ContextAttention> dense, int rank);

  // c10::Error before the first SetLayout.
  AttentionOutput Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                          const torch::Tensor& v) override;
  void SetDense(bool dense) override;
  using ContextAttention::SetDocuments;
  // FAILED_PRECONDITION: SetLayout says where documents lie.
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding,
                            std::span<const int64_t> prefix_ends) override;
  // INVALID_ARGUMENT unless spread documents are apart, over as many ranks.
  absl::Status SetLayout(const ring::DocumentLayout& layout) override;
  void SetStep(uint64_t step) override;
  void SetMove(float factor) override;
  void MarkMicroBatch() override;
  // Tiles of whole documents count as those of the ring's first step, which is a rank's own. The
  // causal tiles are the rank's share of the sequence's as if it were one document.
  AttentionStats TakeStats() override;

 private:
  class Record;
  // What one call attends to: a rank's rows [begin, begin + held), filled up to `rows`.
  struct Part {
    int64_t begin = 0, held = 0, rows = 0;
    int64_t tokens = 0;     // of the document
    bool is_short = false;  // attended to densely
  };
  struct Parts {
    std::vector<Part> spread = {};   // of one document each
    std::vector<Part> whole = {};    // likewise
    std::optional<Part> dense = {};  // short whole documents, then filler
    int64_t rows = 0;                // of all
    uint64_t causal_tiles = 0;       // of one head
  };

  static torch::Tensor Rows(const torch::Tensor& x, const Part& part, int64_t dim = 0);
  // Has the next forward of the ring attend to `part`.
  void AttendTo(const Part& part);
  bool IsShort(int64_t tokens) const { return tokens < dense_below_; }

  const int ranks_, rank_, tile_;
  const int64_t dense_below_;
  const std::unique_ptr<ContextAttention> ring_, alone_, dense_;
  bool is_dense_ = false;       // SetDense
  std::optional<Parts> parts_;  // of the next forwards
  ForwardCounts forwards_;
};

}  // namespace ringleader::attention
