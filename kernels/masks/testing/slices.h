// Masks as lists of slices, the way in which LongCA-bench (arXiv 2510.17896) states them: written
// from the definitions by itself, as an oracle for masks.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/masks/masks.h"

namespace ringleader::kernels::testing {

// What a slice shows of queries [query_begin, query_end) x keys [key_begin, key_end).
enum class SliceType {
  kFull,      // all of it
  kCausal,    // up to the diagonal that ends in its last query and last key
  kInverse,   // from the diagonal on that begins in its first query and first key
  kBicausal,  // both
};
struct Slice {
  int64_t query_begin, query_end, key_begin, key_end;
  SliceType type;

  bool Shows(int64_t query, int64_t key) const;
  // Pairs, in closed form.
  int64_t Area() const;
};

// The slices of a mask, which do not overlap.
std::vector<Slice> SlicesOf(const Mask& mask, int64_t tokens, std::span<const int32_t> documents);

// Whether a query sees a key, [tokens, tokens], by enumeration. A pair that two slices show counts
// twice, which no test lets pass.
std::vector<int> CountPairs(const std::vector<Slice>& slices, int64_t tokens);

}  // namespace ringleader::kernels::testing
