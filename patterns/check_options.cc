#include "patterns/check_options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/pattern.h"

namespace ringleader::patterns {

using kernels::LayoutKind;

namespace {

absl::Status Invalid(const std::string& message) {
  return absl::InvalidArgumentError(message);
}

absl::Status CheckLayout(const AttentionOptions& options) {
  switch (options.layout) {
    case LayoutKind::kContiguous:
    case LayoutKind::kZigzag:
      return absl::OkStatus();
    case LayoutKind::kStriped:
      if (options.stripe >= 1 && options.stripe % options.tile == 0) return absl::OkStatus();
      return Invalid(absl::StrFormat(
          "parallelism.stripe is %d tokens; it must be a multiple of attention.tile (%d)",
          options.stripe, options.tile));
  }
  return Invalid(
      absl::StrFormat("parallelism.layout: %d is unknown", static_cast<int>(options.layout)));
}

}  // namespace

absl::Status CheckSelection(const AttentionOptions& options) {
  const PatternDefinition& definition = DefinitionOf(options.pattern);
  if (options.selection == Selection::kFull || definition.causal_choice != CausalChoice::kNever) {
    return absl::OkStatus();
  }
  std::string able;
  for (const PatternDefinition* other : Definitions()) {
    if (other->causal_choice == CausalChoice::kNever) continue;
    absl::StrAppend(&able, able.empty() ? "" : ", ", std::string(other->name));
  }
  return Invalid(absl::StrFormat(
      "attention.selection: causal does not go with attention.pattern: %s, which chooses what a "
      "query attends to by later queries, too; give full, or one of the patterns %s",
      std::string(definition.name), able));
}

absl::Status CheckByDocuments(const AttentionOptions& options) {
  if (!options.by_documents) return absl::OkStatus();
  if (options.pattern == Pattern::kDense && options.layout == LayoutKind::kStriped) {
    return absl::OkStatus();
  }
  return Invalid(absl::StrFormat(
      "parallelism.layout: documents goes with attention.pattern: dense alone, not with %s: places "
      "that no rank holds lie between tokens of spread documents; give parallelism.layout: striped",
      std::string(DefinitionOf(options.pattern).name)));
}

absl::Status CheckOptions(const AttentionOptions& options, int ranks) {
  if (options.tile != 64 && options.tile != 128) {
    return Invalid(absl::StrFormat("attention.tile is %d; allowed are 64 and 128", options.tile));
  }
  if (options.ring.ranks() != ranks) {
    return Invalid(absl::StrFormat("a ring of %d x %d does not fit %d ranks", options.ring.outer,
                                   options.ring.inner, ranks));
  }
  RETURN_IF_ERROR(CheckLayout(options));
  const PatternDefinition* const definition = FindDefinition(options.pattern);
  if (definition != nullptr) {
    RETURN_IF_ERROR(CheckSelection(options));
    RETURN_IF_ERROR(CheckByDocuments(options));
    return definition->check(options);
  }
  return Invalid(
      absl::StrFormat("attention.pattern: %d is unknown", static_cast<int>(options.pattern)));
}

ring::Division DivisionOf(const AttentionOptions& options, int ranks) {
  const bool any_length =
      options.layout == LayoutKind::kContiguous && !DefinitionOf(options.pattern).needs_whole_tiles;
  return {.layout = options.layout,
          .ranks = ranks,
          .tile = any_length ? 1 : options.tile,
          .stripe = options.stripe,
          .by_documents = options.by_documents};
}

absl::Status CheckLength(const AttentionOptions& options, int ranks, int64_t local_tokens) {
  return ring::CheckDivides("data.sequence_length", local_tokens * ranks,
                            DivisionOf(options, ranks));
}

}  // namespace ringleader::patterns
