#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <string>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {

// Each is defined in the file of its name in patterns/kinds/.
extern const PatternDefinition kDenseDefinition;
extern const PatternDefinition kSlidingWindowDefinition;
extern const PatternDefinition kVerticalSlashDefinition;
extern const PatternDefinition kBlockTopKDefinition;
extern const PatternDefinition kMobaDefinition;
extern const PatternDefinition kXAttentionDefinition;
extern const PatternDefinition kKeyGroupsDefinition;
extern const PatternDefinition kAdaSpaDefinition;
extern const PatternDefinition kFixedBlocksDefinition;

namespace {

constexpr const PatternDefinition* kDefinitions[] = {
    &kDenseDefinition,     &kSlidingWindowDefinition, &kVerticalSlashDefinition,
    &kBlockTopKDefinition, &kMobaDefinition,          &kXAttentionDefinition,
    &kKeyGroupsDefinition, &kAdaSpaDefinition,        &kFixedBlocksDefinition,
};

}  // namespace

bool ReadHeadBudgets(std::string_view text, AttentionOptions* options) {
  options->adapt_by_probe = text == "by_probe";
  options->adapt_heads = text == "by_recall" || options->adapt_by_probe;
  return options->adapt_heads || text == "equal";
}

std::span<const PatternDefinition* const> Definitions() {
  return kDefinitions;
}

const PatternDefinition* FindDefinition(Pattern pattern) {
  for (const PatternDefinition* definition : kDefinitions) {
    if (definition->pattern == pattern) return definition;
  }
  return nullptr;
}

const PatternDefinition& DefinitionOf(Pattern pattern) {
  const PatternDefinition* const definition = FindDefinition(pattern);
  if (definition == nullptr) std::abort();
  return *definition;
}

double ShareOfLength(double density) {
  return 1 - std::sqrt(1 - std::min(1.0, density));
}

namespace {

// What attention to short documents takes beside that to long ones (attention.dense_below): slots
// of a second ring, three of keys and values and four of their gradients in fp32, and a second
// output with the gradients of queries, keys and values.
int64_t ShortDocumentBytes(const IndexShape& shape) {
  const int64_t tokens = shape.tokens / shape.ranks, rows = 2 * shape.kv_heads * shape.head_dim;
  const int64_t results = (3 * shape.heads * shape.head_dim + rows) * shape.element_bytes;
  const auto of_float = static_cast<int64_t>(sizeof(float));
  const int64_t slots = shape.ranks == 1 ? 0 : 3 * rows * shape.element_bytes + 4 * rows * of_float;
  return tokens * (results + slots);
}

// Rows that hops carry apart from others (ring/travelling_rows.h) are packed on their way, at most
// half of a slot over each link: of keys and values at both ends, of their gradients in fp32 where
// they leave.
int64_t PackedRowBytes(const AttentionOptions& options, const IndexShape& shape) {
  const bool has_known =
      DefinitionOf(options.pattern).is_known_before_data() || !options.dense_layers.empty();
  if (shape.ranks == 1 || !has_known || options.ring.kind == ring::RingKind::kAllGather) return 0;
  const int64_t links = options.ring.outer > 1 ? 2 : 1,
                slot = shape.tokens / shape.ranks * 2 * shape.kv_heads * shape.head_dim;
  const auto of_float = static_cast<int64_t>(sizeof(float));
  return links * slot * (2 * shape.element_bytes + of_float) / 2;
}

}  // namespace

IndexMemory IndexMemoryOf(const AttentionOptions& options, const IndexShape& shape,
                          int64_t layers) {
  const PatternDefinition& definition = DefinitionOf(options.pattern);
  IndexMemory memory;
  if (definition.index_memory != nullptr) memory = definition.index_memory(options, shape);
  memory.kept *= std::max<int64_t>(0, layers - std::ssize(options.dense_layers));
  // Documents that lie by themselves are each in one call alone, short or long.
  if (options.dense_below > 0 && !options.by_documents) {
    memory.working += ShortDocumentBytes(shape);
  }
  memory.working += PackedRowBytes(options, shape);
  return memory;
}

std::string MeasuredName(const AttentionOptions& options, int64_t heads, int64_t kv_heads) {
  std::string name(DefinitionOf(options.pattern).name);
  if (options.pattern == Pattern::kKeyGroups && options.group_queries != kernels::kGroupTile) {
    absl::StrAppendFormat(&name, " of %d queries", options.group_queries);
  }
  if (HeadsTogether(options, heads, kv_heads) == 2) name += " of pairs of heads";
  return name;
}

absl::StatusOr<std::shared_ptr<LayerIndex>> BuildIndex(const AttentionOptions& options,
                                                       const IndexInputs& inputs,
                                                       IndexDevice& device) {
  const PatternDefinition* const definition = FindDefinition(options.pattern);
  if (definition == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention pattern %d is unknown to this worker", static_cast<int>(options.pattern)));
  }
  auto index = std::make_shared<LayerIndex>();
  index->tile = options.tile;
  index->documents = inputs.documents;
  index->count_tiles = definition->count_tiles;
  if (definition->known != nullptr) index->known = definition->known(options);
  RETURN_IF_ERROR(definition->build(options, inputs, device, *index));
  // Without intervals it would be causal.
  if (options.mask != Mask::kCausal && index->visible() == nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "attention.mask: %s: nobody said what the sequence's queries see; call SetDocuments for "
        "each sequence",
        std::string(MaskName(options.mask))));
  }
  return index;
}

}  // namespace ringleader::patterns
