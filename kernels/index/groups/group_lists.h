// Groups of keys that tiles of queries chose as lists, which attention reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/block_choice.h"

namespace ringleader::kernels::index {

// Fills in `lists`; `layout`: of the queries. Groups past the lists' capacity are dropped, so it is
// the most that a row keeps, or more.
absl::Status ListGroups(const ChosenGroups& of, const ShardLayout& layout, int heads,
                        const GroupLists& lists, cudaStream_t stream);

}  // namespace ringleader::kernels::index
