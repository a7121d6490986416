// The oracle of the vertical-slash index: fp64, as plainly as ringleader/kernels/index.h and
// MTraining (arXiv 2510.18830), Algorithm 1, define it, over the whole sequence on one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "patterns/attention_options.h"
#include "patterns/index/layer_index.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::attention::testing {

// A LayerIndex in the host's memory.
struct HostIndex {
  int32_t tile = 128;
  std::vector<uint64_t> diagonals;
  int32_t diagonal_words = 0;
  std::vector<int64_t> column_positions;
  std::vector<int32_t> column_counts;
  int32_t max_columns = 0;
  std::vector<std::byte> column_keys, column_values;
  std::vector<uint32_t> chosen, queries_chosen;
  int32_t block_size = 0;
  std::vector<uint32_t> groups_chosen;
  int32_t group_queries = 0;   // of a tile that chose them
  int32_t heads_together = 1;  // that have a row of them in common
  std::shared_ptr<const patterns::DeviceDocuments> documents;

  bool Covers(int head, int64_t delta) const {
    return (diagonals[int64_t{head} * diagonal_words + delta / 64] >> (delta % 64) & 1) != 0;
  }
  // Ascending.
  std::span<const int64_t> Columns(int head) const {
    if (max_columns == 0) return {};
    return {column_positions.data() + int64_t{head} * max_columns,
            static_cast<size_t>(column_counts[head])};
  }
};
// copy(to, from, bytes) copies from the device's memory.
HostIndex ToHost(const patterns::LayerIndex& index,
                 const std::function<void(void*, const void*, size_t)>& copy);
HostIndex ToHost(const patterns::LayerIndex& index);  // of the CPU engine

class IndexOracle {
 public:
  // q: [tokens, heads, d], k: [tokens, kv_heads, d], the whole sequence. `firsts`: of its
  // documents; empty: one. Reads `options`' tile and estimate_queries.
  IndexOracle(const kernels::TokenMajor<const float>& q, const kernels::TokenMajor<const float>& k,
              const patterns::AttentionOptions& options, std::span<const int64_t> firsts);

  // The masses of one head, where an estimate query's softmax has the mass 1.
  std::span<const double> ColumnMass(int head) const;    // [tokens]
  std::span<const double> DiagonalMass(int head) const;  // [blocks]

  // OK if `index` holds what the budget asks for: the elements of largest mass, forced ones first,
  // until the mass or the count is reached. Masses count as equal within `tolerance` of all masses
  // of a head, so that a choice within rounding of a threshold passes.
  absl::Status CheckSelection(const HostIndex& index, const patterns::AttentionOptions& options,
                              double tolerance) const;
  // Share of the attention of every `stride`-th estimate query that `index` keeps.
  double Recall(const HostIndex& index, int stride) const;

 private:
  const double& Share(int head, int64_t query, int64_t key) const {
    return shares_[(head * static_cast<int64_t>(positions_.size()) + query) * tokens_ + key];
  }

  const int64_t tokens_;
  const int heads_, tile_;
  std::vector<int64_t> positions_;                   // of the estimate queries
  std::vector<double> shares_;                       // [heads, E, tokens]: the softmax
  std::vector<double> column_mass_, diagonal_mass_;  // [heads, tokens], [heads, blocks]
};

}  // namespace ringleader::attention::testing
