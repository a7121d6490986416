// What a test asks of the program stuck_trainer.
#pragma once

namespace ringleader::trainer::testing {

// A job of this name: rank 0 returns an error of its own after the others failed.
inline constexpr char kOwnErrorJob[] = "own-error";

}  // namespace ringleader::trainer::testing
