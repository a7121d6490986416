#include "worker/trainer/steps/deal/dealt_step.h"

#include "patterns/pattern.h"
#include "ring/division.h"

namespace ringleader::trainer {

balance::Dealing DealStep(const TrainingJob& job, const PlanShape& shape,
                          std::span<const data::Sample> samples,
                          const balance::SampleWeights& weights,
                          const std::vector<uint32_t>& group_permille) {
  std::vector<uint64_t> tokens;
  for (const data::Sample& sample : samples) tokens.push_back(sample.tokens);
  const auto capacity = static_cast<int64_t>(job.sequence_length);
  balance::DealingRules rules = {.groups = job.data, .capacity = capacity};
  if (job.batching.samples) {
    const ring::Division division = {.layout = shape.layout,
                                     .ranks = job.ring_ranks(),
                                     .tile = job.attention.tile,
                                     .stripe = shape.stripe,
                                     .by_documents = shape.by_documents,
                                     .heads = job.attention.head_ranks};
    rules =
        balance::RulesForSamples(job.data, capacity, division,
                                 patterns::DefinitionOf(job.attention.pattern).goes_by_distance());
  }
  rules.group_permille = group_permille;
  return job.batching.samples && !job.deals_in_order ? balance::Deal(tokens, weights, rules)
                                                     : balance::DealInOrder(tokens, weights, rules);
}

std::vector<data::Sample> SamplesOf(const balance::MicroBatch& batch,
                                    std::span<const data::Sample> samples) {
  std::vector<data::Sample> of_batch;
  for (const uint32_t number : batch.samples) of_batch.push_back(samples[number]);
  return of_batch;
}

}  // namespace ringleader::trainer
