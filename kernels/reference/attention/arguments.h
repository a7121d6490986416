// Checks of what callers pass: every pass names the argument that does not fit.
#pragma once

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

absl::Status CheckForward(const AttentionForwardArgs<float>& args);
absl::Status CheckBackward(const AttentionBackwardArgs<float>& args);

}  // namespace ringleader::kernels::reference
