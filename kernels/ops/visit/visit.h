// What an attention operator visits, between LibTorch's tensors and the engines' structs: the same
// on the CPU and on GPUs. Each sequence of a batch has lists of its own.
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/earlier_blocks.h"

namespace ringleader::kernels::ops {

// [batch, heads, tokens, head_dim]
struct AttentionSizes {
  int64_t batch = 0, heads = 0, kv_heads = 0, tokens = 0, head_dim = 0;

  ShardLayout layout() const { return {.tokens = tokens}; }
  int64_t Tiles(int64_t tile) const { return (tokens + tile - 1) / tile; }
};

// Throws c10::Error, naming the tensor, unless q and k (and v) are [batch, heads, tokens, head_dim]
// of one sequence length and device, and heads a multiple of k's.
AttentionSizes SizesOf(const torch::Tensor& q, const torch::Tensor& k);
AttentionSizes SizesOf(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v);

// Null, or the [tokens] starts of sequence `b`. Throws unless documents are [batch, tokens] int32,
// dense, on q's device.
void CheckDocuments(const std::optional<torch::Tensor>& documents, const torch::Tensor& q,
                    const AttentionSizes& sizes);
const int32_t* StartsOf(const std::optional<torch::Tensor>& documents, int64_t b);

// Throws c10::Error, naming it, unless block_size is whole tiles, and so many tokens at most.
inline constexpr int64_t kMostBlockTokens = int64_t{1} << 30;
void CheckBlockSize(const char* name, int64_t block_size, int64_t tile);

// ChosenGroups' words of a head, and one where tiles have none.
inline int64_t GroupWords(const AttentionSizes& sizes) {
  return std::max<int64_t>(GroupRows(sizes.layout()).back(), 1);
}

// Throws c10::Error, naming it, unless a choice of key groups can have it.
void CheckGroupDensity(double density);

// What a query keeps of the blocks of a choice at most, its own counted, as QueryGateStep has it:
// so many, or a share of those that it sees. Neither: not known.
struct KeptBlocks {
  int64_t topk_blocks = 0;
  double density = 0;
};

// A selection as the operators' arguments say it. `lists`, by pattern:
//   kFull, kCausal, kWindow: none
//   kToeplitz: diagonals [batch, heads, words] int64; then, if there are columns, positions [batch,
//     heads, max_columns] int64 and counts [batch, heads] int32
//   kCsr: row_offsets [batch, heads, tiles + 1], columns, column_offsets [batch, heads, tiles + 1]
//     and rows, int32, offsets into the lists of the whole batch, each ascending; then, if queries
//     chose for themselves, their bits [batch, heads, blocks, QueryWords(tokens)] int32
//   kUnmaskedLists: the four lists of kCsr, in whole tiles
//   kKeyGroups: diagonals, as kToeplitz's, with each tile's own alone; ChosenGroups' bits, [batch,
//     heads, words] int32, and rows, [tiles + 1] int64
// The last two stand beside TilePattern's. kUnmaskedLists is kCsr of which queries see every key:
// it walks the instances of kCsr, for which all keys lie before all queries. kKeyGroups is
// kToeplitz with groups of keys that tiles of 64 queries chose (KeyGroupGateStep), of `density`.
inline constexpr int64_t kUnmaskedLists = 5, kKeyGroups = 6;

class Visit {
 public:
  // `intervals`: TileSelection::intervals, [batch, tokens, 4] int32, with kFull and kCsr.
  // `size`: tokens of the window, or of a block that queries chose. `kept`: how many of these a
  // query chose at most. Throws c10::Error naming what does not fit. Values in the lists are read
  // on the CPU alone, where a tile or a column that is not there is refused.
  Visit(const torch::Tensor& q, const AttentionSizes& sizes, int64_t pattern,
        torch::TensorList lists, const std::optional<torch::Tensor>& documents,
        const std::optional<torch::Tensor>& intervals, int64_t tile, int64_t size,
        const KeptBlocks& kept);

  // Where queries and keys lie, to the calls over tiles.
  ShardLayout query_layout() const { return Layout(1); }
  ShardLayout key_layout() const { return Layout(0); }
  // What sequence `b` visits.
  TileSelection Tiles(int64_t b) const;
  ColumnSelection Columns(int64_t b) const;
  // The groups that tiles of queries chose beside what Tiles() says, and how many one keeps at
  // most.
  bool has_groups() const { return has_groups_; }
  ChosenGroups Groups(int64_t b) const;
  int32_t most_groups() const;
  // How queries that chose blocks are gathered, of any sequence; nothing where their tiles are to
  // be visited whole, or it is not known how many they chose.
  std::optional<QueryRowsPlan> Rows() const;
  int64_t max_columns() const {
    const bool has_columns = pattern_ == TilePattern::kToeplitz && lists_.size() == 3;
    return has_columns && !has_groups_ ? lists_[1].size(2) : 0;
  }

 private:
  void CheckGroups(const torch::Tensor& q) const;
  ShardLayout Layout(int32_t half) const {
    if (!is_unmasked_) return sizes_.layout();
    return {.ranks = 2, .rank = half, .tokens = 2 * sizes_.tokens};
  }

  const AttentionSizes sizes_;
  const bool is_unmasked_, has_groups_;
  const TilePattern pattern_;
  const std::vector<torch::Tensor> lists_;
  const std::optional<torch::Tensor> documents_;
  const std::optional<torch::Tensor> intervals_;
  const int64_t tile_, size_;
  const KeptBlocks kept_;
};

}  // namespace ringleader::kernels::ops
