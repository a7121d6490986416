// Builds a layer's index on all ranks together. Everything that ranks merge is an integer sum, a
// maximum or a concatenation in rank order, so that the index is the same on any number of ranks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/reference/math/engine.h"
#include "patterns/attention_options.h"
#include "worker/attention/index/layer_index.h"
#include "worker/attention/stats/attention_stats.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// What it takes to build: one rank's view of a layer's call.
struct IndexInputs {
  kernels::TokenMajor<const float> q, k;  // this rank's
  float scale = 0.0f;
  std::function<kernels::ShardLayout(int rank)> layout_of;
  std::shared_ptr<const SequenceDocuments> documents = nullptr;  // null: one
};

class IndexBuilder {
 public:
  // `exposed_seconds` grows by the time spent in collectives.
  IndexBuilder(const patterns::AttentionOptions& options, comm::Communicator* communicator,
               kernels::reference::Engine* engine, double* exposed_seconds);

  // The index under `budget`. Adds verticals, slashes and recall to `stats`.
  absl::StatusOr<std::shared_ptr<LayerIndex>> Build(const patterns::LayerBudget& budget,
                                                    const IndexInputs& inputs, LayerStats& stats);

 private:
  absl::Status BuildVerticalSlash(const patterns::LayerBudget& budget, const IndexInputs& inputs,
                                  LayerIndex& index, LayerStats& stats);
  absl::Status BuildBlockTopK(const IndexInputs& inputs, LayerIndex& index);

  // The queries at these positions of the sequence, on every rank.
  absl::StatusOr<std::vector<float>> GatherQueries(const IndexInputs& inputs,
                                                   const std::vector<int64_t>& positions);
  absl::Status ReduceMax(std::vector<float>& values);
  // Exact, whatever the size of the sums.
  absl::Status ReduceSum(std::vector<int64_t>& values);

  const patterns::AttentionOptions& options_;
  comm::Communicator* const communicator_;
  kernels::reference::Engine& engine_;
  double* const exposed_seconds_;
};

}  // namespace ringleader::attention
