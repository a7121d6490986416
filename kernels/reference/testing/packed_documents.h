// Documents packed into a sequence, for tests: where they start.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference::testing {

// The first position of each position's document; `firsts` ascends and begins with 0.
std::vector<int32_t> DocumentStarts(int64_t tokens, const std::vector<int64_t>& firsts);

// First positions of random documents: some of one token, some that end with a tile, some of a few
// tokens within a tile, some of many tiles.
std::vector<int64_t> RandomDocuments(int64_t tokens, int tile, std::mt19937& random);

// MeanKeys::starts of the sequence; none: none.
std::vector<int32_t> KeyStarts(const std::vector<int32_t>& starts);

// What a layout gives its rank.
std::vector<int32_t> ShardStarts(const std::vector<int32_t>& starts, const ShardLayout& layout);

}  // namespace ringleader::kernels::reference::testing
