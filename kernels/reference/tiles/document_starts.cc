#include "kernels/reference/tiles/document_starts.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace ringleader::kernels::reference {

absl::Status CheckDocuments(const TileSelection& tiles, const ShardLayout& query, int64_t tokens) {
  if (tiles.document_starts == nullptr) return absl::OkStatus();
  if (tiles.pattern == TilePattern::kFull) {
    return absl::InvalidArgumentError(
        "document_starts: pattern kFull sees every pair; choose a causal pattern, or null");
  }
  // Rows of spread tiles are at no position; those of one document have one start.
  if (tiles.groups.groups != nullptr && tiles.diagonals == nullptr) {
    if (std::is_sorted(tiles.document_starts, tiles.document_starts + tokens))
      return absl::OkStatus();
    return absl::InvalidArgumentError("document_starts: they ascend from row to row");
  }
  int64_t start_before = 0, position_before = -1;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t start = tiles.document_starts[i], position = query.Position(i);
    if (start < 0 || start > position) {
      return absl::InvalidArgumentError(
          absl::StrFormat("document_starts[%d] is %d; the query's position is %d, and its document "
                          "starts there or before it",
                          i, start, position));
    }
    if (i > 0 && start != start_before && start <= position_before) {
      return absl::InvalidArgumentError(
          absl::StrFormat("document_starts[%d] is %d after %d of the query at position %d; starts "
                          "ascend, and a new one lies behind the queries before it",
                          i, start, start_before, position_before));
    }
    start_before = start;
    position_before = position;
  }
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::reference
