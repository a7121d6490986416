#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/moved_choice.h"
#include "patterns/index/sequence_keys.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/shares.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.stride", "16", {8, 64},
     "Tokens whose logits one score averages: 8, 16, 32 or 64. Scores take time in inverse proportion.",
     Read<&AttentionOptions::stride>},
    {"attention.threshold", "0.9", {0, 1, true},
     "Share of the estimated attention mass that the blocks which a tile of queries keeps must cover.",
     Read<&AttentionOptions::threshold>},
    {"attention.density", "0", {0, 1},
     "Share of the blocks that a tile of queries sees which it keeps at most; 0: as many as the threshold asks "
     "for.",
     Read<&AttentionOptions::density>},
    {"attention.head_budgets", "equal", {},
     "Whether the share is that of all heads (`equal`), or what it leaves a tile of queries besides the two blocks that are "
     "always kept is half more in those that recall little and half of it in as many that recall much, by the probes of "
     "earlier steps (`by_probe`, with `attention.probe_every` and an `attention.density` of at most 2/3). `by_recall` is "
     "refused.",
     ReadHeadBudgets},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  const int stride = options.stride;
  if (stride != 8 && stride != 16 && stride != 32 && stride != 64) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.stride is %d; allowed are 8, 16, 32 and 64", stride));
  }
  if (!(options.threshold > 0.0 && options.threshold <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.threshold must lie in (0, 1]; got %g", options.threshold));
  }
  if (!(options.density >= 0.0 && options.density <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.density must lie in [0, 1]; got %g", options.density));
  }
  RETURN_IF_ERROR(CheckProbedAlone(options, "xattention"));
  if (options.adapt_by_probe && options.density == 0.0) {
    return absl::InvalidArgumentError(
        "attention.head_budgets: by_probe moves shares of the blocks between heads, of which "
        "attention.density: 0 gives none, for attention.threshold alone says what is kept; give "
        "attention.density: 0.1, or attention.head_budgets: equal");
  }
  return CheckHeadDensity(options);
}

absl::Status CheckLength(const AttentionOptions& options, int64_t tokens) {
  const bool larger_fit = options.tile < 128 && BlocksOf(tokens, 128) <= kernels::kMaxScoredBlocks;
  return CheckBlocks(
      "attention.tile", options.tile, tokens, "xattention", kernels::kMaxScoredBlocks,
      larger_fit ? "make it 128, or the sequence shorter" : "make the sequence shorter");
}

// Blocks that a tile keeps at most in a sequence of `blocks`, its own counted. The share leaves
// most where a tile's own block is the first that it sees.
int64_t Most(const AttentionOptions& options, int32_t blocks) {
  const int64_t unforced =
      kernels::MostUnforced(kernels::ShareToRoundDown(options.density),
                            options.adapt_by_probe ? 3 : 2, blocks, /*forced=*/1);
  return std::min<int64_t>(blocks, options.balance.RoomFor(std::max<int64_t>(2, 1 + unforced)));
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  RETURN_IF_ERROR(CheckLength(options, layout.tokens));
  ASSIGN_OR_RETURN(const DeviceArray<std::byte> keys,
                   GatherSequenceKeys(inputs, options.tile, device));
  const int64_t local_tiles = (layout.local_tokens() + options.tile - 1) / options.tile;
  const auto blocks = static_cast<int32_t>(BlocksOf(layout.tokens, options.tile));
  const float density = kernels::ShareToRoundDown(options.density);
  index.pattern = kernels::TilePattern::kCsr;
  index.block_size = options.tile;
  index.kept_blocks = static_cast<int32_t>(Most(options, blocks));
  index.chosen =
      AllocateArray<uint32_t>(device, inputs.heads * local_tiles * kernels::BlockWords(blocks));
  const DeviceArray<int32_t> head_halves = UploadHeadHalves(options, inputs, device);
  return ChooseBlocks(options.balance, options.tile, /*tells_work_before=*/true, inputs, device,
                      index, [&](const kernels::ChoiceMove& move) {
                        return device.Run(kernels::AntidiagonalGateStep{
                            .keys = keys.data(),
                            .query_layout = layout,
                            .seen = index.seen(),
                            .tile = options.tile,
                            .stride = options.stride,
                            .choosing = ContentRows(inputs),
                            .scale = inputs.scale,
                            .threshold = static_cast<float>(options.threshold),
                            .density = density,
                            .head_halves = head_halves.data(),
                            .move = move,
                            .chosen = index.chosen.data()});
                      });
}

// A guess near what its authors report for thresholds of 0.9 and long inputs, if no share says.
constexpr double kUsualDensity = 0.1;

int64_t Kept(const AttentionOptions& options, int64_t own) {
  const double usual = options.threshold >= 1.0 ? 1.0 : kUsualDensity;
  const double density = options.density > 0.0 ? std::min(options.density, usual) : usual;
  const auto seen = static_cast<double>(own + 1);
  return std::clamp<int64_t>(static_cast<int64_t>(density * seen) - 1, std::min<int64_t>(1, own),
                             own);
}

int64_t ListedTiles(const AttentionOptions& options, int64_t blocks) {
  return ListedTilesOf(blocks, /*span=*/1, Kept(options, blocks - 1));
}

ring::HeadPattern Sample(const AttentionOptions& options, int64_t blocks, const PatternHints&,
                         Random* random) {
  return SampleChosenBlocks(
      options, blocks, /*span=*/1, Kept(options, blocks - 1),
      [&](int64_t others) { return Kept(options, others); }, random);
}

IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  const auto blocks = static_cast<int32_t>(BlocksOf(shape.tokens, options.tile));
  IndexMemory memory =
      MemoryOfChosenBlocks(shape, options.tile, options.tile, Most(options, blocks));
  memory.working = std::max(memory.working, GatheredKeyBytes(shape));
  return memory;
}

// One pair of `stride` is multiplied.
double PairOperations(const AttentionOptions& options, int64_t head_dim) {
  return 2 * static_cast<double>(head_dim) / options.stride;
}

void SetDensity(AttentionOptions* options, int64_t /*tokens*/, double density) {
  options->threshold = 1.0;
  options->density = options->adapt_heads ? std::min(density, kMostHeadDensity) : density;
}

}  // namespace

extern constinit const PatternDefinition kXAttentionDefinition = {
    .pattern = Pattern::kXAttention,
    .name = "xattention",
    .sees = "key blocks scored by antidiagonals of each tile",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kNever,
    .takes_masks = true,
    .balancing = Balancing::kAtOnce,
    .needs_whole_tiles = true,
    .fields = kFields,
    .check = Check,
    .build = Build,
    .check_length = CheckLength,
    .sample = Sample,
    .listed_tiles = ListedTiles,
    .index_memory = MemoryOf,
    .set_density = SetDensity,
    .pair_operations = PairOperations,
    .silence = 0.0f,
    .page =
        R"(XAttention (arXiv 2503.16428), here in training and in a ring. Queries and keys are cut into groups of
`attention.stride` tokens. A group of queries sees a group of keys by the mean logit along their antidiagonal, the
first query with the last key and so on, which meets every column and every diagonal of the pair. The softmax of these
over the groups of keys up to its own, or those that its `attention.mask` shows, is the group's estimate of its attention. Per layer, head and step, each tile of
queries adds it up by blocks of `attention.tile` keys, and keeps its own block, the first that it sees (of its
document), and then the heaviest until they cover `attention.threshold` of the mass, or are `attention.density` of the
blocks that it sees: with a threshold of 1 that share is kept in full. With equal budgets a tile visits no more than the share and the
two blocks that are always kept. The kernels get lists of tiles, per query tile and, for backward, per key tile.

With `attention.head_budgets: by_probe` levels come from the probes of earlier steps, as under `vertical_slash`: what the
share leaves a tile besides the two blocks that are always kept is half of it in some heads and half more in as many (of one block there is no half). With
a threshold of 1 the mean over heads stays what the share is (as far as so many blocks have mass); with a lower one the
share is what heads keep at most, and so is what they get of it: one that covers the threshold sooner does not fill it. A
threshold without a share is a mass that each head covers with as many blocks as that takes, and no number that could be
moved: it is refused.

Scores are products on the tensor cores, tokens² × head_dim / (2 × stride) of them for each head, and no matrix of
scores is kept. On several ranks the keys of the whole sequence are gathered for them, twice in memory until the
choice is made. Masses are rounded to integers, so the choice is the same on any number of ranks. In packed documents
a group sees those that hold a key of its first query's document; a group that lies across a boundary is scored as a
whole. Reports say what was visited; recall is estimated in steps that probe, for these masses are not attention's. Without a
share, a tile may keep every block: the lists then take 8 bytes for each pair of local tiles and head. The planner
assumes that a tenth of the causal tiles is visited, or the share if that is less (with a threshold of 1 the share),
half of them blocks that the whole head favours, until a job's reports say how many are.
)",
};

}  // namespace ringleader::patterns
