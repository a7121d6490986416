// The oracle of the choice of groups of keys: fp64, pair by pair, over the whole sequence, as
// DimEnergyStep to KeyGroupGateStep (ringleader/kernels/block_choice.h) define it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringleader/kernels/attention.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::reference::testing {

// q: [tokens, heads, d] and k: [tokens, kv_heads, d], the whole sequence, as of all that follow:
// the dimensions that a KV head is scored by, ascending.
std::vector<int> PickedDims(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                            int kv_head);
// [heads from first to end, tokens, dims]: `x` rounded to e4m3 in units of its scale.
std::vector<double> NarrowHeads(const TokenMajor<const float>& x, int first, int end,
                                const std::vector<int>& dims);

// What tests ask each engine to choose: in one document or several, by tiles of so many queries,
// for so many heads together.
struct AskedChoice {
  bool packed;
  int32_t tile;
  int32_t heads_together;
};
inline constexpr AskedChoice kAskedChoices[] = {
    {false, kGroupTile, 1}, {true, kGroupTile, 1}, {false, 16, 1}, {true, 16, 1},
    {false, kGroupTile, 2}, {true, kGroupTile, 2}, {true, 16, 2}};

// Of so many tokens and at this density some tiles, not all, keep enough groups for references of
// the sample. Documents, where there are any, start at 0, at 77 and 35 tokens before the end.
struct SampledChoice {
  int64_t tokens;
  AskedChoice asked;
};
inline constexpr float kSampledDensity = 0.95f;
inline constexpr SampledChoice kSampledChoices[] = {
    {1024, {false, 16, 1}}, {1533, {true, 16, 1}},          {1536, {true, 16, 1}},
    {2048, {true, 16, 2}},  {4093, {false, kGroupTile, 1}}, {4608, {true, kGroupTile, 1}}};
inline std::vector<int64_t> SampledDocuments(const SampledChoice& choice) {
  if (!choice.asked.packed) return {};
  return {0, 77, choice.tokens - 35};
}

class KeyGroupOracle {
 public:
  // Reads the step's scale, density, tile and heads_together: `head` below is a row of these, one
  // of the choice's. starts: by position, where the document starts; empty: the sequence is one.
  KeyGroupOracle(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                 const KeyGroupGateStep& step, const std::vector<int32_t>& starts);

  // What the tile of queries at `tile` of the sequence gives a group; -infinity: it has no say.
  double Score(int head, int64_t tile, int64_t group) const {
    return scores_[(head * tiles_ + tile) * groups_ + group];
  }
  // How far two scores may be from each other's right place in the order if Hopper's tensor cores
  // sum the products to half precision. An instruction takes 32 of them and the sum so far; all are
  // aligned to the largest, of which 13 bits below the leading one are kept, and the sum is
  // rounded. Each term thus loses less than 2^-13 of the largest, the sum at most 2^-11 of itself.
  // A distance is a product less a product, no more than two of them, and rounded. Two scores are
  // compared.
  double TensorCoreTolerance() const {
    return 2.0 * double{step_.scale} * (2.0 * most_lost_ + 0x1p-11 * 2.0 * most_product_);
  }
  // The share of the tiles, of all rows of heads, whose references are of the sample.
  double ShareSampled() const;
  // What is wrong with keeping `kept`, groups of the sequence, ascending; "" if nothing. Scores
  // that differ by no more than `tolerance` may go either way, and those that are equal go where
  // ties go: with a tolerance of 0 the choice is the only one.
  std::string Complaint(int head, int64_t tile, const std::vector<int64_t>& kept,
                        double tolerance) const;
  // The same for all rows of a rank's choice, KeyGroupGateStep's.
  std::string Complaint(const std::vector<uint32_t>& chosen, const ShardLayout& layout,
                        double tolerance) const;

 private:
  // Fills in scores_ with what a query head has to say. queries and keys: [tokens, dims].
  void ScoreHead(int head, const double* queries, const double* keys, int64_t dims);
  // How many groups the tile at `tile` of a row of heads keeps, with the step's move or without.
  int32_t Kept(int head, int64_t tile, bool is_moved) const;
  bool IsSampled(int head, int64_t tile) const {
    return Kept(head, tile, false) >= 6 * step_.tile * step_.heads_together;
  }
  // Takes note of what the tensor cores may lose of it.
  double Product(const double* query, const double* key, int64_t dims);
  int64_t StartOf(int64_t position) const { return starts_.empty() ? 0 : starts_[position]; }

  const KeyGroupGateStep step_;
  const std::vector<int32_t> starts_;
  const int heads_;  // rows of them
  const int64_t tokens_, tiles_, groups_;
  std::vector<double> scores_;  // [heads, tiles, groups]
  double most_product_ = 0.0;   // of a visible pair's, its magnitude
  double most_lost_ = 0.0;      // of one of these
};

// The groups of the sequence, ascending, that a head's `tile`-th local tile of `queries` queries
// keeps of a rank's choice.
std::vector<int64_t> GroupsOfRow(const std::vector<uint32_t>& chosen, const ShardLayout& layout,
                                 int head, int64_t tile, int32_t queries = kGroupTile);

}  // namespace ringleader::kernels::reference::testing
