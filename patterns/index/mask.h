// What a query may see of its document, or of the sequence where documents are not kept apart.
// Patterns choose among that.
#pragma once

#include <string_view>

namespace ringleader::patterns {

enum class Mask {
  kCausal,       // what is not later than it
  kFull,         // all of it
  kPrefixLm,     // the prefix, and what is not later than it (UL2, arXiv 2205.05131)
  kBlockCausal,  // everything up to the end of its block of `mask_block` tokens
};
// In the job file; aborts on a number that is no mask.
std::string_view MaskName(Mask mask);

}  // namespace ringleader::patterns
