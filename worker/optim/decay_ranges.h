// Which elements of the flat buffer weight decay reaches, for kernels that update a range at a
// time.
#pragma once

#include <cstdint>
#include <vector>

#include "model_shape/parameter_layout.h"

namespace ringleader::optim {

struct DecayRange {
  int64_t begin = 0, end = 0;  // elements of the flat buffer
  bool decayed = false;
};

// [begin, end), multiples of the layout's alignment, cut by whether weights decay: matrices do,
// norms and biases do not. Rising and without gaps; every cut is aligned. Padding after a matrix
// counts as decayed: it is 0 and stays 0.
std::vector<DecayRange> CutByDecay(const model::ParameterLayout& layout, int64_t begin,
                                   int64_t end);

}  // namespace ringleader::optim
