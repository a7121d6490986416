// Attention of queries that chose blocks each for itself (TileSelection::choice) by rows that are
// gathered (kernels/index/rows/query_rows.h), for the operators of whole sequences and for the hops
// of a ring: tiles of each query's own block, as any tiles are attended to, and the rows of what
// lies before it.
#pragma once

#include <torch/types.h>

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/index/gates/blocks.h"
#include "kernels/index/rows/query_rows.h"
#include "kernels/sm90/attention.h"
#include "ringleader/kernels/earlier_blocks.h"

namespace ringleader::kernels::ops {

// Lists what `choice`, whose capacity and outputs are set here, says: a tile of queries keeps at
// most `kept_blocks` blocks. Sets kCsr's lists in *tiles and returns their memory, on like's
// device.
absl::StatusOr<std::vector<torch::Tensor>> ListTiles(index::TileListsArgs choice,
                                                     int64_t kept_blocks, const torch::Tensor& like,
                                                     TileSelection* tiles);

// A choice in which each tile of queries keeps its own block alone, as bits: [heads, query tiles,
// BlockWords(blocks)] int32.
absl::StatusOr<torch::Tensor> OwnBlocks(const ShardLayout& queries, int32_t heads, int32_t tile,
                                        int32_t block_size, const torch::Tensor& like);

// The rows of local queries and one owner's keys.
class QueryRows {
 public:
  // `tiles`: the choice, its tile, and starts of documents. `like`: a tensor on the queries'
  // device.
  static absl::StatusOr<QueryRows> List(const TileSelection& tiles, const ShardLayout& queries,
                                        const ShardLayout& keys, int32_t heads,
                                        const QueryRowsPlan& plan, const torch::Tensor& like);

  // What `args` says, for the rows: their shares are added to its sums. Of args.tiles nothing is
  // read, and its layouts are those that were listed.
  absl::Status Attend(const AttentionForwardArgs<__nv_bfloat16>& args) const;
  absl::Status AttendBackward(const AttentionBackwardArgs<__nv_bfloat16>& args) const;

  // Adds the tiles of all heads' rows to *tiles, on the device.
  absl::Status CountTiles(int64_t* tiles) const;

 private:
  QueryRows(const index::QueryRowsArgs& lists, const int32_t* document_starts,
            const QueryRowsPlan& plan, const torch::TensorOptions& device)
      : lists_(lists), document_starts_(document_starts), plan_(plan), device_(device) {}

  index::QueryRowsArgs lists_;
  const int32_t* document_starts_;
  QueryRowsPlan plan_;
  torch::TensorOptions device_;
  std::vector<torch::Tensor> memory_;  // of lists_
};

}  // namespace ringleader::kernels::ops
