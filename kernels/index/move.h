// The arithmetic of moved choices (ringleader/kernels/balance_steps.h) on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/index/between_ranks.h"
#include "kernels/index/select.h"
#include "ringleader/kernels/balance_steps.h"

namespace ringleader::kernels::index {

absl::Status CountWork(const CountWorkStep& step, cudaStream_t stream);
absl::Status FindMove(const FindMoveStep& step, cudaStream_t stream);
absl::Status SumChoices(const SumChoicesStep& step, cudaStream_t stream);
absl::Status MoveBudgets(const MoveBudgetsStep& step, cudaStream_t stream);
absl::Status HoldMass(const HoldMassStep& step, cudaStream_t stream);

// What each head chose in `selected`, after Select: [heads].
absl::Status NoteChoices(const SelectArgs& selected, HeadChoice* choices, cudaStream_t stream);

// Adds a choice that was to be moved by *factor, unless that is 1, to `counters`.
absl::Status CountMove(const int64_t* work_before, const int64_t* work_after, const float* factor,
                       LayerCounters* counters, cudaStream_t stream);

}  // namespace ringleader::kernels::index
