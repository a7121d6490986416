#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.block_size", "512", {1, kMaxTokens},
     "Keys in one block; a multiple of `attention.tile`.",
     Read<&AttentionOptions::block_size>},
    {"attention.topk_blocks", "8", {1, kMaxTokens},
     "Blocks that a query block keeps besides its own.",
     Read<&AttentionOptions::topk_blocks>},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  if (options.block_size < options.tile || options.block_size % options.tile != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.block_size: %d is no multiple of attention.tile (%d)",
                        options.block_size, options.tile));
  }
  if (options.topk_blocks >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("attention.topk_blocks is %d; it must not be negative", options.topk_blocks));
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  const int64_t local_tiles = (layout.local_tokens() + options.tile - 1) / options.tile;
  const int64_t row = int64_t{inputs.kv_heads} * inputs.head_dim, part = local_tiles * row;
  const DeviceArray<float> gathered = AllocateArray<float>(device, layout.ranks * part);
  RETURN_IF_ERROR(device.Run(kernels::TileKeySumsStep{
      .tile = options.tile, .sums = gathered.data() + layout.rank * part}));
  DeviceArray<float> key_sums = gathered;  // by tile of the sequence
  if (layout.ranks > 1) {
    RETURN_IF_ERROR(device.Gather(gathered.data(), part * static_cast<int64_t>(sizeof(float))));
    key_sums = AllocateArray<float>(device, layout.ranks * part);
    RETURN_IF_ERROR(device.Run(kernels::OrderTilesStep{.gathered = gathered.data(),
                                                       .layout = layout,
                                                       .tile = options.tile,
                                                       .row = row,
                                                       .ordered = key_sums.data()}));
  }
  const int64_t blocks = (layout.tokens + options.block_size - 1) / options.block_size;
  index.pattern = kernels::TilePattern::kCsr;
  index.block_size = options.block_size;
  index.kept_blocks = static_cast<int32_t>(std::min<int64_t>(options.topk_blocks + 1, blocks));
  index.chosen = AllocateArray<uint32_t>(
      device, inputs.heads * local_tiles * kernels::BlockWords(static_cast<int32_t>(blocks)));
  return device.Run(kernels::MeanGateStep{.key_sums = key_sums.data(),
                                          .query_layout = layout,
                                          .document_starts = index.document_starts(),
                                          .tile = options.tile,
                                          .block_size = options.block_size,
                                          .topk_blocks = options.topk_blocks,
                                          .first_query_gates =
                                              options.selection == Selection::kCausal,
                                          .chosen = index.chosen.data()});
}

// A head lists at most so many tiles, or as many as it has rows: where rows see more, each tile
// that is listed stands for several, drawn like one.
constexpr int64_t kMaxListedTiles = int64_t{1} << 21;

int64_t TilesOfRow(int64_t blocks) {
  return std::max<int64_t>(1, kMaxListedTiles / blocks);
}

int64_t ListedTiles(const AttentionOptions& options, int64_t blocks) {
  const int64_t span = options.block_size / options.tile;
  return blocks * std::min({TilesOfRow(blocks), blocks, (options.topk_blocks + int64_t{1}) * span});
}

// Half of each row's choices are blocks that the whole head favours.
class Chooser {
 public:
  Chooser(int64_t groups, int64_t kept, Random* random)
      : random_(*random), favourites_(std::min(groups, 4 * kept)), is_chosen_(groups) {
    for (int64_t& favourite : favourites_) favourite = random_.Below(groups);
  }

  // A block before `own`.
  int64_t Draw(int64_t own) {
    const int64_t block = random_.Unit() < 0.5 ? favourites_[random_.Below(std::ssize(favourites_))]
                                               : random_.Below(own);
    return block < own ? block : random_.Below(own);
  }
  // `count` different ones, ascending.
  std::vector<int64_t> Choose(int64_t own, int64_t count) {
    std::vector<int64_t> chosen;
    while (std::ssize(chosen) < count) {
      const int64_t block = count == own ? std::ssize(chosen) : Draw(own);
      if (is_chosen_[block]) continue;
      is_chosen_[block] = true;
      chosen.push_back(block);
    }
    for (const int64_t block : chosen) is_chosen_[block] = false;
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

 private:
  Random& random_;
  std::vector<int64_t> favourites_;
  std::vector<bool> is_chosen_;
};

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random* random) {
  const auto span = std::max<int64_t>(1, options.block_size / options.tile);
  const int64_t groups = (blocks + span - 1) / span, most = TilesOfRow(blocks);
  const int64_t kept = std::min<int64_t>(options.topk_blocks, groups);
  if (kept >= groups - 1) return Band(blocks, blocks);  // no row has more before its own
  Chooser chooser(groups, kept, random);
  ring::HeadPattern head;
  head.row_offsets.reserve(blocks + 1);
  head.row_offsets.push_back(0);
  const auto add = [&](int64_t tile) { head.columns.push_back(static_cast<int32_t>(tile)); };
  for (int64_t q = 0; q < blocks; ++q) {
    const int64_t own = q / span, chosen = std::min(own, kept), near = q - own * span + 1;
    const int64_t tiles = chosen * span + near;
    if (tiles <= most) {
      for (const int64_t block : chooser.Choose(own, chosen)) {
        for (int64_t k = block * span; k < (block + 1) * span; ++k) add(k);
      }
      for (int64_t k = own * span; k <= q; ++k) add(k);
      head.row_weights.push_back(1);
    } else {
      for (int64_t i = 0; i < most; ++i) {
        const bool is_near = own == 0 || random->Below(tiles) < near;
        add(is_near ? q - random->Below(near) : chooser.Draw(own) * span + random->Below(span));
      }
      head.row_weights.push_back(static_cast<double>(tiles) / static_cast<double>(most));
    }
    head.row_offsets.push_back(std::ssize(head.columns));
  }
  return head;
}

}  // namespace

extern constinit const PatternDefinition kBlockTopKDefinition = {
    .pattern = Pattern::kBlockTopK,
    .name = "block_topk",
    .sees = "key blocks chosen per query block",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kOnAsk,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .sample = Sample,
    .listed_tiles = ListedTiles,
    .page =
        R"(Mixture of Block Attention (MoBA, arXiv 2502.13189). Keys are cut into blocks of
`attention.block_size` tokens. A tile of queries sees its own block up to the diagonal, and the
`attention.topk_blocks` earlier blocks whose mean key has the largest product with the tile's mean query. Which
those are is chosen per layer, head and step; the kernels get lists of tiles, per query tile and, for backward,
per key tile. With `attention.selection: causal` the tile's first query chooses alone, which no query of the tile
precedes. Of blocks with equal scores even heads take the earlier, odd heads the later. The planner assumes that half of the choices are blocks that the whole head favours.
)",
};

}  // namespace ringleader::patterns
