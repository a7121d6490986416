#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/moved_choice.h"
#include "patterns/index/sequence_keys.h"
#include "patterns/kinds/chosen_blocks.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/index.h"
#include "ringleader/kernels/shares.h"

namespace ringleader::patterns {
namespace {

// clang-format off
constexpr PatternField kFields[] = {
    {"attention.density", "0.2", {0, 1, true},
     "Share of the other blocks that a tile of queries sees which it keeps beside its own; with "
     "`attention.head_budgets: by_recall` or `by_probe` the mean over heads, and at most 2/3.",
     Read<&AttentionOptions::density>},
    {"attention.head_budgets", "by_recall", {},
     "Whether all heads have the share (`equal`), or those that recall little half more and as many "
     "that recall much half of it: by what each choice keeps of its own queries' attention "
     "(`by_recall`), or by the probes of earlier steps (`by_probe`, with `attention.probe_every`).",
     ReadHeadBudgets},
};
// clang-format on

absl::Status Check(const AttentionOptions& options) {
  if (!(options.density > 0.0 && options.density <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.density must lie in (0, 1]; got %g", options.density));
  }
  return CheckHeadDensity(options);
}

// Blocks that a tile with `own` before it keeps besides its own, in a head of the most budget.
int64_t Most(const AttentionOptions& options, int64_t own) {
  const float density = kernels::ShareToRoundUp(options.density);
  return kernels::BlocksOfShare(options.adapt_heads ? 1.5f * density : density,
                                static_cast<int32_t>(own));
}

// What the choices of all ranks' queries hold, by head.
struct HeadMasses {
  DeviceArray<int64_t> kept, total;
};

absl::Status SumOverRanks(const kernels::ShardLayout& layout, const HeadMasses& masses,
                          IndexDevice& device) {
  if (layout.ranks == 1) return absl::OkStatus();
  RETURN_IF_ERROR(device.Sum(SumType::kInt64, masses.kept.data(), masses.kept.size));
  return device.Sum(SumType::kInt64, masses.total.data(), masses.total.size);
}

absl::Status CheckLength(const AttentionOptions& options, int64_t tokens) {
  const int64_t blocks = BlocksOf(tokens, options.tile);
  if (blocks <= kernels::kMaxMassBlocks) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "attention.pattern: adaspa: %d tokens are %d blocks of attention.tile; there may be %d: "
      "choose attention.pattern: key_groups",
      tokens, blocks, kernels::kMaxMassBlocks));
}

absl::Status Build(const AttentionOptions& options, const IndexInputs& inputs, IndexDevice& device,
                   LayerIndex& index) {
  const kernels::ShardLayout& layout = inputs.layout;
  RETURN_IF_ERROR(CheckLength(options, layout.tokens));
  const int64_t blocks = BlocksOf(layout.tokens, options.tile);
  const int64_t local = BlocksOf(layout.local_tokens(), options.tile), rows = inputs.heads * local;
  const int64_t unmoved = 1 + Most(options, blocks - 1),
                most = std::min(blocks, options.balance.RoomFor(unmoved));
  if (rows * std::min(local, most) > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention.pattern: adaspa: %d tokens a trainer in %d heads would list %d "
                        "tiles; give less attention.density, or more trainers",
                        layout.local_tokens(), inputs.heads, rows * std::min(local, most)));
  }
  index.pattern = kernels::TilePattern::kCsr;
  index.block_size = options.tile;
  index.kept_blocks = static_cast<int32_t>(most);
  index.chosen =
      AllocateArray<uint32_t>(device, rows * kernels::BlockWords(static_cast<int32_t>(blocks)));

  const auto mass = AllocateArray<int32_t>(device, rows * blocks);
  {
    ASSIGN_OR_RETURN(const DeviceArray<std::byte> keys,
                     GatherSequenceKeys(inputs, options.tile, device));
    RETURN_IF_ERROR(device.Run(kernels::BlockMassStep{.keys = keys.data(),
                                                      .query_layout = layout,
                                                      .seen = index.seen(),
                                                      .tile = options.tile,
                                                      .scale = inputs.scale,
                                                      .mass = mass.data()}));
  }

  const float density = kernels::ShareToRoundUp(options.density);
  std::vector<float> of_heads(inputs.heads, density);
  for (size_t head = 0; head < inputs.head_halves.size(); ++head) {
    of_heads[head] *= 0.5f * static_cast<float>(inputs.head_halves[head]);
  }
  const auto densities = UploadArray(device, of_heads);
  const HeadMasses masses = {.kept = AllocateArray<int64_t>(device, inputs.heads),
                             .total = AllocateArray<int64_t>(device, inputs.heads)};
  kernels::MassGateStep keep = {.mass = mass.data(),
                                .query_layout = layout,
                                .seen = index.seen(),
                                .content = ContentOf(inputs),
                                .heads = inputs.heads,
                                .tile = options.tile,
                                .density = densities.data(),
                                .chosen = index.chosen.data(),
                                .kept = masses.kept.data(),
                                .total = masses.total.data()};
  if (options.adapt_heads && !options.adapt_by_probe) {
    RETURN_IF_ERROR(device.Run(keep));
    RETURN_IF_ERROR(SumOverRanks(layout, masses, device));
    RETURN_IF_ERROR(
        device.Run(kernels::AdaptDensityStep{.kept = masses.kept.data(),
                                             .total = masses.total.data(),
                                             .heads = inputs.heads,
                                             .density = density,
                                             .threshold = static_cast<float>(kernels::kGoodRecall),
                                             .head_density = densities.data()}));
  }
  RETURN_IF_ERROR(ChooseBlocks(options.balance, options.tile, /*tells_work_before=*/false, inputs,
                               device, index, [&](const kernels::ChoiceMove& move) {
                                 keep.move = move;
                                 return device.Run(keep);
                               }));
  RETURN_IF_ERROR(SumOverRanks(layout, masses, device));
  return device.CountRecall(masses.kept.data(), masses.total.data(), inputs.heads);
}

IndexMemory MemoryOf(const AttentionOptions& options, const IndexShape& shape) {
  const int64_t local = shape.tokens / shape.ranks, blocks = BlocksOf(shape.tokens, options.tile),
                rows = shape.heads * BlocksOf(local, options.tile);
  const auto of_float = static_cast<int64_t>(sizeof(float));
  // What the search works in is a GPU's where that is more than the CPU engine's log-sum-exps and
  // sums.
  const int64_t masses = rows * blocks * of_float,
                search = std::max(kernels::MassSumsBytes(shape.tokens),
                                  2 * shape.heads * local * of_float);
  IndexMemory memory =
      MemoryOfChosenBlocks(shape, options.tile, options.tile, 1 + Most(options, blocks - 1));
  memory.working = std::max(memory.working, masses + search + GatheredKeyBytes(shape));
  return memory;
}

int64_t Kept(const AttentionOptions& options, int64_t own) {
  return kernels::BlocksOfShare(kernels::ShareToRoundUp(options.density),
                                static_cast<int32_t>(own));
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

// A product on GPUs. (The CPU engine takes two.)
double PairOperations(const AttentionOptions& /*options*/, int64_t head_dim) {
  return 2 * static_cast<double>(head_dim);
}

void SetDensity(AttentionOptions* options, int64_t /*tokens*/, double density) {
  options->density = options->adapt_heads ? std::min(density, kMostHeadDensity) : density;
}

}  // namespace

extern constinit const PatternDefinition kAdaSpaDefinition = {
    .pattern = Pattern::kAdaSpa,
    .name = "adaspa",
    .sees = "key blocks of the largest exact attention mass of each tile",
    .count_tiles = nullptr,
    .causal_choice = CausalChoice::kNever,
    .takes_masks = true,
    .balancing = Balancing::kByAnother,
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
    .silence = std::numeric_limits<float>::quiet_NaN(),
    .counts_recall = true,
    .page =
        R"(AdaSpa (arXiv 2502.21079), whose search is exact, here in training and in a ring: of all choices of tiles none
holds more attention at its share. Per layer, head and step, a pass over all keys finds the log-sum-exp of each
query and the attention mass of each block of `attention.tile` keys, summed over each tile of queries (on GPUs the authors'
two passes in one). A tile
keeps its own block, as far as each query sees it, and of the others that it sees (those before it, from the one on where
its document starts, or what `attention.mask` shows) the share `attention.density` of largest mass, so that ranks and tiles have even work (the authors' row-wise choice). With
`attention.head_budgets: by_recall`, the default, the choice is made twice: after the first, the heads whose choice holds
more than 0.8 of the mass, at most half of all, get half of the share, and as many with the least get half more. Of blocks
with equal masses even heads take the earlier, odd heads the later. With `by_probe` the levels come from the probes of earlier
steps, as under `vertical_slash`, and the choice is made once.

On GPUs the search takes one product over all pairs of queries and keys, where dense attention takes two forward and five
backward: it is what cheaper choices are measured by, more than one to train with at length. Its authors search at two of
fifty steps that denoise one and the same video, the first of them dense, within whose forward they search, and keep lists and log-sum-exps from
one to the next. A step of training has other samples, for which neither would hold, and no dense forward where it chooses:
at 131,072 tokens and 16 heads on one H100 dense attention takes 118 ms forward (cuDNN) before it has any masses, the search 62 and attention to 5 % of the
tiles 6. A log-sum-exp would save nothing either: given each query's own, the search takes 67 ms. What does carry over is kept: recomputation
and backward take forward's choice. Reports tell the recall of all queries, exactly, by the mean over heads; that it is of those that chose makes no
difference here, for the masses are attention's own.

On several ranks the keys of the whole sequence are gathered, twice in memory until the choice is made; masses take 4 bytes
for each pair of local and other tiles and head meanwhile, and the lists of a hop 8 bytes for each pair that may be kept. A
sequence may have 12,000 tiles. In packed documents keys of
other documents have no mass.
)",
};

}  // namespace ringleader::patterns
