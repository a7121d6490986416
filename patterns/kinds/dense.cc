#include "patterns/pattern.h"
#include "ring/band_tiles.h"

namespace ringleader::patterns {

extern constinit const PatternDefinition kDenseDefinition = {
    .pattern = Pattern::kDense,
    .name = "dense",
    .sees = "everything that `attention.mask` shows",
    .known = [](const AttentionOptions&) { return KnownKeys{}; },
    .count_tiles =
        [](const kernels::TileSelection& tiles, const ring::Shard& query, const ring::Shard& key) {
          return tiles.intervals != nullptr
                     ? ring::VisibleTiles(query, key, tiles.tile, tiles.intervals)
                     : ring::BandTiles(query, key, tiles.tile, /*window=*/0, tiles.document_starts);
        },
    .causal_choice = CausalChoice::kAlways,
    .takes_masks = true,
    .balancing = Balancing::kNever,
    .needs_whole_tiles = false,
    .fields = {},
    .check = [](const AttentionOptions&) { return absl::OkStatus(); },
    .build =
        [](const AttentionOptions&, const IndexInputs&, IndexDevice&, LayerIndex& index) {
          index.pattern = index.visible() != nullptr ? kernels::TilePattern::kFull
                                                     : kernels::TilePattern::kCausal;
          return absl::OkStatus();
        },
    .sample = [](const AttentionOptions& options, int64_t blocks, const PatternHints&,
                 Random*) { return Visible(options, blocks, blocks); },
    .page =
        R"(A query sees every token up to itself, or what `attention.mask` shows. No index is built: a tile is visited
where a key is not later than a query, which two positions tell, or where the mask's interval of a query meets it. Layers in `attention.dense_layers`, and those that a plan's
budget calls dense, are computed in this way under every pattern. The planner's count is exact.
)",
};

}  // namespace ringleader::patterns
