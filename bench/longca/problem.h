// What every cell of a length works on: tensors, documents and the masks over them, from one seed.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/longca/lengths/document_lengths.h"
#include "kernels/masks/masks.h"
#include "kernels/reference/testing/masked_attention.h"

namespace ringleader::bench {

inline constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64, kTile = 64;
inline constexpr uint64_t kSeed = 20251116;  // masks/lengths.py has the same

// A length with its documents.
struct MaskedSequence {
  MaskedSequence(int64_t tokens, uint64_t seed, const DocumentLengths& lengths = {});

  // Windows and blocks of 1,024 tokens, as in LongCA-bench, or a quarter of a short sequence; what
  // it draws, prefixes and the window of kGlobalSliding, are parts of the sequence.
  // masks/problem.py has the same.
  kernels::Mask MaskOf(kernels::MaskKind kind) const;

  int64_t tokens;
  std::vector<int32_t> documents;  // first positions
};

struct Problem : MaskedSequence {
  Problem(int64_t tokens, uint64_t seed, const DocumentLengths& lengths = {});

  // Whether `mask` shows a query a key, [tokens, tokens], by its slices
  // (kernels/masks/testing/slices.h).
  std::vector<char> Shown(const kernels::Mask& mask) const;
  // fp64, of what `mask` shows and is `visited`; null: all.
  kernels::reference::testing::MaskedAttention Expected(
      const kernels::Mask& mask, const kernels::reference::testing::Visible& visited = {}) const;

  kernels::reference::testing::Tensor q, k, v, d_out;
};

// The largest of the relative errors of output and gradients.
double LargestError(const kernels::reference::testing::MaskedAttention& expected,
                    const kernels::reference::testing::Tensor& out,
                    const kernels::reference::testing::Tensor& dq,
                    const kernels::reference::testing::Tensor& dk,
                    const kernels::reference::testing::Tensor& dv);

// Reads 64 MiB, so that what is measured next begins without its data in caches that hold no more.
void FlushCaches();

// The most memory that this process has held since the last call, MiB; 0 where the system does not
// tell.
double TakePeakMib();

}  // namespace ringleader::bench
