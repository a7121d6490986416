// What a test asks of the program stuck_trainer.
#pragma once

namespace ringleader::trainer::testing {

// A job of this name: rank 0 returns an error of its own after the others failed.
inline constexpr char kOwnErrorJob[] = "own-error";
// A job of this name and then a number: every rank fails at once with the status code of that
// number.
inline constexpr char kFailsWithJob[] = "fails-with-";

}  // namespace ringleader::trainer::testing
