#include "patterns/kinds/chosen_blocks.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/str_format.h"

namespace ringleader::patterns {
namespace {

// A head lists at most this many tiles, or as many as it has rows. Where rows see more, each listed
// tile is drawn like one and stands for several.
constexpr int64_t kMaxListedTiles = int64_t{1} << 20;

class Chooser {
 public:
  Chooser(int64_t groups, int64_t kept, Random* random)
      : random_(*random), favourites_(std::min(groups, 4 * kept)), is_chosen_(groups) {
    for (int64_t& favourite : favourites_) favourite = random_.Below(groups);
  }

  // Draws one of the blocks [0, seen) but `own`.
  int64_t Draw(int64_t own, int64_t seen) {
    const int64_t block = random_.Unit() < 0.5 ? favourites_[random_.Below(std::ssize(favourites_))]
                                               : Other(own, random_.Below(seen - 1));
    return block < seen && block != own ? block : Other(own, random_.Below(seen - 1));
  }
  // Draws `count` different ones, ascending.
  std::vector<int64_t> Choose(int64_t own, int64_t seen, int64_t count) {
    std::vector<int64_t> chosen;
    while (std::ssize(chosen) < count) {
      const int64_t block = count == seen - 1 ? Other(own, std::ssize(chosen)) : Draw(own, seen);
      if (is_chosen_[block]) continue;
      is_chosen_[block] = true;
      chosen.push_back(block);
    }
    for (const int64_t block : chosen) is_chosen_[block] = false;
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

 private:
  // The `number`-th block that is not `own`.
  static int64_t Other(int64_t own, int64_t number) { return number < own ? number : number + 1; }

  Random& random_;
  std::vector<int64_t> favourites_;
  std::vector<bool> is_chosen_;
};

}  // namespace

int64_t MostListed(int64_t blocks) {
  return std::max<int64_t>(1, kMaxListedTiles / std::max<int64_t>(1, blocks));
}

absl::Status CheckBlocks(std::string_view field, int64_t size, int64_t tokens,
                         std::string_view pattern, int64_t most, std::string_view advice) {
  const int64_t blocks = BlocksOf(tokens, size);
  if (blocks <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %d makes %d blocks of a sequence of %d tokens; %s takes %d: %s", field,
                      size, blocks, tokens, pattern, most, advice));
}

absl::Status CheckProbedAlone(const AttentionOptions& options, std::string_view pattern) {
  if (!options.adapt_heads || options.adapt_by_probe) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.head_budgets: by_recall does not go with attention.pattern: %s, whose choice "
      "estimates no recall; give attention.head_budgets: by_probe, or equal",
      pattern));
}

absl::Status CheckHeadBlocks(const AttentionOptions& options, int fewest) {
  if (!options.adapt_by_probe || options.topk_blocks >= fewest) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.topk_blocks is %d, of which no head could keep half; with attention.head_budgets: "
      "by_probe give %d or more, or attention.head_budgets: equal",
      options.topk_blocks, fewest));
}

absl::Status CheckHeadDensity(const AttentionOptions& options) {
  if (!options.adapt_heads || options.density <= kMostHeadDensity) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.density is %g; with attention.head_budgets: %s some heads keep half more, "
      "so that it is at most 2/3: give less, or attention.head_budgets: equal",
      options.density, options.adapt_by_probe ? "by_probe" : "by_recall"));
}

IndexMemory MemoryOfChosenBlocks(const IndexShape& shape, int64_t tile, int64_t block_size,
                                 int64_t most) {
  const int64_t tiles = BlocksOf(shape.tokens / shape.ranks, tile), rows = shape.heads * tiles,
                words =
                    kernels::BlockWords(static_cast<int32_t>(BlocksOf(shape.tokens, block_size)));
  const auto of_entry = static_cast<int64_t>(sizeof(int32_t));
  return {.kept = rows * words * of_entry,
          .working = 2 * rows * std::min(tiles, most * BlocksOf(block_size, tile)) * of_entry};
}

int64_t GatheredKeyBytes(const IndexShape& shape) {
  return (shape.ranks == 1 ? 0 : 2) * shape.tokens * shape.kv_heads * shape.head_dim *
         shape.element_bytes;
}

DeviceArray<int32_t> UploadHeadHalves(const AttentionOptions& options, const IndexInputs& inputs,
                                      IndexDevice& device) {
  if (!options.adapt_by_probe || inputs.head_halves.empty()) return {};
  return UploadArray(device,
                     std::vector<int32_t>(inputs.head_halves.begin(), inputs.head_halves.end()));
}

int64_t ListedTilesOf(int64_t blocks, int64_t span, int64_t kept) {
  return blocks * std::min({MostListed(blocks), blocks, (kept + 1) * span});
}

ring::HeadPattern SampleChosenBlocks(const AttentionOptions& options, int64_t blocks, int64_t span,
                                     int64_t kept,
                                     absl::FunctionRef<int64_t(int64_t others)> kept_of,
                                     Random* random) {
  const int64_t groups = (blocks + span - 1) / span, most = MostListed(blocks);
  kept = std::min(kept, groups);
  if (kept_of(groups - 1) >= groups - 1)
    return Visible(options, blocks, blocks);  // no row sees more
  Chooser chooser(groups, kept, random);
  ring::HeadPattern head;
  head.row_offsets.reserve(blocks + 1);
  head.row_offsets.push_back(0);
  const auto add = [&](int64_t tile) { head.columns.push_back(static_cast<int32_t>(tile)); };
  for (int64_t q = 0; q < blocks; ++q) {
    const int64_t own = q / span, end = SeenTiles(options, blocks, q);
    const int64_t seen = (end + span - 1) / span, chosen = kept_of(seen - 1);
    const int64_t near = std::min(end, (own + 1) * span) - own * span;
    const int64_t tiles = chosen * span + near;
    if (tiles <= most) {
      for (const int64_t block : chooser.Choose(own, seen, chosen)) {
        for (int64_t k = block * span; k < std::min(end, (block + 1) * span); ++k) add(k);
      }
      for (int64_t k = own * span; k < own * span + near; ++k) add(k);
      head.row_weights.push_back(1);
    } else {
      for (int64_t i = 0; i < most; ++i) {
        const bool is_near = seen == 1 || random->Below(tiles) < near;
        const int64_t tile = is_near ? own * span + near - 1 - random->Below(near)
                                     : chooser.Draw(own, seen) * span + random->Below(span);
        add(std::min(tile, end - 1));
      }
      head.row_weights.push_back(static_cast<double>(tiles) / static_cast<double>(most));
    }
    head.row_offsets.push_back(std::ssize(head.columns));
  }
  return head;
}

}  // namespace ringleader::patterns
