#include "kernels/reference/tiles/key_intervals.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace ringleader::kernels::reference {

absl::Status CheckIntervals(const TileSelection& tiles, const ShardLayout& query, int64_t tokens) {
  if (tiles.intervals == nullptr) return absl::OkStatus();
  if (tiles.pattern != TilePattern::kFull && tiles.pattern != TilePattern::kCsr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("intervals go with kFull, or with kCsr's lists of tiles; pattern is %d",
                        static_cast<int>(tiles.pattern)));
  }
  if (tiles.document_starts != nullptr || tiles.choice.chosen != nullptr) {
    return absl::InvalidArgumentError(
        "intervals beside document_starts or choice; write the documents into the intervals");
  }
  for (int64_t i = 0; i < tokens; ++i) {
    const KeyIntervals& row = tiles.intervals[i];
    const bool ascend = 0 <= row.begin && row.begin <= row.end && row.end <= row.second_begin &&
                        row.second_begin <= row.second_end && row.second_end <= query.tokens;
    if (!ascend) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "intervals[%d] are [%d, %d) and [%d, %d); bounds ascend from 0 to the sequence's %d "
          "tokens",
          i, row.begin, row.end, row.second_begin, row.second_end, query.tokens));
    }
  }
  return absl::OkStatus();
}

bool SeesSome(std::span<const KeyIntervals> queries, const TileSpan& key) {
  return std::ranges::any_of(queries, [&](const KeyIntervals& row) {
    const auto meets = [&](int32_t begin, int32_t end) {
      return std::max<int64_t>(begin, key.first) < std::min<int64_t>(end, key.last + 1);
    };
    return meets(row.begin, row.end) || meets(row.second_begin, row.second_end);
  });
}

bool SeesAll(std::span<const KeyIntervals> queries, const TileSpan& key) {
  return std::ranges::all_of(queries, [&](const KeyIntervals& row) {
    return (row.begin <= key.first && key.last < row.end) ||
           (row.second_begin <= key.first && key.last < row.second_end);
  });
}

}  // namespace ringleader::kernels::reference
