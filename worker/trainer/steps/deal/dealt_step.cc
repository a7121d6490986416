#include "worker/trainer/steps/deal/dealt_step.h"

#include <numeric>

#include "patterns/pattern.h"
#include "ring/division.h"

namespace ringleader::trainer {

balance::Dealing DealStep(const TrainingJob& job, const PlanShape& shape,
                          std::span<const data::Sample> samples,
                          const balance::SampleWeights& weights,
                          const std::vector<uint32_t>& group_permille) {
  std::vector<uint64_t> tokens;
  for (const data::Sample& sample : samples) tokens.push_back(sample.tokens);
  balance::DealingRules rules = {.groups = job.data,
                                 .capacity = static_cast<int64_t>(job.sequence_length),
                                 .group_permille = group_permille};
  if (!job.batching.samples) return balance::DealInOrder(tokens, weights, rules);
  const ring::Division division = {.layout = shape.layout,
                                   .ranks = job.ring_ranks(),
                                   .tile = job.attention.tile,
                                   .stripe = shape.stripe,
                                   .heads = job.attention.head_ranks};
  rules.multiple = std::lcm<int64_t>(job.attention.tile, division.Multiple());
  if (job.deals_in_order) return balance::DealInOrder(tokens, weights, rules);
  // Blocks are chosen for a whole micro-batch, unless documents lie by themselves: a sample that
  // shares it with others would attend to something else wherever it is dealt with others.
  rules.one_sample =
      !shape.by_documents && !patterns::DefinitionOf(job.attention.pattern).goes_by_distance();
  return balance::Deal(tokens, weights, rules);
}

std::vector<data::Sample> SamplesOf(const balance::MicroBatch& batch,
                                    std::span<const data::Sample> samples) {
  std::vector<data::Sample> of_batch;
  for (const uint32_t number : batch.samples) of_batch.push_back(samples[number]);
  return of_batch;
}

}  // namespace ringleader::trainer
