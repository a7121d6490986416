// Turns the protocol's messages into the plain values that ring/ and patterns/ use. All errors
// are INVALID_ARGUMENT and name the field, and the number of an enumerator that this program does
// not know or that is not set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "ring/division.h"
#include "ring/ring_schedule.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::jobspec {

// An enumerator of field `path` that a conversion does not take.
absl::Status RefuseEnumerator(std::string_view path, int number);

// The partner of `value` in a table of all enumerators.
template <typename From, typename To, size_t n>
absl::StatusOr<To> Convert(const std::pair<From, To> (&table)[n], From value,
                           std::string_view path) {
  for (const auto& [from, to] : table) {
    if (from == value) return to;
  }
  return RefuseEnumerator(path, value);
}

// DOCUMENTS: kStriped, in which it deals the documents that it spreads; IsByDocuments() tells them
// apart.
absl::StatusOr<kernels::LayoutKind> LayoutOf(v1::ParallelismSpec::Layout layout);
inline bool IsByDocuments(v1::ParallelismSpec::Layout layout) {
  return layout == v1::ParallelismSpec::DOCUMENTS;
}
absl::StatusOr<ring::RingKind> RingOf(v1::ParallelismSpec::Ring ring);

// Whether the planner says how many trainers share out heads (StepPlan.heads).
inline bool PicksHeads(const v1::ParallelismSpec& parallelism) {
  return parallelism.has_heads() && parallelism.heads() == 0;
}
// Whether it says in how many groups of heads keys are gathered (StepPlan.head_groups).
inline bool PicksHeadGroups(const v1::ParallelismSpec& parallelism) {
  return parallelism.has_head_groups() && parallelism.head_groups() == 0;
}
// The job as `plan` runs it: with that plan's heads and groups where it picks them.
v1::JobSpec PlannedJob(const v1::JobSpec& spec, const v1::StepPlan& plan);

// Trainers that share out heads; jobs made before there was a choice have all on each, and those
// whose planner picks until it has.
inline uint32_t HeadRanks(const v1::ParallelismSpec& parallelism) {
  return std::max(1u, parallelism.heads());
}
// Groups of heads whose keys and values are gathered one after the other; 1 on other rings, and
// until the planner has picked.
inline uint32_t HeadGroups(const v1::ParallelismSpec& parallelism) {
  return std::max(1u, parallelism.head_groups());
}
// Trainers of a ring, each with its own tokens or, where heads are shared out, standing for those
// that do.
inline uint32_t RingRanks(const v1::ParallelismSpec& parallelism) {
  return parallelism.context() / HeadRanks(parallelism);
}

// What the attention section says; fields that are unset or of other patterns keep the options' own
// defaults, and so do layout, stripe and ring, which are a plan's.
absl::StatusOr<patterns::AttentionOptions> AttentionOptionsOf(const v1::AttentionSpec& spec);

// Whether documents may be laid out by themselves, which asks for documents that are kept apart.
absl::Status CheckByDocuments(const v1::JobSpec& spec);
// Whether that changes where they lie alone: under patterns other than dense it also changes what
// is chosen, for each document in place of the whole sequence.
bool TrainsAlikeByDocuments(const v1::JobSpec& spec);

// Whether the job's other fields go with the heads that it shares out.
absl::Status CheckHeadRanks(const v1::JobSpec& spec);

// Every sequence of a step.
absl::Status CheckSequencesDivide(const v1::JobSpec& spec, const ring::Division& division);

}  // namespace ringleader::jobspec
