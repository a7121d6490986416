#include "coordinator/planner/simulate/laid_documents.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "balance/document_dealing.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "patterns/check_options.h"
#include "patterns/sample.h"
#include "ring/document_layout.h"

namespace ringleader::planner {
namespace {

// What each rank holds of documents that are apart, and which calls that makes.
absl::Status CountApart(const patterns::AttentionOptions& attention, int ranks, int64_t stripe,
                        LaidDocuments* documents) {
  std::vector<int64_t> firsts = {0};
  for (const int64_t tokens : documents->tokens) firsts.push_back(firsts.back() + tokens);
  const int64_t all = firsts.back();
  firsts.pop_back();
  ASSIGN_OR_RETURN(const auto layout,
                   ring::DocumentLayout::CreateApart(all, firsts, documents->holders, ranks,
                                                     static_cast<int>(stripe)));
  documents->local_tokens = layout.local_tokens();
  documents->spread_tokens.assign(layout.spread_tokens().begin(), layout.spread_tokens().end());
  int64_t spread_tokens = 0, spread_calls = 0;  // that are chosen for
  for (const int64_t tokens : layout.SpreadLengths()) {
    const int64_t rows = RoundUp(tokens, ranks * stripe) / ranks;
    documents->travelling_tokens += rows;
    if (IsShort(attention, tokens)) continue;
    spread_tokens += rows;
    ++spread_calls;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t chosen = spread_tokens, calls = 0;
    bool has_short = false;
    for (const int64_t tokens : layout.WholeLengths(rank)) {
      if (IsShort(attention, tokens)) {
        has_short = true;
        continue;
      }
      chosen += tokens;
      ++calls;
    }
    documents->chosen_tokens = std::max(documents->chosen_tokens, chosen);
    documents->chosen_calls = std::max(documents->chosen_calls, spread_calls + calls);
    // One more for all that are short.
    documents->whole_calls = std::max(documents->whole_calls, calls + (has_short ? 1 : 0));
  }
  return absl::OkStatus();
}

}  // namespace

bool IsShort(const patterns::AttentionOptions& attention, int64_t tokens) {
  return tokens <= attention.tile || tokens < attention.dense_below;
}

LaidDocuments LayInStripes(std::vector<int64_t> tokens, int ranks) {
  LaidDocuments documents;
  const int64_t all = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
  documents.holders.resize(tokens.size());
  documents.spread = std::ssize(tokens);
  documents.ring_tokens = all;
  for (int64_t first = 0; const int64_t of_document : tokens) {
    documents.ring_firsts.push_back(first);
    first += of_document;
  }
  documents.tokens = std::move(tokens);
  documents.local_tokens = documents.travelling_tokens = all / ranks;
  documents.spread_tokens.assign(ranks, all / ranks);
  return documents;
}

LaidDocuments LayOnOneRank(std::vector<int64_t> tokens) {
  LaidDocuments documents = LayInStripes(std::move(tokens), /*ranks=*/1);
  documents.holders.assign(documents.tokens.size(), 0);
  documents.spread = documents.travelling_tokens = 0;
  documents.spread_tokens = {0};
  return documents;
}

double LaidDocuments::ChosenTiles(double heads, const patterns::AttentionOptions& attention,
                                  int ranks) const {
  double tiles = 0;
  for (const int64_t of_document : tokens) {
    if (IsShort(attention, of_document)) continue;
    const auto blocks = static_cast<double>(CeilDiv(of_document, attention.tile));
    tiles += heads * blocks * (blocks + 1) / 2;
  }
  return tiles / ranks;
}

absl::StatusOr<LaidDocuments> LayByDocuments(std::vector<int64_t> tokens,
                                             const patterns::AttentionOptions& attention, int ranks,
                                             const balance::SampleWeights& weights) {
  LaidDocuments documents = LayInStripes(std::move(tokens), ranks);
  const int64_t stripe = attention.stripe != 0 ? attention.stripe : attention.tile;
  documents.are_apart = patterns::AreApart(attention);
  const auto deal = documents.are_apart ? balance::DealDocumentsApart : balance::DealDocuments;
  balance::DocumentDealing dealing = deal(documents.tokens, ranks, stripe, weights);
  documents.holders = std::move(dealing.holders);
  documents.imbalance = dealing.imbalance;
  for (size_t i = 0; i < documents.tokens.size(); ++i) {
    if (!documents.holders[i].has_value()) continue;
    --documents.spread;
    documents.spread_tokens[*documents.holders[i]] -= documents.tokens[i];
  }
  documents.travelling_tokens = 0;
  const std::vector<int64_t> firsts = std::exchange(documents.ring_firsts, {});
  const int64_t all = std::exchange(documents.ring_tokens, 0);
  if (documents.are_apart) {
    RETURN_IF_ERROR(CountApart(attention, ranks, stripe, &documents));
  } else if (documents.spread > 0) {
    ASSIGN_OR_RETURN(const auto layout,
                     ring::DocumentLayout::Create(all, firsts, documents.holders, ranks,
                                                  static_cast<int>(stripe)));
    documents.spread_tokens.assign(layout.spread_tokens().begin(), layout.spread_tokens().end());
    documents.spread_pairs.assign(ranks, 0);
    double all_pairs = 0;
    layout.VisitSpread([&](int rank, size_t document, int64_t first, int64_t count) {
      const int64_t before = first - firsts[document];
      const double pairs = static_cast<double>(count) * static_cast<double>(2 * before + count) / 2;
      documents.spread_pairs[rank] += pairs;
      all_pairs += pairs;
    });
    for (double& share : documents.spread_pairs) share /= all_pairs;
    documents.ring_tokens = layout.ring_tokens();
    documents.ring_firsts = layout.RingFirsts();
    documents.is_uneven = true;
    documents.travelling_tokens = *std::ranges::max_element(documents.spread_tokens);
  }
  return documents;
}

ring::TileLoads LaidDocuments::Loads(const patterns::AttentionOptions& attention, int ranks,
                                     double heads, absl::FunctionRef<Sample> sample) const {
  // Heads of a document of so many blocks, and what they visit alone, tiles and columns.
  struct Alone {
    std::vector<ring::HeadPattern> heads;
    ring::TileLoads loads{1};
    double weight = 0;
  };
  std::map<std::pair<int64_t, bool>, Alone> known;
  const auto alone_of = [&](int64_t blocks, bool is_dense) -> const Alone& {
    const auto [found, is_new] = known.try_emplace({blocks, is_dense});
    Alone& alone = found->second;
    if (!is_new) return alone;
    alone.heads =
        is_dense ? std::vector{patterns::Visible(attention, blocks, blocks)} : sample(blocks);
    alone.weight = heads / static_cast<double>(alone.heads.size());
    for (const ring::HeadPattern& head : alone.heads) {
      alone.loads.AddHead(head, {.tokens = blocks * attention.tile}, attention.tile, alone.weight);
    }
    return alone;
  };
  ring::TileLoads loads(ranks);
  double spread_tiles = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool is_dense = !are_apart || IsShort(attention, tokens[i]);
    const int64_t blocks = CeilDiv(tokens[i], attention.tile);
    const Alone& alone = alone_of(blocks, is_dense);
    if (holders[i].has_value()) {
      loads.AddRing(*holders[i], *holders[i], alone.loads.of(0, 0));
      loads.AddColumns(*holders[i], alone.loads.columns(0));
      continue;
    }
    // Dealt in stripes by itself, with the tiles that it has.
    kernels::ShardLayout shards = patterns::LayoutOf(attention, ranks, 0, 0);
    const int64_t whole = RoundUp(blocks, int64_t{ranks} * shards.stripe / attention.tile);
    shards.tokens = whole * attention.tile;
    const Alone& filled = alone_of(whole, is_dense);
    const double tiles = alone.loads.RankTotals()[0];
    for (const ring::HeadPattern& head : filled.heads) {
      loads.AddHead(head, shards, attention.tile,
                    filled.weight * tiles / filled.loads.RankTotals()[0]);
    }
    spread_tiles += tiles;
  }
  if (spread == std::ssize(tokens)) return loads;
  // Ranks that hold more of them, or later parts, do more.
  for (int rank = 0; rank < std::ssize(spread_pairs); ++rank) {
    loads.AddRing(rank, rank, spread_tiles * (spread_pairs[rank] - 1.0 / ranks));
  }
  return loads;
}

}  // namespace ringleader::planner
