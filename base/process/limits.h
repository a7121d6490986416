// Limits of the process.
#pragma once

namespace ringleader {

// Raises the number of files and connections that may be open at once as far as the system lets
// this user (its hard limit): the usual default of 1,024 is fewer than the workers of one cluster,
// or than the connections of a trainer among some 200. Returns the number that now holds.
int RaiseOpenFileLimit();

}  // namespace ringleader
