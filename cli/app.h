// ringctl as a function, so that tests run it whole.
#pragma once

#include <string>
#include <vector>

#include "cli/context.h"

namespace ringleader::cli {

// Runs one command line (without the program's name) and returns its exit code. Results go to
// context.out, everything else to context.err.
int RunRingctl(const std::vector<std::string>& arguments, Context context);

}  // namespace ringleader::cli
