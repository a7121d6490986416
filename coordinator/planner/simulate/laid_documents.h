// The documents of one sequence as the planner prices them: where each lies, and which tiles ranks
// visit for it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "balance/sample_weights.h"
#include "patterns/attention_options.h"
#include "ring/tile_loads.h"

namespace ringleader::planner {

struct LaidDocuments {
  std::vector<int64_t> tokens = {};              // of each; none: a sequence is one document
  std::vector<std::optional<int>> holders = {};  // nullopt: spread over all ranks
  double imbalance = 1;                          // of predicted times
  std::vector<int64_t> spread_tokens = {};       // [rank]: of spread documents
  // [rank], where is_uneven: what share of the pairs in spread documents its queries have.
  std::vector<double> spread_pairs = {};
  // What a rank passes on in a hop: the keys of so many tokens.
  int64_t travelling_tokens = 0;
  // Where what is seen is chosen for each document by itself (patterns::AreApart), each spread one
  // goes through a ring of its own, and each whole one that is not short is a call.
  bool are_apart = false;
  int64_t local_tokens = 0;  // of every rank, filler counted
  // Where one ring passes on all spread documents: its places, and those at which they start. Where
  // it is uneven, each rank holds the first spread_tokens of its own. Apart: none.
  std::vector<int64_t> ring_firsts = {};
  int64_t ring_tokens = 0;
  bool is_uneven = false;
  int64_t spread = 0;       // documents
  int64_t whole_calls = 0;  // of the rank with most
  // What is chosen for, in which short documents are not, of the rank with most: tokens and calls.
  int64_t chosen_tokens = 0, chosen_calls = 0;

  // Tiles that each rank visits of each one's keys, `heads` together. `sample` draws heads, which
  // stand for all, of a document of so many blocks that is attended to by itself.
  using Sample = std::vector<ring::HeadPattern>(int64_t blocks);
  ring::TileLoads Loads(const patterns::AttentionOptions& attention, int ranks, double heads,
                        absl::FunctionRef<Sample> sample) const;

  // Tiles that dense attention would visit of a layer's documents that are chosen for, of a rank in
  // the mean.
  double ChosenTiles(double heads, const patterns::AttentionOptions& attention, int ranks) const;
};

// All of them whole, where one rank holds the sequence.
LaidDocuments LayOnOneRank(std::vector<int64_t> tokens);

// All of them spread, as stripes of a sequence are.
LaidDocuments LayInStripes(std::vector<int64_t> tokens, int ranks);

// As trainers deal them: parallelism.layout: documents. `attention` says by which stripes.
absl::StatusOr<LaidDocuments> LayByDocuments(std::vector<int64_t> tokens,
                                             const patterns::AttentionOptions& attention, int ranks,
                                             const balance::SampleWeights& weights);

// Whether a document of `tokens` is attended to densely where it is by itself.
bool IsShort(const patterns::AttentionOptions& attention, int64_t tokens);

}  // namespace ringleader::planner
