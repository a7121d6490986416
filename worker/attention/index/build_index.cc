#include "worker/attention/index/build_index.h"

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "worker/attention/index/block_topk.h"
#include "worker/attention/index/vertical_slash.h"

namespace ringleader::attention {

absl::StatusOr<std::shared_ptr<LayerIndex>> BuildIndex(const patterns::AttentionOptions& options,
                                                       const patterns::LayerBudget& budget,
                                                       const IndexInputs& inputs,
                                                       IndexDevice& device) {
  auto index = std::make_shared<LayerIndex>();
  index->tile = options.tile;
  index->documents = inputs.documents;
  if (budget.dense) return index;
  switch (options.pattern) {
    case patterns::Pattern::kDense:
      return index;
    case patterns::Pattern::kSlidingWindow:
      index->pattern = kernels::TilePattern::kWindow;
      index->window = options.window;
      return index;
    case patterns::Pattern::kVerticalSlash:
      index->pattern = kernels::TilePattern::kToeplitz;
      RETURN_IF_ERROR(BuildVerticalSlash(options, budget, inputs, device, *index));
      return index;
    case patterns::Pattern::kBlockTopK:
      index->pattern = kernels::TilePattern::kCsr;
      RETURN_IF_ERROR(BuildBlockTopK(options, inputs, device, *index));
      return index;
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention pattern %d is unknown to this worker", static_cast<int>(options.pattern)));
}

}  // namespace ringleader::attention
