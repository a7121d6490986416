#include "bench/longca/ranks/scheme.h"

#include "absl/strings/str_cat.h"
#include "bench/longca/problem.h"
#include "ring/division.h"
#include "ring/head_shares.h"

namespace ringleader::bench {

using kernels::LayoutKind;
using ring::RingKind;

std::string Scheme::name() const {
  constexpr const char* kKinds[] = {"flat", "hierarchical", "all-gather"};
  if (ranks() == 1) return "one rank";
  if (ring.ranks() == 1) return "ulysses";
  std::string name =
      absl::StrCat(head_ranks > 1 ? absl::StrCat("usp of ", head_ranks, " ") : "",
                   kKinds[static_cast<int>(ring.kind)], " ", std::string(ring::LayoutName(layout)));
  if (head_groups > 1) absl::StrAppend(&name, " in ", head_groups, " head groups");
  if (has_helpers) absl::StrAppend(&name, " with helpers");
  return name;
}

patterns::AttentionOptions Scheme::Options(const Asked& asked, const PatternChoice& choice,
                                           int64_t tokens, int tile) const {
  patterns::AttentionOptions options = {
      .pattern = asked.window > 0 ? patterns::Pattern::kSlidingWindow : patterns::Pattern::kDense,
      .mask = asked.mask,
      .mask_block = asked.block,
      .window = asked.window,
      .tile = tile,
      .layout = layout,
      .stripe = tile,
      .ring = ring,
      .head_ranks = head_ranks,
      .head_groups = head_groups};
  choice.Apply(tokens, &options);
  return options;
}

std::vector<int64_t> Scheme::PositionsOf(int rank, int64_t tokens, int tile) const {
  const kernels::ShardLayout shard{.kind = layout,
                                   .ranks = ring.ranks(),
                                   .rank = rank / head_ranks,
                                   .stripe = tile,
                                   .tokens = tokens};
  std::vector<int64_t> positions(tokens / ranks());
  const int64_t first = rank % head_ranks * std::ssize(positions);
  for (int64_t i = 0; i < std::ssize(positions); ++i) positions[i] = shard.Position(first + i);
  return positions;
}

std::vector<int> Scheme::RingOf(int rank) const {
  std::vector<int> members(ring.ranks());
  for (int i = 0; i < ring.ranks(); ++i) members[i] = i * head_ranks + rank % head_ranks;
  return members;
}

std::vector<int> Scheme::HeadsOf(int rank) const {
  std::vector<int> members(head_ranks);
  for (int i = 0; i < head_ranks; ++i) members[i] = rank - rank % head_ranks + i;
  return members;
}

std::vector<Scheme> SchemesOn(int ranks) {
  if (ranks == 1) return {Scheme{}};
  std::vector<Scheme> schemes;
  const auto add = [&](RingKind kind, int inner, LayoutKind layout, Scheme more = {}) {
    more.ring = {kind, inner,
                 kind == RingKind::kHierarchical ? ranks / more.head_ranks / inner : 1};
    more.layout = layout;
    schemes.push_back(more);
  };
  add(RingKind::kFlat, ranks, LayoutKind::kContiguous);
  add(RingKind::kFlat, ranks, LayoutKind::kContiguous, {.has_helpers = true});
  for (const auto layout : {LayoutKind::kZigzag, LayoutKind::kStriped}) {
    add(RingKind::kFlat, ranks, layout);
    if (ranks % 2 == 0 && ranks > 2) add(RingKind::kHierarchical, ranks / 2, layout);
    add(RingKind::kAllGather, ranks, layout);
  }
  add(RingKind::kAllGather, ranks, LayoutKind::kStriped, {.head_groups = kKvHeads});
  for (int heads = 2; heads <= ranks; ++heads) {
    const ring::HeadShares shares = {.ranks = heads, .heads = kHeads, .kv_heads = kKvHeads};
    if (ranks % heads != 0 || !ring::CheckHeadShares(shares).ok()) continue;
    const int around = ranks / heads;
    add(RingKind::kFlat, around, heads == ranks ? LayoutKind::kContiguous : LayoutKind::kStriped,
        {.head_ranks = heads});
    // LoongTrain's two dimensions.
    if (around % 2 == 0 && around > 2) {
      add(RingKind::kHierarchical, around / 2, LayoutKind::kStriped, {.head_ranks = heads});
    }
  }
  return schemes;
}

}  // namespace ringleader::bench
