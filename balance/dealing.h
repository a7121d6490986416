// Deals a step's samples to data-parallel groups, and in a group to micro-batches, by what they are
// predicted to take (SparseBalance, arXiv 2604.13847, Algorithm 2: sparsity-aware batching). No
// sample moves to another step, so that random sampling is untouched. docs/balance.md describes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "balance/sample_weights.h"
#include "ring/division.h"

namespace ringleader::balance {

struct DealingRules {
  int groups = 1;
  int64_t capacity = 0;  // tokens of a micro-batch; no sample has more
  int64_t multiple = 1;  // tokens: a micro-batch is filled up to a multiple of them
  // A micro-batch holds one sample, because the pattern chooses for a micro-batch as a whole.
  bool one_sample = false;
  // How fast each group is, in thousandths of the usual; empty: all alike. What a group takes is
  // predicted at its speed.
  std::vector<uint32_t> group_permille = {};

  int64_t PermilleOf(size_t group) const {
    return group < group_permille.size() ? std::max(1u, group_permille[group]) : 1000;
  }
};

// The rules of `groups` that train samples, in micro-batches of up to `capacity` tokens that are
// whole tiles and lie as `division` has it. `goes_by_distance`: whether what attention's pattern
// chooses is a matter of distance alone (patterns/pattern.h).
DealingRules RulesForSamples(int groups, int64_t capacity, const ring::Division& division,
                             bool goes_by_distance);

struct MicroBatch {
  std::vector<uint32_t> samples;  // numbers in the step, ascending
  int64_t tokens = 0;             // of the samples
  int64_t padded = 0;             // tokens, with those that fill it up
  int64_t microseconds = 0;       // predicted
};

struct Dealing {
  // [group][…], those that take longest first, so that groups that meet at their micro-batches wait
  // little.
  std::vector<std::vector<MicroBatch>> groups;

  size_t MostMicroBatches() const;  // of a group
  size_t MicroBatches() const;      // of all groups
  int64_t PaddingTokens() const;    // of all groups
  // Max over groups / mean of the predicted times.
  double Imbalance() const;
};

// `tokens[i]`: length of sample i of the step, at most rules.capacity. A pure function: every rank
// deals alike, and a resumed attempt deals its steps as before. Every group gets a sample where
// there are enough. 1,024 groups and 16,384 samples take a few milliseconds.
Dealing Deal(std::span<const uint64_t> tokens, const SampleWeights& weights,
             const DealingRules& rules);

// Deals sample i to group i mod groups, in a micro-batch of its own, as equally long samples need.
Dealing DealInOrder(std::span<const uint64_t> tokens, const SampleWeights& weights,
                    const DealingRules& rules);

}  // namespace ringleader::balance
