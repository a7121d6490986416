// How many of its candidates a row keeps whose choice is moved (attention.balance;
// ringleader/kernels/balance_steps.h).
#pragma once

#include <cstdint>
#include <vector>

#include "ringleader/kernels/balance_steps.h"

namespace ringleader::kernels::reference {

// How many of `candidates` `move` would have a row keep that would keep `keep`, besides its own
// block, whatever that loses.
int64_t MovedKeep(int64_t keep, int64_t candidates, const ChoiceMove& move, uint32_t place);

// How many it then keeps, at least `moved`, so that of the candidates' `masses`, and of `own_mass`
// besides, no more is lost than the tolerance.
int64_t HeldKeep(std::vector<int64_t> masses, int64_t keep, int64_t moved, int64_t own_mass,
                 float tolerance);

}  // namespace ringleader::kernels::reference
