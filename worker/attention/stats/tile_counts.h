// The tile counts of ring/ under the engines' namespace.
#pragma once

#include "ring/band_tiles.h"

namespace ringleader::attention {

using ring::BandTiles;
using ring::CausalTiles;

}  // namespace ringleader::attention
