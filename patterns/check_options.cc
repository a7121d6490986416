#include "patterns/check_options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/pattern.h"
#include "ring/head_shares.h"

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

// "dense, sliding_window": those for which `holds`.
template <typename Predicate>
std::string NamesOf(Predicate holds) {
  std::string names;
  for (const PatternDefinition* definition : Definitions()) {
    if (!holds(*definition)) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(definition->name));
  }
  return names;
}

absl::Status CheckSelection(const AttentionOptions& options, const PatternDefinition& definition) {
  if (options.selection == Selection::kFull) return absl::OkStatus();
  if (options.dense_below > 0) {
    return Invalid(
        "attention.selection: causal does not go with attention.dense_below, which goes by how "
        "many tokens of its "
        "document come after a query, too; give attention.dense_below: 0, or selection: full");
  }
  if (options.balance.anchor != kernels::Anchor::kNone) {
    return Invalid(
        "attention.selection: causal does not go with attention.balance.anchor, which moves a "
        "query's choice by what "
        "comes after it, too; give attention.balance.anchor: none, or selection: full");
  }
  if (options.mask != Mask::kCausal && definition.causal_choice == CausalChoice::kOnAsk) {
    return Invalid(absl::StrFormat(
        "attention.selection: causal does not go with attention.mask: %s, under which "
        "attention.pattern: %s chooses among keys that come after a query, too; give "
        "attention.mask: causal, or selection: full",
        std::string(MaskName(options.mask)), std::string(definition.name)));
  }
  if (definition.causal_choice != CausalChoice::kNever) return absl::OkStatus();
  return Invalid(absl::StrFormat(
      "attention.selection: causal does not go with attention.pattern: %s, which chooses what a "
      "query attends to by later queries, too; give full, or one of the patterns %s",
      std::string(definition.name), NamesOf([](const PatternDefinition& other) {
        // Without a choice there is no such field.
        return other.causal_choice != CausalChoice::kNever && other.pattern != Pattern::kDense;
      })));
}

absl::Status CheckMask(const AttentionOptions& options, const PatternDefinition& definition) {
  if (options.mask == Mask::kCausal) return absl::OkStatus();
  const std::string mask(MaskName(options.mask));
  if (options.mask == Mask::kBlockCausal && options.mask_block < 1) {
    return Invalid(absl::StrFormat("attention.mask_block is %d; a block has at least 1 token",
                                   options.mask_block));
  }
  if (options.probe_every > 0) {
    return Invalid(
        absl::StrFormat("attention.probe_every: a probe compares with causal attention; give 0 "
                        "with attention.mask: "
                        "%s",
                        mask));
  }
  if (options.dense_below > 0) {
    return Invalid(absl::StrFormat(
        "attention.dense_below: short documents attend causally; give 0 with attention.mask: %s",
        mask));
  }
  if (definition.takes_masks) return absl::OkStatus();
  return Invalid(absl::StrFormat(
      "attention.mask: %s does not go with attention.pattern: %s, whose choice is of "
      "earlier keys by construction; give causal, or one of the patterns %s",
      mask, std::string(definition.name),
      NamesOf([](const PatternDefinition& other) { return other.takes_masks; })));
}

absl::Status CheckBalance(const AttentionOptions& options, const PatternDefinition& definition) {
  if (!(options.balance.tolerance >= 0.0f && options.balance.tolerance <= 0.5f)) {
    return Invalid(absl::StrFormat("attention.balance.tolerance is %g; it must lie in [0, 0.5]",
                                   options.balance.tolerance));
  }
  const auto can_be_moved = [](const PatternDefinition& pattern) {
    return pattern.balancing != Balancing::kNever;
  };
  if (options.balance.anchor == kernels::Anchor::kNone || can_be_moved(definition)) {
    return absl::OkStatus();
  }
  return Invalid(
      absl::StrFormat("attention.balance.anchor: attention.pattern: %s has no choice that could be "
                      "moved; give none, "
                      "or one of the patterns %s",
                      std::string(definition.name), NamesOf(can_be_moved)));
}

absl::Status CheckHeadBudgets(const AttentionOptions& options) {
  if (!options.adapt_by_probe) return absl::OkStatus();
  if (options.probe_every == 0) {
    return Invalid(
        "attention.head_budgets: by_probe follows the probes, of which attention.probe_every: 0 "
        "asks for none; give attention.probe_every: 16, or attention.head_budgets: equal");
  }
  if (options.balance.anchor == kernels::Anchor::kNone) return absl::OkStatus();
  return Invalid(
      "attention.head_budgets: by_probe does not go with attention.balance.anchor, which moves "
      "what is probed by how ranks are loaded; give attention.balance.anchor: none, or "
      "attention.head_budgets: equal");
}

}  // namespace

bool AreApart(const AttentionOptions& options) {
  return options.by_documents && options.pattern != Pattern::kDense;
}

absl::Status CheckByDocuments(const AttentionOptions& options) {
  if (!options.by_documents) return absl::OkStatus();
  if (options.adapt_by_probe) {
    return Invalid(
        "parallelism.layout: documents does not go with attention.head_budgets: by_probe, for "
        "documents that one rank holds are probed there alone; give parallelism.layout: striped, "
        "or attention.head_budgets: equal");
  }
  if (options.mask != Mask::kCausal) {
    return Invalid(absl::StrFormat(
        "parallelism.layout: documents goes with attention.mask: causal alone, not with %s; give "
        "parallelism.layout: striped",
        std::string(MaskName(options.mask))));
  }
  if (options.layout == LayoutKind::kStriped) return absl::OkStatus();
  return Invalid("parallelism.layout: documents spreads documents in stripes alone");
}

// The field that splits heads, with its value.
std::string HeadFieldOf(const AttentionOptions& options) {
  return options.head_groups > 1
             ? absl::StrFormat("parallelism.head_groups: %d", options.head_groups)
             : absl::StrFormat("parallelism.heads: %d", options.head_ranks);
}

absl::Status CheckHeadRanks(const AttentionOptions& options) {
  if (options.head_ranks == 1 && options.head_groups == 1) return absl::OkStatus();
  if (options.head_ranks < 1 || options.head_groups < 1) {
    return Invalid(
        absl::StrFormat("parallelism.heads is %d and parallelism.head_groups %d; give 1 or more",
                        options.head_ranks, options.head_groups));
  }
  std::string other;
  if (options.adapt_heads) {
    other = absl::StrFormat("attention.head_budgets: %s, which compares all heads; give equal",
                            options.adapt_by_probe ? "by_probe" : "by_recall");
  }
  if (options.dense_below > 0) {
    other = "attention.dense_below, which attends twice and chooses by token; give 0";
  }
  if (options.balance.anchor != kernels::Anchor::kNone) {
    other = "attention.balance.anchor, which compares what all heads keep; give none";
  }
  // Last, to be told first: without it attention.dense_below has another default.
  if (options.by_documents) {
    other = "parallelism.layout: documents; give parallelism.layout: striped";
  }
  if (other.empty()) return absl::OkStatus();
  return Invalid(
      absl::StrFormat("%s does not go with %s, or leave heads out", HeadFieldOf(options), other));
}

absl::Status CheckHeads(const AttentionOptions& options, int64_t heads, int64_t kv_heads) {
  const ring::HeadShares shares = {
      .ranks = options.head_ranks, .heads = heads, .kv_heads = kv_heads};
  RETURN_IF_ERROR(ring::CheckHeadShares(shares));
  const int64_t groups = options.head_groups;
  if (shares.local_kv_heads() % groups != 0) {
    return Invalid(absl::StrFormat(
        "parallelism.head_groups: %d does not divide the %d KV heads of a trainer; give a divisor",
        groups, shares.local_kv_heads()));
  }
  const PatternDefinition& pattern = DefinitionOf(options.pattern);
  const int of_choice = HeadsTogether(options, heads, kv_heads);
  if (heads / kv_heads % of_choice != 0) {
    return Invalid(absl::StrFormat(
        "attention.group_heads is %d; the model has %d query heads for each KV head, an odd "
        "number: give 1",
        of_choice, heads / kv_heads));
  }
  const bool are_split = options.head_ranks > 1 || groups > 1;
  if (!are_split || pattern.is_known_before_data()) return absl::OkStatus();
  if (const int64_t together = shares.local_heads() / groups; together % (2 * of_choice) != 0) {
    return Invalid(absl::StrFormat(
        "%s: a trainer would attend at a time with %d of %d heads; attention.pattern: %s settles "
        "ties by whether the number of %s is even, so that it must have a multiple of %d; give "
        "fewer%s",
        HeadFieldOf(options), together, heads, std::string(pattern.name),
        of_choice == 1 ? "a head" : "a pair of heads", 2 * of_choice,
        of_choice == 2 && together % 2 == 0 ? ", or attention.group_heads: 1" : ""));
  }
  if (pattern.reads_kv_heads_queries && options.head_ranks > kv_heads) {
    return Invalid(absl::StrFormat(
        "parallelism.heads: %d trainers share %d KV heads; attention.pattern: %s chooses by the "
        "queries of all heads of a KV head, which one trainer must have; give %d at most, or "
        "another pattern, such as vertical_slash",
        options.head_ranks, kv_heads, std::string(pattern.name), kv_heads));
  }
  return absl::OkStatus();
}

absl::Status CheckPattern(const AttentionOptions& options) {
  const PatternDefinition* const definition = FindDefinition(options.pattern);
  if (definition == nullptr) {
    return Invalid(
        absl::StrFormat("attention.pattern: %d is unknown", static_cast<int>(options.pattern)));
  }
  RETURN_IF_ERROR(CheckMask(options, *definition));
  RETURN_IF_ERROR(CheckSelection(options, *definition));
  RETURN_IF_ERROR(CheckBalance(options, *definition));
  RETURN_IF_ERROR(CheckHeadBudgets(options));
  return definition->check(options);
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
  RETURN_IF_ERROR(CheckPattern(options));
  RETURN_IF_ERROR(CheckHeadRanks(options));
  if (options.head_groups > 1 && options.ring.kind != ring::RingKind::kAllGather) {
    return Invalid(
        absl::StrFormat("parallelism.head_groups: %d goes with parallelism.ring: all_gather alone",
                        options.head_groups));
  }
  return CheckByDocuments(options);
}

ring::Division DivisionOf(const AttentionOptions& options, int ranks) {
  const bool any_length =
      options.layout == LayoutKind::kContiguous && !DefinitionOf(options.pattern).needs_whole_tiles;
  return {.layout = options.layout,
          .ranks = ranks,
          .tile = any_length ? 1 : options.tile,
          .stripe = options.stripe,
          .by_documents = options.by_documents,
          .heads = options.head_ranks};
}

absl::Status CheckLength(const AttentionOptions& options, int ranks, int64_t local_tokens) {
  return ring::CheckDivides("data.sequence_length", local_tokens * ranks,
                            DivisionOf(options, ranks));
}

}  // namespace ringleader::patterns
