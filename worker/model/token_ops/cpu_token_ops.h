// TokenOps by the fused passes of kernels/reference, in fp32 on the CPU, rows split among threads.
// Results do not depend on the number of threads.
#pragma once

#include <memory>

#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

std::unique_ptr<TokenOps> NewCpuTokenOps(int threads);

}  // namespace ringleader::model
