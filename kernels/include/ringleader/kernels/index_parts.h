// What ranks exchange before they select the vertical-slash index: steps 3 and 4 of index.h in one
// message, the same for the CPU engine and the GPU.
#pragma once

#include <cstdint>

#include "ringleader/kernels/shard_layout.h"

namespace ringleader::kernels {

// One rank's part, int32 throughout: its masses of diagonals, [heads, blocks], then the masses and
// the positions of its candidate columns, [heads, max_columns] each; the position of an unused slot
// is -1.
struct IndexParts {
  int32_t heads = 0;
  int64_t blocks = 0;
  int32_t max_columns = 0;

  // The sizes of one rank's parts, in elements; each of the three begins at a multiple of 16 bytes.
  RINGLEADER_HOST_DEVICE int64_t candidate_mass() const { return RoundUp(heads * blocks); }
  RINGLEADER_HOST_DEVICE int64_t candidate_positions() const {
    return candidate_mass() + RoundUp(int64_t{heads} * max_columns);
  }
  RINGLEADER_HOST_DEVICE int64_t elements() const {
    return candidate_positions() + RoundUp(int64_t{heads} * max_columns);
  }

 private:
  RINGLEADER_HOST_DEVICE static int64_t RoundUp(int64_t elements) { return (elements + 3) / 4 * 4; }
};

}  // namespace ringleader::kernels
