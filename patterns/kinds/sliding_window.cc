#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "patterns/pattern.h"
#include "ring/band_tiles.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.window", "4096", {1, kMaxTokens},
     "Tokens that a query sees, itself included.",
     Read<&AttentionOptions::window>},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  if (options.window >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.window is %d; a sliding window needs at least 1 token", options.window));
}

int64_t CountTiles(const kernels::TileSelection& tiles, const ring::Shard& query,
                   const ring::Shard& key) {
  return tiles.intervals != nullptr
             ? ring::VisibleTiles(query, key, tiles.tile, tiles.intervals)
             : ring::BandTiles(query, key, tiles.tile, tiles.window, tiles.document_starts);
}

absl::Status Build(const AttentionOptions& options, const IndexInputs&, IndexDevice&,
                   LayerIndex& index) {
  index.window = options.window;
  index.pattern =
      index.visible() != nullptr ? kernels::TilePattern::kFull : kernels::TilePattern::kWindow;
  return absl::OkStatus();
}

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random*) {
  // The nearest tokens of two blocks d apart lie (d - 1) tiles and one token apart.
  return Visible(options, blocks, (options.window + options.tile - 2) / options.tile + 1);
}

void SetDensity(AttentionOptions* options, int64_t tokens, double density) {
  options->window = std::max<int64_t>(
      options->tile, std::llround(ShareOfLength(density) * static_cast<double>(tokens)));
}

}  // namespace

extern constinit const PatternDefinition kSlidingWindowDefinition = {
    .pattern = Pattern::kSlidingWindow,
    .name = "sliding_window",
    .sees = "the last tokens",
    .known = [](const AttentionOptions& options) { return KnownKeys{.window = options.window}; },
    .count_tiles = CountTiles,
    .causal_choice = CausalChoice::kAlways,
    .takes_masks = true,
    .balancing = Balancing::kNever,
    .needs_whole_tiles = false,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .sample = Sample,
    .set_density = SetDensity,
    .page =
        R"(A query sees itself and the `attention.window` − 1 tokens before it; under an `attention.mask` that shows later
tokens, those of them that are less than `attention.window` tokens away, too. No index is built: a tile is
visited where the distance of two positions is within the window, and only tiles at its two edges mask single
pairs. The planner's count is exact.
)",
};

}  // namespace ringleader::patterns
