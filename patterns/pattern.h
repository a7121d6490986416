// Attention patterns, each as one definition: its name, its fields of the job file and what they
// may hold, its checks, how its index is built on any device, what it counts, what the planner
// assumes before a job's own reports, and its page of the documentation. One file each (dense.cc,
// sliding_window.cc, ...); registry.cc lists them. No protobuf, no LibTorch: coordinator, trainers
// and ringctl read the same definitions. docs/patterns.md says how to add one.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "patterns/index/index_device.h"
#include "patterns/index/layer_index.h"
#include "patterns/sample.h"
#include "ring/tile_loads.h"

namespace ringleader::patterns {

inline constexpr double kMaxTokens = 16.0 * 1048576;  // positions stay within int32 with room

struct Range {
  double min = 0;
  double max = std::numeric_limits<double>::infinity();
  bool min_is_open = false;  // (min, max]
  bool max_is_open = false;
};

// A field of the job file that fits one pattern only. It has a default, which is filled in for jobs
// of that pattern.
struct PatternField {
  std::string_view path;           // "attention.window": a field of v1::AttentionSpec
  std::string_view default_value;  // as text
  Range range;                     // numbers only
  std::string_view help;
  // Reads the text into the options; false if it is no such value. Null: trainers need not know.
  bool (*read)(std::string_view text, AttentionOptions* options) = nullptr;
  // If set, only jobs whose field `with_path` holds `with_value` have this one.
  std::string_view with_path = {}, with_value = {};
  // If set, the default follows from how many tokens sequences have, and `default_value` is for
  // people.
  double (*default_for)(uint64_t sequence_length) = nullptr;
};

// PatternField::read for a number.
template <typename T>
bool ReadNumber(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}
template <auto member>
bool Read(std::string_view text, AttentionOptions* options) {
  return ReadNumber(text, &(options->*member));
}

// `read` of attention.head_budgets, which several patterns have.
bool ReadHeadBudgets(std::string_view text, AttentionOptions* options);

// Whether what a query attends to can be chosen without later queries (Selection).
enum class CausalChoice {
  kNever,   // it takes queries of all of the sequence, or of all of a tile
  kOnAsk,   // under Selection::kCausal
  kAlways,  // positions alone choose, or each query for itself
};

// Whether attention.balance can move a pattern's choices, and what that takes a rank that waits for
// no other's choice.
enum class Balancing {
  kNever,      // it has no scores to choose by
  kByAnother,  // a second choice, after the one that is moved
  kAtOnce,     // nothing: it is moved as it is made
};

// Bytes that a rank's choice of one layer takes.
struct IndexMemory {
  int64_t kept = 0;     // until backward has used it
  int64_t working = 0;  // besides, while it is built
};
// The share of a sequence's length from which a query sees all keys, so that `density` of the
// causal pairs are seen: d = 1 - (1 - share)².
double ShareOfLength(double density);

// The model and the sequence that an index is for.
struct IndexShape {
  int64_t tokens = 0;  // of the sequence
  int ranks = 1;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t element_bytes = 0;  // of q and k
};

struct PatternDefinition {
  Pattern pattern;
  std::string_view name;  // in the job file; v1::AttentionSpec::Pattern has it in capitals
  std::string_view sees;  // what a query may attend to, as a part of a sentence
  // Returns what positions say is attended to. Null: the data choose.
  KnownKeys (*known)(const AttentionOptions& options) = nullptr;
  // Counts exactly what every head and layer visits, by how far apart tokens are. Null where an
  // index lists tiles, which then tell.
  TileCount count_tiles;
  CausalChoice causal_choice;
  // Whether it works under every attention.mask, not under the causal one alone.
  bool takes_masks;
  Balancing balancing;
  // Whether contiguous shards must be whole tiles, because its lists name tiles of the sequence.
  bool needs_whole_tiles;
  std::span<const PatternField> fields;
  // Checks what concerns this pattern alone; INVALID_ARGUMENT names the field.
  absl::Status (*check)(const AttentionOptions& options);
  // Sets the pattern's part of a layer's index; all ranks call it together.
  absl::Status (*build)(const AttentionOptions& options, const IndexInputs& inputs,
                        IndexDevice& device, LayerIndex& index);
  // Checks that a document of so many tokens can be chosen from; INVALID_ARGUMENT names the field.
  // Null: of any length.
  absl::Status (*check_length)(const AttentionOptions& options, int64_t tokens) = nullptr;
  // Samples what one head is likely to visit: exactly what it visits if no data decides that.
  ring::HeadPattern (*sample)(const AttentionOptions& options, int64_t blocks,
                              const PatternHints& hints, Random* random);
  // Returns the most tiles that a sampled head lists one by one. Null: none, for its diagonals say
  // what it visits.
  int64_t (*listed_tiles)(const AttentionOptions& options, int64_t blocks) = nullptr;
  // Returns what an index takes. Null: little enough to leave out of estimates.
  IndexMemory (*index_memory)(const AttentionOptions& options, const IndexShape& shape) = nullptr;
  // Returns the stripe that suits GPUs where each of `ranks` has parts of a sequence of `tokens`
  // tokens: whole tiles. Null: one tile, which spreads the work most evenly.
  int64_t (*stripe_on_gpus)(const AttentionOptions& options, int64_t tokens, int ranks) = nullptr;
  // Brings options to a share of the causal pairs, or tiles, of a sequence, so that its time can be
  // measured. Null: it is measured as a job has it.
  void (*set_density)(AttentionOptions* options, int64_t tokens, double density) = nullptr;
  // Returns what choosing takes for each query, key that it may see and head of `head_dim`:
  // operations of tensor cores in bf16, or as many as take the time. Null: next to none, for it
  // goes by fewer pairs than a tile has. Options say the sequence's length, and of group_heads how
  // many choose together.
  double (*pair_operations)(const AttentionOptions& options, int64_t head_dim) = nullptr;
  // Returns how many times as long GPUs take for a visited tile as for one of all its queries and
  // keys. Null: as long.
  double (*gpu_tile_factor)(const AttentionOptions& options) = nullptr;
  // Returns what a visited tile takes in backward, over one that is visited whole by itself: what
  // plans reckon with until it is measured. heads_together: HeadsTogether of the model. Null: as
  // long.
  double (*backward_factor)(int heads_together) = nullptr;
  // Whether GPUs can add up its sums in the same order every time.
  bool repeats_on_gpus = true;
  // What stands in a query's place while others choose, so that it has no say: 0 where its products
  // are summed with theirs, NaN where each has a row of its own. Null: queries choose for
  // themselves, or a few for all.
  std::optional<float> silence = std::nullopt;
  // Whether building an index counts what the queries that choose recall by it.
  bool counts_recall = false;
  // Whether a head's choice reads the queries of all heads with the same KV head.
  bool reads_kv_heads_queries = false;
  std::string_view page;  // Markdown below the heading in docs/patterns.md

  // Whether positions say what is attended to.
  bool is_known_before_data() const { return known != nullptr; }
  // Whether they do by how far apart tokens are, so that a sample attends to the same keys wherever
  // in a micro-batch it lies.
  bool goes_by_distance() const { return count_tiles != nullptr; }
};

// All definitions, in the order of the enumerators.
std::span<const PatternDefinition* const> Definitions();
// Null if no definition has this number.
const PatternDefinition* FindDefinition(Pattern pattern);
// The definition of a pattern that CheckOptions has passed; aborts on others.
const PatternDefinition& DefinitionOf(Pattern pattern);

// Returns what times of attention go by, whose share of the pairs is beside it: the pattern's name
// and, unless they are the usual ones, how many queries and heads choose together.
std::string MeasuredName(const AttentionOptions& options, int64_t heads, int64_t kv_heads);

// Returns what the choices of `layers` layers take, with what attention.dense_below and rows that
// are packed for a hop take beside.
// The options have passed CheckOptions.
IndexMemory IndexMemoryOf(const AttentionOptions& options, const IndexShape& shape, int64_t layers);

// Chooses what a layer with these options attends to. INVALID_ARGUMENT names a pattern that no
// definition has.
absl::StatusOr<std::shared_ptr<LayerIndex>> BuildIndex(const AttentionOptions& options,
                                                       const IndexInputs& inputs,
                                                       IndexDevice& device);

}  // namespace ringleader::patterns
