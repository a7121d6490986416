// By how much the groups' attention is to shrink or grow so that groups that wait for each other
// take as long (attention.balance; SparseBalance, arXiv 2604.13847, Algorithm 1, steps 1 to 3).
// All ranks know what the step's dealing predicts, so nothing is sent for it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "balance/dealing.h"
#include "balance/sample_weights.h"
#include "patterns/pattern.h"
#include "ringleader/kernels/balance_steps.h"

namespace ringleader::trainer {

// The least ratio of the slowest group to the mean at which groups are moved, alike on any number
// of ranks.
double WorthMoving(patterns::Pattern pattern);

// Returns ContextAttention::SetMove's factor for each micro-batch of `group`. Groups that sum their
// gradients `once` a step wait for each other's steps, and all others for the micro-batches of the
// same number, of the groups that have one. `tokens[i]`: of sample i of the step. `permille`: the
// group's speed in thousandths of the usual, as the dealing went by it. 1 where the weights do not
// say what attention takes, and where the slowest of those that wait for each other is predicted to
// take less than `worth_moving` times their mean.
std::vector<float> GroupMoves(const balance::Dealing& dealing, std::span<const uint64_t> tokens,
                              const balance::SampleWeights& weights, size_t group, int64_t permille,
                              kernels::Anchor anchor, double worth_moving, bool once);

}  // namespace ringleader::trainer
