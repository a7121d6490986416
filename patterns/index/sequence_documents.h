// The documents packed into one sequence, as attention sees them: a query attends to keys of its
// own document alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/index/device_array.h"
#include "patterns/index/visible_keys.h"
#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::patterns {

// One rank's view of a sequence of several documents. Immutable.
struct SequenceDocuments {
  int64_t tokens = 0;                 // of the sequence
  int64_t content = 0;                // those before the padding at the end
  std::vector<int64_t> firsts;        // positions of the documents' first tokens
  std::vector<int32_t> local_starts;  // [n]: TileSelection::document_starts of this rank
  // MeanKeys::starts of the sequence: of documents under a causal mask.
  std::vector<int32_t> key_starts = {};
  // Where the mask is not causal, in their place: TileSelection::intervals of this rank, [n] each,
  // of what a query sees, and of what it sees in its window.
  std::vector<kernels::KeyIntervals> visible = {}, visible_in_window = {};
  std::vector<int64_t> prefix_ends = {};  // MaskRule's
  // What all queries see, by position, where that follows no rule (MakeListed); else empty.
  std::vector<kernels::KeyIntervals> listed = {};
  // The tokens that each rank holds, where they are not equally many (MakeUneven); else empty.
  std::vector<int64_t> shard_tokens = {};
};

// The same in a device's memory, shared by the layers of a sequence.
struct DeviceDocuments {
  std::shared_ptr<const SequenceDocuments> host;
  DeviceArray<int32_t> local_starts, key_starts;
  DeviceArray<kernels::KeyIntervals> visible, visible_in_window;
  // EstimateQueries on the device: [E].
  DeviceArray<int64_t> estimate_positions, estimate_starts;
  int64_t longest_without = 0;
};

// `layout` is of this rank. Null for a single document under a causal mask, which needs none. The
// last `padding` tokens are a document without meaning, which chooses no pattern. INVALID_ARGUMENT
// unless firsts ascend from 0 and lie within the sequence, and padding begins with one of them.
absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeDocuments(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts, int64_t padding = 0);

// The same under any mask, never null: `visible`, and where `window` > 0 visible_in_window.
absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeMasked(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts, const MaskRule& rule,
    int64_t window);

// One document under a mask without a rule: `queries`, [layout.tokens] by position, say what each
// sees. Never null. INVALID_ARGUMENT names a query whose intervals are not KeyIntervals' or leave
// it out.
absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeListed(
    const kernels::ShardLayout& layout, std::span<const kernels::KeyIntervals> queries);

// As MakeDocuments where rank r holds the first shard_tokens[r] tokens of its part of `layout`,
// which is kStriped, and nobody holds the others. Never null; one document has no local_starts.
// INVALID_ARGUMENT likewise.
absl::StatusOr<std::shared_ptr<const SequenceDocuments>> MakeUneven(
    const kernels::ShardLayout& layout, std::span<const int64_t> firsts,
    std::span<const int64_t> shard_tokens);

// INVALID_ARGUMENT if `documents`, which may be null, are of a sequence of another length.
absl::Status CheckDocuments(const SequenceDocuments* documents, int64_t tokens);

// The queries from which the vertical-slash index is estimated.
struct EstimateQueries {
  std::vector<int64_t> positions;  // ascending
  std::vector<int64_t> starts;     // of their documents; empty without `documents`
  int64_t longest_without = 0;     // tokens of the longest document that has none
};
// Chooses `count` queries, or as many as there are tokens, the same on all ranks: the sequence's
// last ones or, with `spread`, SpreadPosition's. `documents` may be null. Each document gets its
// share of the queries by its tokens, and at least one if there are no more documents than queries:
// at its end, which sees most of it, or spread over it. Its last token, a separator that predicts
// nothing, is passed over where there are others. Padding gets none and changes no other's.
EstimateQueries ChooseEstimateQueries(int64_t tokens, int64_t count, bool spread,
                                      const SequenceDocuments* documents);

}  // namespace ringleader::patterns
