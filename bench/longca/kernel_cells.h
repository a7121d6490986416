// Cells of one rank's kernels: masks as intervals of keys, alone and with lists of tiles.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/longca/cell.h"
#include "bench/longca/lengths/document_lengths.h"
#include "kernels/masks/masks.h"

namespace ringleader::bench {

inline constexpr int kLongestBlock = 8;

// Which tiles of a mask are visited.
struct Choice {
  enum class Kind {
    kAll,
    kUniform,  // each tile that the mask shows by itself with probability `density`
    // Blocks of 1 to kLongestBlock tiles, alike in all heads; each pair of them as a whole.
    kVariable,
    // As models choose: the first tile, those next to the diagonal, and columns and diagonals of
    // tiles that all rows of a head visit, until the share is reached.
    kLearned,
  };
  Kind kind = Kind::kAll;
  double density = 1;

  std::string name() const;  // "uniform 5 %"
};

// Forward and backward at `tokens`, in documents of such lengths, on `threads` threads.
std::vector<Cell> KernelCells(kernels::MaskKind mask, const Choice& choice, int64_t tokens,
                              int threads, int repetitions, const DocumentLengths& lengths = {});

}  // namespace ringleader::bench
