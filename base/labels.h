// Labels of tokens, as data gives them to models.
#pragma once

#include <cstdint>

namespace ringleader {

// There is no next token to predict here: the loss leaves the position out.
inline constexpr int64_t kIgnoreLabel = -100;

}  // namespace ringleader
